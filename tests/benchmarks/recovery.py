"""Measures the cost of being able to recover, and the time of a recovery.

    python -m tests.benchmarks.recovery [--tiny]

Ratios are taken side by side in one run: the same rounds with states, checkpoints and journal, and with those
three left out, in turn. Times are of real processes.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from fedsim.experiment import Experiment
from launch.configuration.execution import Execution
from launch.runs.folder import RunFolder
from launch.session.run import launch
from tests.benchmarks import steady_state as steady
from tests.benchmarks.common import FEW, FULL, fashion_shaped, options_of
from tests.support.commands import fedsim, start
from workers.storage.checkpoints import Checkpoints
from workers.storage.journal import Journal

PAIRS = 5


@contextmanager
def nothing_kept() -> Iterator[None]:
    """No state file, checkpoint or journal record; states stay in the workers' caches."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(Checkpoints, "commit", lambda *_: None))
        patches.enter_context(patch.object(Journal, "append", lambda *_, **__: None))
        patches.enter_context(patch("workers.storage.client_states.write_atomically", lambda *_, **__: 0))
        patches.enter_context(patch("launch.session.recorder.summarise", lambda *_, **__: SUMMARY))
        yield


SUMMARY = {"status": "done", "bytes": {}, "bytes_down": 0, "bytes_up": 0}


def round_seconds(experiment: Experiment, folder: Path, data: Path | None, kept: bool) -> float:
    """Median over the rounds after the first."""
    with ExitStack() as how:
        if not kept:
            how.enter_context(nothing_kept())
            how.enter_context(patch("launch.session.display.Display.traffic_summary", lambda *_: None))
        launch(
            experiment,
            Execution(workers=0, out=str(folder), data_dir=str(data) if data else None),
            quiet=True,
        )
    return float(RunFolder.open(folder).metrics["seconds"].iloc[2:].median())


def cost(experiment: Experiment, data: Path | None, repeats: int) -> tuple[float, float, float]:
    """Ratio with and without, of medians over the repetitions; and both in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [
            [round_seconds(experiment, Path(folder) / f"{n}-{kept}", data, kept) for kept in (True, False)]
            for n in range(repeats)
        ]
    with_it, without = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    return statistics.median(a / b for a, b in pairs), with_it, without


def resumed(folder: Path) -> float:
    """Seconds from the start of `fedsim resume` to its first commit."""
    running = start("launch", "--workers", "2", "--clients", "2", "--rounds", "12", "--out", str(folder))
    running.wait_for(" 6/12 ")
    running.kill()
    fedsim("resume", str(folder))
    return float(RunFolder.open(folder).summary["seconds_to_first_round"])


def killed(folder: Path, kills: bool) -> float:
    """Seconds from round 3 to the end of a run, one of whose two workers is killed after round 3."""
    running = start("launch", "--workers", "2", "--clients", "2", "--rounds", "30", "--out", str(folder))
    running.wait_for(" 3/30 ")
    began = time.monotonic()
    if kills:
        known = json.loads((folder / "processes.json").read_text())
        os.kill(next(p["pid"] for p in known if p["role"] == "worker"), signal.SIGKILL)
    running.rest()
    return time.monotonic() - began


def main() -> None:
    tiny = options_of(__doc__).parse_args().tiny
    repeats, rounds, examples = (1, 4, FEW) if tiny else (PAIRS, 20, FULL)
    with tempfile.TemporaryDirectory() as parent:
        data = fashion_shaped(Path(parent), examples)
        jobs: list[tuple[str, Experiment, Path | None]] = [("main job", Experiment(rounds=rounds), None)]
        for algo in ("fedavg", "fedlap_cov"):
            jobs.append((f"steady state, {algo}", steady.experiment(algo, min(12, rounds)), data))
        for name, experiment, files in jobs:
            ratio, with_it, without = cost(experiment, files, repeats)
            print(f"{name}, in process: {with_it:.1f} ms a round, {without:.1f} without; ratio {ratio:.3f}")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        times = [resumed(folder / f"r{n}") for n in range(repeats)]
        span = f"{min(times):.2f}-{max(times):.2f}"
        print(f"resume to the first commit: {statistics.median(times):.2f} s ({span})")
        pairs = [[killed(folder / f"k{n}-{k}", k) for k in (True, False)] for n in range(repeats)]
        lost = statistics.median(a - b for a, b in pairs)
        print(f"a worker killed in a run of two: {lost:.2f} s longer, median of {len(pairs)}")


if __name__ == "__main__":
    main()
