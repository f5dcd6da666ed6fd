"""Measures the wall time of a round of fedlap_cov and of fedlap.

    python -m tests.benchmarks.curvature_cost [--repeats 3] [--rounds 8] [--tiny]

The model is the MLP 784-200-100-10. The data have FashionMNIST's shape; 10 % of them are split over 10
clients by two Dirichlet draws. A client trains for 10 local epochs, and there are 2 workers. The two
algorithms alternate.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from tests.benchmarks.common import FEW, FULL, fashion_shaped, launch, options_of, round_seconds, spread


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    repeats, rounds, epochs = (1, 2, 1) if options.tiny else (options.repeats, options.rounds, 10)
    job = (
        f"--workers 2 --clients 10 --dataset fashion_mnist --fraction 0.1 --model mlp "
        f"--rounds {rounds} --set epochs={epochs} --seed 62"
    )
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(Path(scratch) / "data", FEW if options.tiny else FULL)
        seconds: dict[str, list[float]] = {"fedlap": [], "fedlap_cov": []}
        for i in range(repeats):
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
