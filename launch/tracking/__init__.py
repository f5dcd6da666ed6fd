"""Write a run's numbers to TensorBoard, MLflow, Weights & Biases or Trackio while it runs (--track).

Each tracker has its own process, which reads the files that the run's recorder writes: metrics.jsonl,
ledger.csv and the manifest. The coordinator imports no tracker, and waits for trackers only after the run. A
tracker that raises an error, hangs or ends its process does not affect the run. A resumed run continues from
the last round that its tracker has. This module imports nothing heavy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fedsim.errors import unknown
from fedsim.extras import not_installed

NONE = "none"
END = 120.0
"""The seconds after the run in which trackers may write the remaining rounds before they are killed."""
TRACKERS = {
    "tensorboard": "event files for TensorBoard",
    "mlflow": "a run in MLflow",
    "wandb": "a run in Weights & Biases, offline",
    "trackio": "a run in Trackio",
}
"""The trackers by name, which is also the name of the package and the extra, with what each one writes."""


def selected(text: str) -> tuple[str, ...]:
    """Return the trackers that a text such as tensorboard,mlflow names; () for "" and "none"."""
    names = [name.strip() for name in text.split(",") if name.strip()] if text.strip() != NONE else []
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return tuple(dict.fromkeys(names))


def check_installed(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed, before a run begins. Import no package."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a plain folder of this name, such as wandb creates
            raise not_installed(name, f"--track {name}", name)


@dataclass
class Tracking:
    """The trackers of a run, by name. No method raises an error of a tracker."""

    folder: Path
    names: Sequence[str]
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _unsaid: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start the processes. Each one ends when its input is closed or when this process ends."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for name in self.names:
            try:
                with self._log(name).open("ab") as log:
                    self._running[name] = subprocess.Popen(
                        [sys.executable, "-m", "launch.tracking.follow", str(self.folder.resolve()), name],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for the coordinator
                    )
            except OSError as e:
                self._unsaid.append(f"--track {name} is off, and the run continues: {e}")

    def notes(self) -> Iterator[str]:
        """Yield a line for each tracker that has failed since the last call. Do not wait for any."""
        while self._unsaid:
            yield self._unsaid.pop(0)
        for name, process in [*self._running.items()]:
            code = process.poll()
            if code is None:
                continue
            self._closed(name)
            if code:
                last = self._log(name).read_text(errors="replace").strip().rpartition("\n")[2]
                reason = last if code == 1 else f"its process has ended with {code}"
                yield f"--track {name} is off, and the run continues: {reason} ({self._log(name)})"

    def finish(self, seconds: float = END) -> Iterator[str]:
        """Let the trackers write the last rounds; wait at most `seconds`. Yield a line for each failure."""
        for process in self._running.values():
            assert process.stdin is not None
            process.stdin.close()
        until = time.monotonic() + seconds
        for name, process in [*self._running.items()]:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self._closed(name).wait()
                yield f"--track {name} has not ended within {seconds:g} s ({self._log(name)})"
        yield from self.notes()

    def _closed(self, name: str) -> subprocess.Popen[bytes]:
        """Return the process of a tracker, whose input is now closed and which is forgotten."""
        process = self._running.pop(name)
        assert process.stdin is not None
        process.stdin.close()
        return process

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"track-{name}.log"
