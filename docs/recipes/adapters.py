"""Fine-tuning a pretrained network: all of it, its head, or low-rank adapters; accuracy against bytes.

    python docs/recipes/adapters.py --data-dir DIR      15 minutes; writes docs/results/adapters.{png,md}

An MLP (784-500-300-10) is trained on FashionMNIST in one place. Ten unlike clients then fine-tune it on a
twentieth of MNIST. The step size of every row is chosen on held-out training rows with a seed of its own.
Hu et al. 2021, https://arxiv.org/abs/2106.09685, is where the adapters come from.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from report import BLACK, BLUE, GREEN, ORANGE, ROOT, SKY, VERMILION, Page, figure, table

import fedsim
from fedsim.errors import TaskError

ALGORITHMS = ("fedavg", "fedlap_cov", "ivon_admm")
HIDDEN = "fc1/fc2"


@dataclass(frozen=True)
class Way:
    """One way to fine-tune: what is added to the model, which parameters are trained ('': all)."""

    label: str
    modifiers: str
    train: str
    colour: str


def ways(weights: Path, head: str, ranks: Sequence[int]) -> list[Way]:
    """From scratch; then, from the pretrained weights: everything, the head, adapters of every rank."""
    start = f"+weights:{weights}"
    colours = (SKY, BLUE, GREEN)
    return [
        Way("from scratch", "", "", BLACK),
        Way("full", start, "", VERMILION),
        Way("head", start, f"{head}.*", ORANGE),
        *(
            Way(f"LoRA r = {r}", f"{start}+lora:r={r},target={HIDDEN},also={head}", "", colour)
            for r, colour in zip(ranks, colours, strict=False)
        ),
    ]


@dataclass(frozen=True)
class Study:
    """What is run; the quick form needs no files."""

    pretraining: Mapping[str, Any]
    data: Mapping[str, Any]
    rounds: int
    choosing_rounds: int
    seeds: tuple[int, ...]
    factors: Mapping[str, tuple[float, ...]]
    ranks: tuple[int, ...] = (2, 8, 32)
    model: str = "mlp_500_300"
    head: str = "out"


FULL = Study(
    pretraining={"dataset": "fashion_mnist", "inputs": "scaled", "rounds": 3},
    data={"dataset": "mnist", "fraction": 0.05},
    rounds=10,
    choosing_rounds=3,
    seeds=(0, 1),
    factors={"fedavg": (1.0, 3.0, 10.0), "fedlap_cov": (1.0, 3.0, 10.0), "ivon_admm": (0.03, 0.1, 0.3)},
)
QUICK = Study(
    pretraining={"dataset": "digits", "rounds": 1},
    data={"dataset": "digits", "fraction": 0.2},
    rounds=2,
    choosing_rounds=1,
    seeds=(0,),
    factors={"fedavg": (1.0, 3.0), "fedlap_cov": (1.0,), "ivon_admm": (0.3,)},
    ranks=(2,),
)
STEP = {"fedavg": ("local.lr", 1e-3), "fedlap_cov": ("local.lr", 1e-3), "ivon_admm": ("lr", 0.05)}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"local.epochs": 2},
    "fedlap_cov": {"local.epochs": 2},
    "ivon_admm": {"epochs": 2},
}


@dataclass(frozen=True)
class Row:
    """What came of one algorithm and one way: curves are means over the seeds."""

    algorithm: str
    way: Way
    params: int
    step: float
    megabytes: list[float]
    accuracy: list[float]
    nll: float
    ece: float


def federated(study: Study, folder: Path, algo: str, way: Way, factor: float, **how: Any) -> Any:
    """One run in process."""
    key, step = STEP[algo]
    settings = {**SETTINGS[algo], key: step * factor}
    options = {**study.data, "model": study.model + way.modifiers, "train": way.train, "clients": 10, **how}
    name = f"{algo}-{way.label.replace(' ', '')}-{factor}-{how['seed']}-{how['rounds']}"
    return fedsim.run(
        algo=algo, hyperparameters=settings, eval_samples=0, workers=0, out=folder / name, **options
    )


def held_out_nll(study: Study, folder: Path, algo: str, way: Way, factor: float) -> float:
    """The NLL on held-out training rows; infinite for a step size with which the run diverges."""
    how: dict[str, Any] = {"seed": 99, "rounds": study.choosing_rounds, "evaluate_on": "fold:1/5"}
    try:
        nll = float(federated(study, folder, algo, way, factor, **how).summary["test_nll"])
    except TaskError:
        return math.inf
    return math.inf if math.isnan(nll) else nll


def row(study: Study, folder: Path, algo: str, way: Way) -> Row:
    """Choose the step size on held-out training rows, then run all seeds."""
    factor = min(study.factors[algo], key=lambda f: held_out_nll(study, folder, algo, way, f))
    runs = [federated(study, folder, algo, way, factor, seed=s, rounds=study.rounds) for s in study.seeds]
    curves = [run.metrics for run in runs]
    means = {
        column: [mean(values) for values in zip(*(c[column] for c in curves), strict=True)]
        for column in ("MB", "test_accuracy", "test_nll", "test_ece")
    }
    params = runs[0].summary["params"]
    last = means["test_nll"][-1], means["test_ece"][-1]
    print(
        f"{algo}, {way.label}: {100 * means['test_accuracy'][-1]:.1f} %, {means['MB'][-1]:.2f} MB", flush=True
    )
    return Row(algo, way, params, STEP[algo][1] * factor, means["MB"], means["test_accuracy"], *last)


def to_reach(of: Row, accuracy: float) -> str:
    """Megabytes until an accuracy is reached."""
    reached = (mb for mb, a in zip(of.megabytes, of.accuracy, strict=True) if a >= accuracy)
    first = next(reached, None)
    return "-" if first is None else f"{first:.2f}"


def cells(rows: Sequence[Row], level: float) -> str:
    """All rows as a table."""
    head = [
        "algorithm",
        "trained",
        "P",
        "step size",
        "MB a round",
        "accuracy %",
        "NLL",
        "ECE",
        f"MB to {100 * level:.0f} %",
    ]
    return table(
        head,
        [
            [
                r.algorithm,
                r.way.label,
                f"{r.params:,}",
                f"{r.step:g}",
                f"{r.megabytes[-1] / max(len(r.megabytes) - 1, 1):.3f}",
                f"{100 * r.accuracy[-1]:.1f}",
                f"{r.nll:.3f}",
                f"{r.ece:.3f}",
                to_reach(r, level),
            ]
            for r in rows
        ],
    )


def draw(page: Page, rows: Sequence[Row]) -> None:
    """Accuracy against megabytes, an axis per algorithm."""
    drawn, axes = figure(10.5, 3.9, 1, len(ALGORITHMS), sharey=True)
    for ax, algorithm in zip(axes, ALGORITHMS, strict=True):  # type: ignore[call-overload]
        _panel(ax, algorithm, [r for r in rows if r.algorithm == algorithm])
    axes[0].set_ylabel("test accuracy, %")  # type: ignore[index]
    lines, labels = axes[0].get_legend_handles_labels()  # type: ignore[index]
    drawn.legend(lines, labels, loc="outside lower center", ncols=len(labels))
    page.picture(drawn, "Test accuracy against megabytes for every way of fine-tuning")


def _panel(ax: Axes, algorithm: str, rows: Sequence[Row]) -> None:
    for r in rows:
        ax.plot(
            r.megabytes[1:],
            [100 * a for a in r.accuracy[1:]],
            color=r.way.colour,
            label=r.way.label,
            linestyle="--" if r.way.label == "from scratch" else "-",
        )
    ax.set_xscale("log")
    ax.set_xlabel("MB, both ways")
    ax.set_title(algorithm)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a few seconds' worth; shows that it runs")
    parser.add_argument("--data-dir", type=Path, help="folder of the data files")
    options = parser.parse_args(argv)
    if options.data_dir is not None:
        os.environ["FEDSIM_DATA"] = str(options.data_dir)
    study = QUICK if options.quick else FULL
    page = Page("adapters", "Fine-tuning: everything, the head, or adapters", options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pretrained = fedsim.run(
            algo="pooled", model=study.model, workers=0, out=folder / "pretrained", **study.pretraining
        )
        weights = folder / "pretrained" / "model.safetensors"
        rows = [
            row(study, folder, algorithm, way)
            for algorithm in ALGORITHMS
            for way in ways(weights, study.head, study.ranks)
        ]
        reached = 100 * pretrained.summary["test_accuracy"]
    data = study.pretraining["dataset"], study.data["dataset"]
    factors = "; ".join(
        f"{algo} {', '.join(f'{STEP[algo][1] * f:g}' for f in of)}" for algo, of in study.factors.items()
    )
    page.add(
        f"`{study.model}` is trained on {data[0]} in one place ({reached:.1f} % there), and fine-tuned on "
        f"{100 * study.data['fraction']:.0f} % of the training rows of {data[1]} by ten unlike clients: two "
        f"local epochs a round, {study.rounds} rounds, {len(study.seeds)} seeds (means). Step sizes: the one "
        "with the least NLL on held-out training rows of another seed, after "
        f"{study.choosing_rounds} rounds ({factors}). "
        "Adapters are beside both hidden layers; the head is trained with them."
    )
    page.add(cells(rows, 0.85))
    draw(page, rows)
    page.add(
        "MB a round is what ten clients receive and send. The frozen part never crosses the wire: every "
        "process has it from the file of weights, whose sha256 the manifest records "
        "([models](../models.md#adapters))."
    )
    page.write()


if __name__ == "__main__":
    main()
