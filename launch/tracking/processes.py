"""Start a process for each tracker and report failures, on the coordinator's side of --track."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from launch.tracking import Choice

END = 120.0
"""The seconds after the run in which trackers may write the remaining rounds before they are killed."""
LINGER = 1.0
"""Seconds that a process may take to end after it has closed its output."""


@dataclass
class TrackerProcess:
    """A tracker's process. printed: its standard output so far; a process that fails prints the reason."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    printed: bytes = b""
    ended: bool = False

    @staticmethod
    def start(folder: Path, name: str) -> TrackerProcess:
        """Start the process, or raise OSError. It ends when its input is closed or when this process ends."""
        log = folder / "logs" / f"track-{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.tracking.follow", str(folder.resolve()), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the coordinator
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return TrackerProcess(name, log, process)

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def notes(self) -> Iterator[str]:
        """Yield an error message if the process has failed. Do not wait for the process."""
        if self.ended:
            return
        with suppress(BlockingIOError):
            while got := os.read(self.output.fileno(), 1 << 12):
                self.printed += got
            code, why = self._reaped(), self.printed.decode(errors="replace").strip()
            if code:
                why = why or f"its process has ended with {code}"
                yield f"--track {self.name} is off, and the run continues: {why} ({self.log})"

    def _reaped(self) -> int:
        """Return the exit code of a process that has closed its output; kill it if it outlives LINGER."""
        with suppress(subprocess.TimeoutExpired):
            self.ended = True
            return self.process.wait(LINGER)
        return self.kill()

    def kill(self) -> int:
        """Kill the process and the processes that it has started; return the exit code."""
        self.ended = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def close_input(self) -> None:
        """Close the standard input of the process, which tells it that the run has ended."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()


@dataclass
class Tracking:
    """The trackers of a run. No method raises an error of a tracker."""

    folder: Path
    choices: Sequence[Choice]
    _running: list[TrackerProcess] = field(default_factory=list)
    _unsaid: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start the trackers' processes; note those that cannot be started."""
        for choice in self.choices:
            try:
                self._running.append(TrackerProcess.start(self.folder, choice.name))
            except OSError as e:
                self._unsaid.append(f"--track {choice.name} is off, and the run continues: {e}")

    def notes(self) -> Iterator[str]:
        """Yield messages for users, each once."""
        while self._unsaid:
            yield self._unsaid.pop(0)
        for tracker in self._running:
            yield from tracker.notes()

    def finish(self, report: bool, seconds: float = END) -> Iterator[str]:
        """Let the trackers write the last rounds; wait at most `seconds` for them to end. Yield a note for
        each failure. report: write RUN/report.html first, so that the trackers keep it with the run."""
        if report:
            yield from _report(self.folder)
        for tracker in self._running:
            tracker.close_input()
        until = time.monotonic() + seconds
        while waiting := [tracker for tracker in self._running if not tracker.ended]:
            left = until - time.monotonic()
            if left <= 0:
                break
            select.select([tracker.output for tracker in waiting], [], [], left)
            yield from self.notes()
        for tracker in waiting:
            tracker.kill()
            yield f"--track {tracker.name} has not ended within {seconds:g} s ({tracker.log})"
        for tracker in self._running:
            tracker.output.close()


def _report(folder: Path) -> Iterator[str]:
    """Write the run's report in a separate process, which imports pandas; yield a note if this fails."""
    command = [sys.executable, "-m", "launch", "report", str(folder.resolve())]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=END, env=_environment(), start_new_session=True
        )
        why = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as e:
        why = str(e)
    if why:
        yield f"--track: {folder / 'report.html'} was not written: {why.splitlines()[-1]}"


def _environment() -> dict[str, str]:
    """Return an environment in which a new process finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
