"""Measures the time from the command to the end of round 1 with ten workers, and their memory.

    python -m tests.benchmarks.startup [--repeats 5] [--tiny]

It runs the main job, on digits. Memory is the peak over the run of the summed PSS (/proc/PID/smaps_rollup) of
coordinator, fork server and workers, sampled every 50 ms.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.benchmarks.common import options_of, spread, summary, watched


def one_run(out: Path, workers: int, rounds: int) -> tuple[float, float, float]:
    """Seconds to the end of round 1, seconds of the whole command, peak PSS in MB."""
    words = f"--algo fedlap_cov --workers {workers} --rounds {rounds}"
    peak, whole = watched(out, *words.split(), pause=0.05)
    return summary(out)["seconds_to_first_round"], whole, sum(peak) / 1e6


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    repeats, workers, rounds = (1, 2, 2) if options.tiny else (options.repeats, 10, 20)
    with tempfile.TemporaryDirectory() as scratch:
        runs = [one_run(Path(scratch) / str(i), workers, rounds) for i in range(repeats)]
    first, whole, peak = zip(*runs, strict=True)
    print(f"command to the end of round 1: {spread(list(first), ' s', 2)}")
    print(f"whole main job, {rounds} rounds: {spread(list(whole), ' s', 2)}")
    print(f"peak memory (PSS, summed): {spread(list(peak), ' MB', 0)}")


if __name__ == "__main__":
    main()
