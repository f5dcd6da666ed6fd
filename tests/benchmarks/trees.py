"""Measures what edge servers save and cost: bytes into the root, time of a round, memory of the root.

    python -m tests.benchmarks.trees [--tiny]

fedlap_cov, 100 clients as 4x25, the MLP d-100-10 and data of FashionMNIST's shape, 6 examples a client, 1
local epoch, 4 workers over tcp, 10 rounds. Three ways alternately, three times: without a tree, with one that
the coordinator computes, and with edge servers as processes. Seconds are the median of a round without the
first two. Memory is the peak of the coordinator's PSS, in a run of its own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.common import FULL, fashion_shaped, launch, options_of, round_seconds, summary
from tests.benchmarks.startup import pss

EXAMPLES = 6
WARM = 2


def command(clients: int, workers: int, rounds: int, data: Path, tree: str, processes: bool) -> list[str]:
    fraction = clients * EXAMPLES / FULL[0]
    return [
        *f"--algo fedlap_cov --dataset fashion_mnist --data-dir {data} --model mlp_small".split(),
        *f"--partition iid --clients {clients} --fraction {fraction:.6f} --transport tcp".split(),
        *f"--workers {workers} --rounds {rounds} --set epochs=1 --eval-every {rounds}".split(),
        *(["--tree", tree] if tree else []),
        *(["--edge-processes"] if processes else []),
    ]


def root_memory(out: Path, arguments: list[str]) -> int:
    """The peak of the coordinator's PSS in bytes, sampled every 0.1 s."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "launch", "--out", str(out), *arguments], stdout=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, pss(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"fedsim launch ended with {process.returncode}")
    return 1024 * peak


def into_root(out: Path) -> int:
    """Bytes of uploads, or of what comes up in their place, that reach the root in all rounds."""
    document = summary(out)
    kind = "edge" if "edge" in document["bytes"] else "algorithm"
    return sum(n for layers in document["bytes"][kind]["up"].values() for n in layers.values())


def main() -> None:
    options = options_of(__doc__).parse_args()
    edges, each, rounds, repeats = (2, 2, 3, 1) if options.tiny else (4, 25, 10, 3)
    workers, warm = (2, 1) if options.tiny else (4, WARM)
    tree = f"{edges}x{each}"
    ways = {"flat": ("", False), "tree": (tree, False), "edge processes": (tree, True)}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(scratch / "data")
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        sent: dict[str, int] = {}
        for i in range(repeats):
            for name, way in ways.items():
                arguments = command(edges * each, workers, rounds, data, *way)
                run = launch(scratch / f"{name.replace(' ', '-')}-{i}", *arguments)
                seconds[name].append(statistics.median(round_seconds(run, warm)))
                sent[name] = into_root(run)
        print(
            f"{tree}, {workers} workers\n| | bytes into the root a round | ms a round | of flat | MB, root |"
        )
        print("|---|---|---|---|---|")
        for name, way in ways.items():
            ratio = statistics.median(t / f for t, f in zip(seconds[name], seconds["flat"], strict=True))
            arguments = command(edges * each, workers, rounds, data, *way)
            memory = root_memory(scratch / f"{name.replace(' ', '-')}-memory", arguments)
            median = 1e3 * statistics.median(seconds[name])
            print(
                f"| {name} | {sent[name] // rounds:,} | {median:.0f} | {ratio:.2f} | {memory / 1e6:.0f} |",
                flush=True,
            )
        print(f"bytes into the root, flat / tree: {sent['flat'] / sent['edge processes']:.2f}")


if __name__ == "__main__":
    main()
