"""A model per client: every client trains a run's last model further on its own rows, and both are scored.

    python personal.py RUN --epochs 5 --lr 0.01

A client starts from the weights of RUN/model.safetensors and takes N epochs of SGD on its training rows. The
run does not change: personal models are neither sent nor stored, and cost no bytes.

A model's score for a client is a weighted average over test rows. If the data set has test rows of each
client, and the run's partition is natural, the client's own rows count equally. Otherwise all test rows
count, each class as much as in the client's training rows: this is what a client with these labels would see.
A client without such test rows has no score.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedsim


@dataclass(frozen=True)
class Score:
    """Accuracy and negative log-likelihood, in nats per example, of one model for one client."""

    accuracy: float
    nll: float


@dataclass(frozen=True)
class Scores:
    """The scores of the run's model and of the client's own model."""

    client: int
    common: Score
    personal: Score


def inputs_of(rows: np.ndarray, scale: float) -> Tensor:
    """Return stored inputs as the network reads them: float32, divided by the scale."""
    floats = torch.from_numpy(np.array(rows)).float()
    return floats if scale == 1 else floats / scale


def row_weights(data: fedsim.Dataset, rows: np.ndarray, natural: bool) -> np.ndarray:
    """Return each test row's weight for the client with these training rows; all 0 if it has no score."""
    if natural and data.centres is not None and data.test_centres is not None:
        weights = (data.test_centres == data.centres[rows[0]]).astype(np.float64)
    else:
        shares = np.bincount(data.train_targets[rows], minlength=data.classes)
        tested = np.bincount(data.test_targets, minlength=data.classes)
        weights = (shares / np.maximum(tested, 1))[data.test_targets]
    return weights / max(weights.sum(), np.finfo(float).tiny)


def score(model: nn.Module, inputs: Tensor, targets: Tensor, weights: Tensor) -> Score:
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in torch.split(inputs, 1000)]).double()
    right = (outputs.argmax(1) == targets).double()
    return Score(float(weights @ right), float(weights @ cross_entropy(outputs, targets, reduction="none")))


def train(model: nn.Module, inputs: Tensor, targets: Tensor, epochs: int, lr: float, seed: int) -> nn.Module:
    """Return a copy of the model after N epochs on these rows, with batches of 32, in eval mode."""
    personal, order = copy.deepcopy(model).train(), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD([w for w in personal.parameters() if w.requires_grad], lr=lr)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(targets), generator=order), 32):
            optimiser.zero_grad()
            cross_entropy(personal(inputs[batch]), targets[batch]).backward()
            optimiser.step()
    return personal.eval()


def personal_models(run: fedsim.Run, epochs: int, lr: float) -> Iterator[tuple[nn.Module, Scores]]:
    """Yield every client's own model and its scores, in the order of the clients that have a score."""
    experiment, folder = run.experiment, run.manifest["execution"]["data_dir"]
    data = fedsim.load_dataset(experiment["dataset"], folder and Path(folder))
    if data.likelihood != "categorical":
        raise SystemExit(f"{run.path}: personal models are scored where each example has one class")
    model, natural = run.model(), experiment["partition"] == "natural"
    scale = data.scale if experiment["inputs"] == "scaled" else 1.0
    test_inputs = inputs_of(data.test_inputs, scale)
    test_targets = torch.from_numpy(np.array(data.test_targets))
    for client, rows in enumerate(run.client_rows()):
        weights = torch.from_numpy(row_weights(data, rows, natural))
        if not weights.any():
            continue
        inputs, targets = (
            inputs_of(data.train_inputs[rows], scale),
            torch.from_numpy(data.train_targets[rows]),
        )
        own = train(model, inputs, targets, epochs, lr, seed=client)
        common, personal = (score(m, test_inputs, test_targets, weights) for m in (model, own))
        yield own, Scores(client, common, personal)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and score a model per client of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.01)
    arguments = parser.parse_args()
    all_scores = [s for _, s in personal_models(fedsim.open(arguments.run), arguments.epochs, arguments.lr)]
    print("client   accuracy: common  personal     NLL: common  personal")
    for s in all_scores:
        accuracies = f"{s.common.accuracy:16.1%} {s.personal.accuracy:9.1%}"
        print(f"{s.client:6} {accuracies} {s.common.nll:15.4f} {s.personal.nll:9.4f}")
    gains = [s.personal.accuracy - s.common.accuracy for s in all_scores]
    mean, worst = (
        np.mean([s.personal.accuracy for s in all_scores]),
        min(s.personal.accuracy for s in all_scores),
    )
    print(
        f"personal models: mean accuracy {mean:.1%}, {100 * np.mean(gains):+.1f} points over the common "
        f"model; worst {worst:.1%}; {sum(gain > 0 for gain in gains)} of {len(gains)} clients gain"
    )


if __name__ == "__main__":
    main()
