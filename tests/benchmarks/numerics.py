"""Measures what equal bits on mixed machines cost: the probe at registration, and --numerics portable.

    python -m tests.benchmarks.numerics [--repeats 3] [--tiny]

Probe: one digest in this process after the warm-up, as a worker computes it before it joins. Portable:
seconds of a round in process with native and portable numerics, run alternately; a run's median round.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from protocols import find
from tests.benchmarks.common import FEW, FULL, fashion_shaped, launch, options_of, spread, summary
from workers.assembly import fix_numerics
from workers.probe import probe_digest
from workers.worker.main import warm_up

ALGORITHMS = ("fedavg", "fedlap_cov", "ivon_admm")


def probe_milliseconds(experiment: Experiment, data: Path | None, repeats: int) -> list[float]:
    """Of one probe after the warm-up, each with a problem of its own."""
    taken = []
    for _ in range(repeats):
        problem = Problem.build(experiment, build_algorithm(find(experiment.algo), {}), data)
        warm_up(problem)
        began = time.perf_counter()
        probe_digest(problem)
        taken.append(1000 * (time.perf_counter() - began))
    return taken


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    repeats, rounds = (1, 2) if options.tiny else (options.repeats, 6)
    fix_numerics(1, "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        data = fashion_shaped(Path(scratch) / "data", FEW if options.tiny else FULL)
        for algo in ALGORITHMS:
            for experiment in (
                Experiment(algo=algo),
                Experiment(algo=algo, dataset="fashion_mnist", fraction=0.1, model="mlp"),
            ):
                taken = probe_milliseconds(experiment, data, repeats)
                print(f"probe, {algo} on {experiment.dataset}: {spread(taken, ' ms', 0)}", flush=True)
        for algo in ALGORITHMS:
            job = ("--algo", algo, "--dataset", "fashion_mnist", "--fraction", "0.1", "--model", "mlp")
            job += ("--workers", "0", "--rounds", str(rounds), "--data-dir", str(data), "--eval-samples", "0")
            ratios = []
            for n in range(repeats):
                seconds = [
                    summary(launch(Path(scratch) / f"{algo}-{n}-{how}", *job, "--numerics", how))[
                        "seconds_round_median"
                    ]
                    for how in ("native", "portable")
                ]
                ratios.append(seconds[1] / seconds[0])
            print(
                f"portable / native, {algo}, MLP of 178,110 parameters: {spread(ratios, '', 2)}", flush=True
            )


if __name__ == "__main__":
    main()
