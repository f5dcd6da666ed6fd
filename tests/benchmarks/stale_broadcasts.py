"""Measures what old broadcasts cost the coordinator of an asynchronous run: their number, and its memory.

    python -m tests.benchmarks.stale_broadcasts [--tiny]

fedlap_cov, ten clients of which three are ten times slower (docs/recipes/three_slow_of_ten.csv), the MLP
784-200-100-10 and 6,000 examples of FashionMNIST's shape, 1 local epoch, 2 workers. The same number of tasks
synchronously, with B = 3 and with B = 1. Memory is the peak of the coordinator's PSS. A broadcast is kept
while a client computes from it; its checkpoint lies on the disk as long.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from launch.runs.restored import RestoredRun
from tests.benchmarks.common import FULL, fashion_shaped, options_of
from tests.benchmarks.trees import root_memory

LINK = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "three_slow_of_ten.csv"
FRACTION = 0.1


def kept(run: Path, rounds: int) -> tuple[int, int]:
    """The most broadcasts in use at the beginning of a round, and the largest staleness of an upload."""
    steps = RestoredRun.open(run).problem.asynchrony.schedule
    if steps is None:
        return 1, 0
    staleness = max(r - answered for r in range(1, rounds + 1) for answered in steps.step(r).answered)
    return max(len(steps.step(r).in_use) for r in range(1, rounds + 1)), staleness


def main() -> None:
    options = options_of(__doc__).parse_args()
    tasks = 60 if options.tiny else 1500
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(scratch / "data", (round(FRACTION * FULL[0]), 500))
        print("| | rounds | broadcasts in use, at most | staleness, at most | MB, root |")
        print("|---|---|---|---|---|")
        for buffer in (10, 3, 1):
            rounds = tasks // buffer
            rule = [] if buffer == 10 else ["--async", f"fedbuff:{buffer}"]
            name = "synchronous" if buffer == 10 else f"B = {buffer}"
            run = scratch / str(buffer)
            memory = root_memory(
                run,
                [
                    *f"--algo fedlap_cov --dataset fashion_mnist --data-dir {data} --model mlp".split(),
                    *f"--link {LINK} --set epochs=1 --workers 2 --quiet".split(),
                    *f"--rounds {rounds} --eval-every {rounds}".split(),
                    *rule,
                ],
            )
            used, staleness = kept(run, rounds)
            print(f"| {name} | {rounds} | {used} | {staleness} | {memory / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
