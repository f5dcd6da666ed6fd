"""Write a run's numbers to TensorBoard, MLflow, Weights & Biases or Trackio while it runs (--track).

Each tracker has its own process, which reads the files that the run's recorder writes: metrics.jsonl,
ledger.csv and the manifest. The coordinator imports no tracker, and waits for trackers only after the run. A
tracker that raises an error, hangs or ends its process does not affect the run. This module imports nothing
heavy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from fedsim.errors import unknown
from fedsim.extras import not_installed
from workers.storage.atomic_files import disk_errors

NONE = "none"
END = 120.0
"""The seconds after the run in which trackers may write the remaining rounds before they are killed."""
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
"""The names of the trackers, which are also the names of their packages and extras."""


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


class Tracking:
    """The trackers of a run, by name. No method raises an error of a tracker."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Start the processes. Each one ends when finish() closes its input, or when this process ends."""
        self._folder, self._running = folder, dict[str, subprocess.Popen[bytes]]()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        read, write = os.pipe()
        self._input = os.fdopen(write, "wb")
        with os.fdopen(read, "rb") as end:
            for name in names:
                with disk_errors(f"--track {name}"), self._log(name).open("ab") as log:
                    self._running[name] = subprocess.Popen(
                        [sys.executable, "-m", "launch.tracking.follow", str(folder.resolve()), name],
                        stdin=end,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for the coordinator
                    )

    def notes(self) -> Iterator[str]:
        """Yield a line for each tracker that has failed since the last call. Do not wait for any."""
        for name, process in [*self._running.items()]:
            code = process.poll()
            if code is not None:
                del self._running[name]
            if code:
                last = self._log(name).read_text(errors="replace").strip().rpartition("\n")[2]
                reason = last if code == 1 else f"its process has ended with {code}"
                yield f"--track {name} is off, and the run continues: {reason} ({self._log(name)})"

    def finish(self, seconds: float = END) -> Iterator[str]:
        """Let the trackers write the last rounds; wait at most `seconds`. Yield a line for each failure."""
        self._input.close()
        until = time.monotonic() + seconds
        for name, process in [*self._running.items()]:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self._running.pop(name).wait()
                yield f"--track {name} has not ended within {seconds:g} s ({self._log(name)})"
        yield from self.notes()

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"track-{name}.log"
