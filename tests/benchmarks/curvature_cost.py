"""fedlap_cov against fedlap, wall time per round.

    python -m tests.benchmarks.curvature_cost [--repeats 3] [--rounds 8]

MLP 784-200-100-10 on data of FashionMNIST's shape, 10 % of it over 10 clients by two Dirichlet draws,
10 local epochs, 2 workers; the two algorithms alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.common import fashion_shaped, launch, round_seconds, spread


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    job = (
        f"--workers 2 --clients 10 --dataset fashion_mnist --fraction 0.1 --model mlp "
        f"--rounds {options.rounds} --set epochs=10 --seed 62"
    )
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(Path(scratch) / "data")
        seconds: dict[str, list[float]] = {"fedlap": [], "fedlap_cov": []}
        for i in range(options.repeats):
            for algo, into in seconds.items():
                run = launch(
                    Path(scratch) / f"{algo}-{i}", "--algo", algo, "--data-dir", str(data), *job.split()
                )
                into.append(statistics.mean(round_seconds(run, warm=1)))
        ratios = [c / p for c, p in zip(seconds["fedlap_cov"], seconds["fedlap"], strict=True)]
    print(f"fedlap {spread(seconds['fedlap'], ' s')}, fedlap_cov {spread(seconds['fedlap_cov'], ' s')}")
    print(f"fedlap_cov / fedlap: {spread(ratios)}")


if __name__ == "__main__":
    main()
