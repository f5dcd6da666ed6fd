"""From command to the end of round 1 with ten workers, and what ten workers weigh.

    python -m tests.benchmarks.startup [--repeats 5]

Digits, the main job. Memory is the peak over the run of the summed PSS (/proc/PID/smaps_rollup) of
coordinator, fork server and workers, sampled every 50 ms.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.common import spread, summary

COMMAND = "--workers 10 --algo fedlap_cov --rounds 20"


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(p for child in children for p in family(int(child)))]


def pss(pid: int) -> int:
    """Proportional set size in kB; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return 0


def one_run(out: Path) -> tuple[float, float, float]:
    """Seconds to the end of round 1, seconds of the whole command, peak PSS in MB."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "launch", "--out", str(out), *COMMAND.split()],
        stdout=subprocess.DEVNULL,
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(pss(p) for p in family(process.pid)))
        time.sleep(0.05)
    whole = time.monotonic() - began
    return summary(out)["seconds_to_first_round"], whole, peak / 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [one_run(Path(scratch) / str(i)) for i in range(options.repeats)]
    first, whole, peak = zip(*runs, strict=True)
    print(f"command to the end of round 1: {spread(list(first), ' s', 2)}")
    print(f"whole main job, 20 rounds: {spread(list(whole), ' s', 2)}")
    print(f"peak memory (PSS, summed): {spread(list(peak), ' MB', 0)}")


if __name__ == "__main__":
    main()
