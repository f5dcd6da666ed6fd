"""Measures what a round costs on a model of millions of parameters: seconds, memory and disk.

    python -m tests.benchmarks.model_size [--hidden 4000] [--algos fedavg,fedlap_cov] [--repeats 3] [--tiny]

The model is the MLP 64-H-H-10 on digits: P = 16,334,010 with H = 4000. There are 8 clients, a batch of 32,
1 local epoch, and 2 workers on 2 cores. The floor is the same training, curvature and evaluation in two
processes without messages and files, measured alternately. Memory is the peak of the summed PSS of all
processes, sampled every 0.5 s in a run of its own, because looking at it takes time from the others; a vector
is one of P float32. Disk is what the run's folder holds at the end. The first rounds are slower, because the
kernel has to find the memory: WARM of them are not counted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedsim.experiment import Experiment
from tests.benchmarks.common import launch, options_of, round_seconds, spread
from tests.benchmarks.floor import floor
from tests.benchmarks.startup import family, pss

HERE = Path(__file__).resolve()
CLIENTS = 8
WARM = 3


def wide(hidden: int, shape: tuple[int, ...], classes: int) -> nn.Module:
    """inputs-H-H-classes with ReLU."""
    inputs = 1
    for side in shape:
        inputs *= side
    layers = (nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(hidden, classes))


def mlp_40(shape: tuple[int, ...], classes: int) -> nn.Module:
    return wide(40, shape, classes)


def mlp_4000(shape: tuple[int, ...], classes: int) -> nn.Module:
    return wide(4000, shape, classes)


def mlp_10000(shape: tuple[int, ...], classes: int) -> nn.Module:
    """P = 100,760,010."""
    return wide(10_000, shape, classes)


def parameters(hidden: int) -> int:
    return (64 + 1 + hidden + 1 + 10) * hidden + 10


@dataclass(frozen=True)
class Run:
    """peak: the summed PSS in bytes. disk: bytes of the run's folder. states: most files of a client."""

    peak: int
    by_process: list[int]
    disk: int
    states: int


def options_for(algo: str, hidden: int, rounds: int, more: Sequence[str]) -> list[str]:
    options = f"--algo {algo} --dataset digits --model {HERE}:mlp_{hidden} --clients {CLIENTS} --workers 2"
    return [*options.split(), "--rounds", str(rounds), "--set", "epochs=1", *more]


def watched(out: Path, hidden: int, options: Sequence[str]) -> Run:
    """One run as a user would start it, and its memory."""
    command = [sys.executable, "-m", "launch", "launch", "--out", str(out), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak, by_process = 0, [0]
    while process.poll() is None:
        sizes = [1024 * pss(pid) for pid in family(process.pid)]
        if sum(sizes) > peak:
            peak, by_process = sum(sizes), sorted(sizes, reverse=True)
        time.sleep(0.5 if hidden > 40 else 0.05)
    if process.returncode:
        raise SystemExit(f"fedsim launch ended with {process.returncode}")
    files = [file for file in out.rglob("*") if file.is_file()]
    per_client = [len(list(folder.iterdir())) for folder in (out / "state").iterdir()]
    disk = sum(file.stat().st_size for file in files)
    return Run(peak, by_process, disk, max(per_client, default=0))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--hidden", type=int, choices=(40, 4000, 10000), default=4000)
    parser.add_argument("--algos", default="fedavg,fedlap_cov")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("more", nargs="*", help="further options of fedsim launch, after --")
    options = parser.parse_args()
    hidden, repeats, rounds = (
        (40, 1, WARM + 1) if options.tiny else (options.hidden, options.repeats, options.rounds)
    )
    vector = 4 * parameters(hidden)
    print(f"P = {parameters(hidden):,}; a vector has {vector / 1e6:.1f} MB")
    for algo in options.algos.split(","):
        experiment = Experiment(
            algo=algo,
            dataset="digits",
            model=f"{HERE}:mlp_{hidden}",
            clients=CLIENTS,
            rounds=rounds - WARM,
            hyperparameters={"epochs": 1},
        )
        floors: list[float] = []
        ours: list[float] = []
        arguments = options_for(algo, hidden, rounds, options.more)
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as scratch:
                floors.append(floor(experiment, None, WARM))
                seconds = round_seconds(launch(Path(scratch) / "run", *arguments), WARM)
                ours.append(sum(seconds) / len(seconds))
        with tempfile.TemporaryDirectory() as scratch:
            largest = watched(Path(scratch) / "run", hidden, arguments)
        ratios = [mine / least for mine, least in zip(ours, floors, strict=True)]
        parts = ", ".join(f"{size / vector:.1f}" for size in largest.by_process if size > vector / 4)
        print(f"{algo}: floor {spread(floors, ' s')}, fedsim {spread(ours, ' s')}")
        print(f"{algo}: ratio {spread(ratios)}")
        print(f"{algo}: memory {largest.peak / 1e6:,.0f} MB, {largest.peak / vector:.0f} vectors ({parts})")
        print(
            f"{algo}: disk {largest.disk / 1e6:,.0f} MB, at most {largest.states} states a client", flush=True
        )


if __name__ == "__main__":
    main()
