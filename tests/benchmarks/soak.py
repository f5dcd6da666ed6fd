"""A long run whose memory must not grow (docs/reliability.md, F26).

    python -m tests.benchmarks.soak --rounds 100000          half an hour on two idle cores

Real processes, as short rounds as there are; the resident memory of the coordinator and its workers is taken
a hundred times, and the slope is that of the second half, when every cache is full.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

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
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["round"]) if lines else -1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100_000)
    rounds = parser.parse_args().rounds
    seen: list[tuple[int, list[float]]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as parent:
        folder, every = Path(parent) / "run", max(1, rounds // SAMPLES)
        running = start(
            "launch", *JOB, "--rounds", str(rounds), "--eval-every", str(every), "--out", str(folder)
        )
        try:
            while running.process.poll() is None:
                running.listen(1.0)
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
