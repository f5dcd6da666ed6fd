"""Measures the memory of a long run, which must not grow (docs/reliability.md, F26).

    python -m tests.benchmarks.soak --rounds 100000 [--tiny]          half an hour on two idle cores

It starts real processes, with as short rounds as there are. The resident memory of the coordinator and its
workers is taken a hundred times. The slope is that of the second half, when every cache is full.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.benchmarks.common import options_of
from tests.support.commands import start

JOB = (
    *("--workers", "2", "--clients", "2", "--model", "logistic", "--algo", "fedlap_cov"),
    *("--set", "local.epochs=1", "--set", "local.batch_size=512"),
)
SAMPLES = 100
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int) -> float:
    """MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6


def rounds_done(folder: Path) -> int:
    """The number of the last round; -1 before the first one."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["round"]) if lines else -1


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    options = parser.parse_args()
    rounds, pause = (400, 0.1) if options.tiny else (options.rounds, 1.0)
    seen: list[tuple[int, list[float]]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as parent:
        folder, every = Path(parent) / "run", max(1, rounds // SAMPLES)
        running = start(
            "launch", *JOB, "--rounds", str(rounds), "--eval-every", str(every), "--out", str(folder)
        )
        try:
            while running.process.poll() is None:
                running.listen(pause)
                if (folder / "processes.json").exists() and rounds_done(folder) > (
                    seen[-1][0] if seen else 0
                ):
                    label = json.loads((folder / "processes.json").read_text())
                    pids = [p["pid"] for p in label if p["role"] in ("coordinator", "worker")]
                    with suppress(FileNotFoundError):  # the run has just ended
                        seen.append((rounds_done(folder), [resident(pid) for pid in pids]))
        finally:
            running.kill()
        status = json.loads((folder / "summary.json").read_text())["status"]
    late = seen[len(seen) // 2 :]
    at, memory = np.array([r for r, _ in late]), np.array([m for _, m in late])
    slopes = 1000 * np.polyfit(at, memory, 1)[0]
    print(f"{status} after {rounds:,} rounds, {time.monotonic() - began:.0f} s; coordinator, then workers:")
    for number, sizes in (seen[0], late[0], late[-1]):
        print(f"    round {number:>7,}: {', '.join(f'{m:.1f}' for m in sizes)} MB")
    print(f"    slope of the second half: {', '.join(f'{s:+.4f}' for s in slopes)} MB per 1,000 rounds")


if __name__ == "__main__":
    main()
