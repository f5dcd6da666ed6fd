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

import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from fedsim.experiment import Experiment
from tests.benchmarks.common import launch, options_of, round_seconds, spread, watched
from tests.benchmarks.floor import floor

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


def options_for(algo: str, hidden: int, rounds: int, more: Sequence[str]) -> list[str]:
    options = f"--algo {algo} --dataset digits --model {HERE}:mlp_{hidden} --clients {CLIENTS} --workers 2"
    return [*options.split(), "--rounds", str(rounds), "--set", "epochs=1", *more]


def states_of(out: Path) -> int:
    """Count the state files of the client that has most."""
    return max(len(list(folder.iterdir())) for folder in (out / "state").iterdir())


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
            out = Path(scratch) / "run"
            peak, _ = watched(out, *arguments, pause=0.05 if options.tiny else 0.5)
            disk = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            states = states_of(out)
        ratios = [mine / least for mine, least in zip(ours, floors, strict=True)]
        parts = ", ".join(f"{size / vector:.1f}" for size in peak if size > vector / 4)
        print(f"{algo}: floor {spread(floors, ' s')}, fedsim {spread(ours, ' s')}")
        print(f"{algo}: ratio {spread(ratios)}")
        print(f"{algo}: memory {sum(peak) / 1e6:,.0f} MB, {sum(peak) / vector:.0f} vectors ({parts})")
        print(f"{algo}: disk {disk / 1e6:,.0f} MB, at most {states} states a client", flush=True)


if __name__ == "__main__":
    main()
