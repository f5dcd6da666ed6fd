"""Measures a run on two node agents of this machine against the same run with local workers.

    python -m tests.benchmarks.nodes [--repeats 3] [--tiny]

Seconds from the agents' start to the end of round 1, the median of a round over CURVE against ipc (run
alternately), and the memory of a worker: what ten workers add to the agents' summed PSS over two workers, by
eight.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.benchmarks.common import launch, options_of, spread, summary
from tests.benchmarks.startup import family, pss

JOB = ("--algo", "fedlap_cov")


def on_nodes(out: Path, workers: int, rounds: int) -> tuple[float, float, float]:
    """Seconds to the end of round 1 from the agents' start, seconds of a round, and the agents' PSS in MB."""
    run = [sys.executable, "-m", "launch"]
    listen = ("--remote-workers", str(workers), "--bind", "tcp://127.0.0.1:*", "--out", str(out))
    coordinator = subprocess.Popen(
        [*run, "launch", *JOB, *listen, "--rounds", str(rounds)], stdout=subprocess.DEVNULL
    )
    agents: list[subprocess.Popen[bytes]] = []
    try:
        while not (out / "join.json").exists():
            assert coordinator.poll() is None, "the coordinator has ended"
            time.sleep(0.01)
        began, first, peak = time.monotonic(), 0.0, 0.0
        join = ("node", "--join", str(out / "join.json"), "--workers", str(workers // 2))
        agents = [subprocess.Popen([*run, *join], stdout=subprocess.DEVNULL) for _ in range(2)]
        while coordinator.poll() is None:
            if not first and rounds_of(out) >= 2:
                first = time.monotonic() - began
            peak = max(peak, sum(pss(p) for agent in agents for p in family(agent.pid)) / 1000)
            time.sleep(0.05)
        for agent in agents:
            agent.wait(60)
    finally:
        for process in (coordinator, *agents):
            with suppress(ProcessLookupError):
                process.kill()
    return first, summary(out)["seconds_round_median"], peak


def rounds_of(out: Path) -> int:
    """Lines of metrics.jsonl, the one of round 0 included."""
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    repeats, workers, rounds = (1, 4, 3) if options.tiny else (options.repeats, 10, 20)
    first, ratios, each = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        for n in range(repeats):
            here = launch(
                Path(scratch) / f"here{n}", *JOB, "--workers", str(workers), "--rounds", str(rounds)
            )
            seconds, a_round, peak = on_nodes(Path(scratch) / f"nodes{n}", workers, rounds)
            _, _, few = on_nodes(Path(scratch) / f"few{n}", 2, rounds)
            first.append(seconds)
            ratios.append(a_round / summary(here)["seconds_round_median"])
            each.append((peak - few) / (workers - 2))
    print(f"agents' start to the end of round 1, {workers} workers: {spread(first, ' s', 1)}")
    print(f"a round on node agents / with local workers: {spread(ratios, '', 2)}")
    print(f"memory of one more worker (PSS): {spread(each, ' MB', 0)}")


if __name__ == "__main__":
    main()
