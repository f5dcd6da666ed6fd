"""A stage of the benchmark: where it computes, how it reports, and the fedsim commands that it starts.

No command outlives its stage, or its time limit. Commands of several jobs run side by side; there are no
threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.processes.fork_server import die_with_parent

LOOK = 0.05
"""Seconds between two looks at the commands that run."""


@dataclass
class Stage:
    """device: cuda:0 or cpu. scratch: its folder. data: that of data sets. deadline: its end by
    time.monotonic(). send: gives figures, by name, to the process that writes them down."""

    name: str
    device: str
    tiny: bool
    scratch: Path
    data: Path | None
    deadline: float
    send: Callable[[dict[str, Any]], None]
    failures: list[str] = field(default_factory=list)

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def left(self) -> float:
        """Seconds for a command that starts now."""
        return max(1.0, self.deadline - time.monotonic() - 2.0)

    def report(self, line: str, figures: Mapping[str, Any] | None = None) -> None:
        """Print a line, and keep its figures."""
        print(f"{self.name}: {line}", flush=True)
        self.send(dict(figures or {}))

    def fail(self, part: str, why: object) -> None:
        """Report a failure of a part of the stage, or of the stage ("")."""
        name = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else str(why)
        reason = " ".join(name.split())[:500]
        self.failures.append(f"{part}: {reason}" if part else reason)
        print(f"{' '.join((self.name, part)).strip()} failed: {reason}", flush=True)
        self.send({"failures": self.failures})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A block whose exception is reported, and does not end the stage."""
        try:
            yield
        except Exception as e:
            self.fail(name, e)

    def lanes(self, count: int) -> tuple[str, ...]:
        """The option for clients that a worker computes at once; a CPU computes one at a time."""
        return ("--lanes", str(count)) if self.gpu else ()

    def launch(self, name: str, *arguments: str, **how: Any) -> Command:
        """`fedsim launch` on the stage's device, with the run folder NAME in the stage's folder."""
        words = ("launch", *arguments, "--devices", self.device, "--out", str(self.scratch / name))
        return self.command(name, *words, **how)

    def command(self, name: str, *words: str, **how: Any) -> Command:
        """A command of fedsim. Its run folder, if it has one, is NAME in the stage's folder."""
        return Command(words, self.scratch / name, **{"seconds": self.left, **how})


@dataclass
class Command:
    """One process. until: a condition, looked at every now and then, under which it gets SIGKILL, it alone.
    variables: of its environment, besides this process's."""

    words: tuple[str, ...]
    run: Path
    seconds: float
    until: Callable[[], bool] = lambda: False
    variables: Mapping[str, str] = field(default_factory=dict)
    code: int | None = None
    taken: float = 0.0
    """Wall seconds, once it has ended."""
    stopped: str = ""
    """Why it was killed."""

    def start(self) -> None:
        parent, self.log = os.getpid(), self.run.with_suffix(f".{self.words[0]}.log")
        self._began = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "launch", *self.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.variables,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )

    def ended(self) -> bool:
        """Look at it, and end it if it is time."""
        if not self.stopped and self._process.poll() is None:
            if time.monotonic() - self._began > self.seconds:
                self.stopped = f"it was not over after {self.seconds:.0f} s"
                os.killpg(self._process.pid, signal.SIGKILL)
            elif self.until():
                self.stopped = "killed"
                self._process.kill()
        self.code = self._process.poll()
        self.taken = time.monotonic() - self._began
        return self.code is not None

    @property
    def error(self) -> str:
        """Why it failed, with the last lines of its workers' logs; "" if it did not."""
        if self.code == 0:
            return ""
        ends = [_last_line(log) for log in (self.log, *sorted(self.run.glob("logs/*.log"))[:3])]
        return "; ".join(filter(None, [self.stopped or f"exit code {self.code}", *ends]))

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary; {} if there is none."""
        return read_summary(self.run)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the rounds so far, from round 0."""
        try:
            lines = (self.run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]


Job = Generator[Command, None, None]
"""Yields commands, and continues when each has ended."""


def _last_line(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2]


def read_summary(run: Path) -> dict[str, Any]:
    """The summary of a run folder; {} if there is none."""
    try:
        loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return loaded


def run_jobs(jobs: Iterable[Job], at_once: int = 1) -> None:
    """Run the commands of each job one after the other, and so many jobs side by side."""
    waiting, running = list(jobs), list[tuple[Job, Command]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            _advance(waiting.pop(0), running)
        for pair in [pair for pair in running if pair[1].ended()]:
            running.remove(pair)
            _advance(pair[0], running)
        time.sleep(LOOK)


def _advance(job: Job, running: list[tuple[Job, Command]]) -> None:
    command = next(job, None)
    if command is not None:
        command.start()
        running.append((job, command))
