"""FedLap paper, Appendix D: two small experiments with FedDyn (Swaroop, Khan, Doshi-Velez 2025).

    python docs/recipes/fedlap_appendix_d.py --data-dir DIR
                                        7 minutes; writes docs/results/fedlap_appendix_d.{png,md}

D.1  FedDyn on homogeneous MNIST with more, less and no weight decay.
D.2  FedLap and FedDyn on UCI Credit in two equal homogeneous clients: rounds to the ideal training loss.
Settings: papers-and-code.md 3.2. Every curve is a run of the launcher, in process.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from illustrations import options
from matplotlib.axes import Axes
from report import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Page, figure, table
from torch import Tensor

from fedsim.data import Dataset, load_dataset
from fedsim.data.partition import partition
from fedsim.errors import TaskError
from fedsim.experiment import Experiment
from launch.execution import Execution
from launch.run import launch

COLOURS = (BLACK, BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
SEED = 62


@dataclass(frozen=True)
class Settings:
    """fraction, rounds and epochs of MNIST are what fits into some minutes."""

    fraction: float = 0.1
    mnist_rounds: int = 30
    mnist_epochs: int = 5
    lr: float = 1e-3
    alpha: float = 1e-4
    decays: tuple[float, ...] = (0.0, 1e-6, 1e-5, 1e-4, 1e-3)
    delta: float = 1.0
    alphas: tuple[float, ...] = (0.1, 0.01, 0.001, 0.0001)
    lap_rounds: int = 30
    dyn_rounds: int = 100
    credit_epochs: int = 1000
    close: float = 0.01


# ---- UCI Credit, scored on the rows it is trained on


def credit() -> Dataset:
    """UCI Credit whose test rows are the training rows, so that test_nll is the training loss at w_g."""
    return on_training_rows(load_dataset("uci_credit"))


def made_up() -> Dataset:
    """A table of the same shape, for a quick run: needs no file."""
    draws = np.random.default_rng(0)
    targets = (np.arange(520) % 520 >= 284).astype(np.int64)
    inputs = (draws.normal(size=(520, 42)) + 0.3 * targets[:, None]).astype(np.float32)
    return on_training_rows(Dataset("made_up", inputs, targets, inputs, targets, classes=2))


def on_training_rows(data: Dataset) -> Dataset:
    rows = np.sort(np.concatenate(shares(data)))
    inputs, targets = np.array(data.train_inputs[rows]), np.array(data.train_targets[rows])
    return replace(data, test_inputs=inputs, test_targets=targets)


def shares(data: Dataset) -> tuple[np.ndarray, ...]:
    """Training rows of the two clients."""
    return partition("credit_two", targets=data.train_targets, classes=2, clients=2, seed=SEED)


@dataclass(frozen=True)
class Optimum:
    """argmin sum_i l_i(w) + delta/2 |w|^2: mean losses in nats per example."""

    delta: float
    train: float
    test: float


def optimum(data: Dataset, test: Dataset, delta: float) -> Optimum:
    """By Newton's method in float64, for two logits without bias."""
    x, y = (
        torch.from_numpy(np.array(data.test_inputs)).double(),
        torch.from_numpy(np.array(data.test_targets)),
    )
    w = torch.zeros(2, x.shape[1], dtype=torch.float64)

    def objective(w: Tensor) -> float:
        return float(F.cross_entropy(x @ w.T, y, reduction="sum") + delta / 2 * w.square().sum())

    for _ in range(200):
        p = (x @ w.T).softmax(1)
        gradient = (p - F.one_hot(y, 2)).T @ x + delta * w
        one = x.T @ ((p[:, 0] * p[:, 1])[:, None] * x)
        hessian = torch.cat([torch.cat([one, -one], 1), torch.cat([-one, one], 1)])
        hessian.diagonal().add_(delta)
        step, length = torch.linalg.solve(hessian, gradient.flatten()).view_as(w), 1.0
        if float((gradient * step).sum()) < 1e-12:
            break
        while objective(w - length * step) > objective(w) and length > 1e-6:
            length /= 2
        w = w - length * step
    away = torch.from_numpy(np.array(test.test_inputs)).double() @ w.T
    return Optimum(
        delta,
        float(F.cross_entropy(x @ w.T, y)),
        float(F.cross_entropy(away, torch.from_numpy(np.array(test.test_targets)))),
    )


# ---- runs


def curve(experiment: Experiment, metric: str, data_dir: Path | None) -> list[float]:
    """A metric by round from round 0; NaN from where the run diverged."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        execution = Execution(
            workers=0, devices="cpu", out=str(out), data_dir=str(data_dir) if data_dir else None
        )
        try:
            launch(experiment, execution, quiet=True)
        except TaskError as stopped:
            print(f"{experiment.algo}: {stopped}", flush=True)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    values = [math.nan if line[metric] is None else float(line[metric]) for line in lines]
    return values + [math.nan] * (experiment.rounds + 1 - len(values))


def decay_curves(how: Settings, *, quick: bool, data_dir: Path | None) -> dict[float, list[float]]:
    """Test accuracy by round for every weight decay."""
    base = Experiment(
        algo="feddyn",
        dataset="digits" if quick else "mnist",
        fraction=how.fraction,
        partition="two_dirichlet:1e15,1e15",
        model="mlp",
        clients=10,
        rounds=how.mnist_rounds,
        seed=SEED,
        hyperparameters={"alpha": how.alpha, "epochs": how.mnist_epochs, "batch_size": 32, "lr": how.lr},
    )
    return {
        decay: curve(
            replace(base, hyperparameters={**base.hyperparameters, "weight_decay": decay}),
            "test_accuracy",
            data_dir,
        )
        for decay in how.decays
    }


def credit_curves(how: Settings, *, quick: bool, data_dir: Path | None) -> dict[str, list[float]]:
    """Training loss at w_g by round."""

    def run(algo: str, rounds: int, **more: Any) -> list[float]:
        local = {"epochs": how.credit_epochs, "batch_size": 260, "lr": 1e-3}
        experiment = Experiment(
            algo=algo,
            dataset=f"{Path(__file__).resolve()}:{'made_up' if quick else 'credit'}",
            inputs="raw",
            partition="credit_two",
            model="logistic",
            clients=2,
            rounds=rounds,
            seed=SEED,
            hyperparameters={**local, **more},
        )
        return curve(experiment, "test_nll", None)

    lap = {"delta": how.delta, "rho": "1/K"}
    found = {
        "FedLap": run("fedlap", how.lap_rounds, **lap),
        "FedLap, unsquared prox": run("fedlap", how.lap_rounds, **lap, prox_norm="unsquared"),
    }
    for alpha in how.alphas:
        found[f"FedDyn, α = {alpha:g}"] = run("feddyn", how.dyn_rounds, alpha=alpha, weight_decay=0.0)
    for alpha in how.alphas[1:3]:
        found[f"FedDyn, α = {alpha:g}, unsquared prox"] = run(
            "feddyn", how.dyn_rounds, alpha=alpha, weight_decay=0.0, prox_norm="unsquared"
        )
    return found


@contextmanager
def data_folder(chosen: Path | None) -> Iterator[None]:
    """FEDSIM_DATA for the data set of this file, which takes no argument."""
    before = os.environ.get("FEDSIM_DATA")
    if chosen:
        os.environ["FEDSIM_DATA"] = str(chosen)
    yield
    if chosen and before is None:
        del os.environ["FEDSIM_DATA"]
    elif before is not None:
        os.environ["FEDSIM_DATA"] = before


# ---- page


def draw_decay(axes: Axes, curves: Mapping[float, list[float]]) -> None:
    for (decay, values), colour in zip(curves.items(), COLOURS, strict=False):
        shown = [100 * v for v in values]
        axes.plot(range(1, len(values)), shown[1:], color=colour, label=f"{decay:g}" if decay else "none")
    axes.set(title="FedDyn on homogeneous MNIST", xlabel="round", ylabel="test accuracy, %")
    top = 100 * max(max(v for v in values if v == v) for values in curves.values())
    axes.set_ylim(top - 12, top + 1)
    axes.legend(title="weight decay", loc="lower right", alignment="left")


def ideal(name: str, lap: Optimum, dyn: Optimum) -> float:
    return (lap if name.startswith("FedLap") else dyn).train


def draw_credit(axes: Axes, curves: Mapping[str, list[float]], lap: Optimum, dyn: Optimum) -> None:
    for (name, values), colour in zip(curves.items(), COLOURS, strict=False):
        if "unsquared" not in name:
            excess = [100 * (v / ideal(name, lap, dyn) - 1) for v in values]
            axes.plot(range(1, len(values)), excess[1:], color=colour, label=name)
    axes.axhline(1, color="0.5", linestyle=":", linewidth=1.2)
    axes.set(title="UCI Credit, two equal clients", xlabel="round", yscale="log", ylim=(0.02, 60))
    axes.set_ylabel("training loss above its ideal, %")
    axes.legend(fontsize=8)


def within(values: Sequence[float], most: float) -> str:
    """The first round with at most that loss."""
    return next((str(r) for r, v in enumerate(values) if r and v <= most), f"> {len(values) - 1}")


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    chosen = options(__doc__.splitlines()[0], argv)
    page = Page("fedlap_appendix_d", "FedLap, Appendix D: FedDyn's weight decay and its ideal", chosen)
    how = Settings()
    if chosen.quick:
        how = replace(
            how,
            fraction=0.1,
            mnist_rounds=2,
            mnist_epochs=1,
            decays=(0.0, 1e-4),
            alphas=(0.1, 0.01, 0.001),
            lap_rounds=2,
            dyn_rounds=2,
            credit_epochs=2,
        )
    decayed = decay_curves(how, quick=chosen.quick, data_dir=chosen.data_dir)
    with data_folder(chosen.data_dir):
        losses = credit_curves(how, quick=chosen.quick, data_dir=chosen.data_dir)
        scored = made_up() if chosen.quick else credit()
        test = scored if chosen.quick else load_dataset("uci_credit")
    optima = [optimum(scored, test, delta) for delta in (how.delta, 0.01, 1e-4, 1e-6)]
    lap, dyn = optima[0], optima[-1]
    drawn, (left, right) = figure(10.5, 4.2, 1, 2)
    draw_decay(left, decayed)
    draw_credit(right, losses, lap, dyn)
    page.picture(drawn, "test accuracy by weight decay, and the training loss above its ideal, by round")
    page.add(DECAY.format(how=how))
    rows = []
    for decay, values in decayed.items():
        at = [f"{100 * values[r]:.1f}" if r < len(values) else "" for r in (1, 5, 10, 20, 30)]
        best = max(range(1, len(values)), key=lambda r: values[r] if values[r] == values[r] else -1.0)
        rows.append([f"{decay:g}" if decay else "none", *at, f"{100 * values[best]:.1f} (round {best})"])
    page.add(table(["weight decay", "round 1", "5", "10", "20", "30", "best"], rows))
    page.add(DECAY_SEEN)
    page.add(CREDIT.format(how=how))
    page.add(
        table(
            ["optimum of all data", "training loss", "test NLL"],
            [[f"δ = {o.delta:g}", f"{o.train:.4f}", f"{o.test:.3f}"] for o in optima],
        )
    )
    rows = []
    for name, values in losses.items():
        least = ideal(name, lap, dyn)
        at = [f"{values[r]:.4f}" if r < len(values) else "" for r in (1, 2, 5, 10, 30, 100)]
        rows.append([name, f"{least:.4f}", *at, within(values, (1 + how.close) * least)])
    page.add(table(["training loss at w_g", "ideal", "round 1", "2", "5", "10", "30", "100", "to 1 %"], rows))
    page.add(CREDIT_SEEN)
    page.write()


DECAY = """## D.1: weight decay

x"""
DECAY_SEEN = """The paper x"""
CREDIT = """## D.2: rounds to the ideal

x"""
CREDIT_SEEN = """x"""

if __name__ == "__main__":
    main()
