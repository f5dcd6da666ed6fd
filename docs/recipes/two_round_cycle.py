"""Why fedavg falls at the end of scenario S6: its rounds swing between two states, and the swing grows.

    python docs/recipes/two_round_cycle.py --data-dir DIR      40 minutes of a core, 7 GB for uploads

writes docs/results/two_round_cycle.{md,png}. --run RUN looks at a run that is there, which has to be this one
with --keep-uploads. --quick: digits, whose numbers mean nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import BLUE, ORANGE, SKY, VERMILION, Page, figure, options, table
from torch import Tensor

import fedsim
from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from fedsim.wire.envelope import decode
from fedsim.wire.message_context import NOTHING
from protocols import find
from workers.storage.upload_archive import read_upload, upload_path, uploads_folder

SHOWN = (20, 40, 60, 80, 84, 88, 90, 92, 94, 96, 97, 98, 99, 100)
CLASSES = (4, 5, 8, 9)
"""Those whose accuracy swings most."""


QUICK: dict[str, Any] = {
    "algo": "fedavg",
    "dataset": "digits",
    "model": "mlp_small",
    "clients": 4,
    "rounds": 4,
}
S6: dict[str, Any] = {
    "algo": "fedavg",
    "dataset": "mnist",
    "model": "mlp",
    "clients": 100,
    "partition": "two_classes",
    "rounds": 100,
    "seed": 62,
    "hyperparameters": {"local.epochs": 10, "local.batch_size": 64},
}
"""Scenario S6 with fedavg, as in mnist_two_classes.toml."""


FINDING = """
On [MNIST with two classes a client](mnist_two_classes.md) fedavg reaches 94.0 % and then falls within seven
rounds, while the clients' training loss keeps falling. **The server's model swings between two states,
one round each, and the swing grows**: in one round some classes are preferred (4, 8), in the next others
(5, 9), and the clients raise too much what was too low. The mean of two successive models does not fall: it
has 94.4 % to the end. The cosine between successive steps of the server falls from .95 on, well before the
accuracy does. No single client does it: the longest step of a client stays near the median's.

[fedprox](mnist_two_classes_more.md), whose clients are held at the server's model, does not swing within 100
rounds. The published means (94.1±0.0) do not show it either; a swing that starts some rounds later would
look so. It is a property of the rounds, and no error of the last digit: the run was made twice, on two
days, with the same bits.
"""
LEGEND = """
Mean of two rounds: the accuracy of (w_r + w_(r-1)) / 2. Cosine: between the server's step of the round and
that of the round before; 1 is a steady course, -1 a swing. Longest: the longest of the clients' steps, in
units of their median. Classes: accuracy of the round's model in percent.
"""


@dataclass(frozen=True)
class Looked:
    """A round's model. correct: accuracy in percent; by_class: by class, (C,); of_two: of the mean of this
    model and the last; cosine: between the server's step and its last one, NaN at first; longest: of the
    clients' steps, by their median."""

    round: int
    correct: float
    by_class: np.ndarray
    of_two: float
    cosine: float
    longest: float


def folded(problem: Problem, run: Path, round: int, last: Tensor) -> tuple[Tensor, float]:
    """The server's mean after a round, (P,) float64, from the uploads that the run has kept, and the longest
    of the clients' steps from `last` by the median of all."""
    mean, sizes, lengths = torch.zeros_like(last), problem.sizes, []
    kind, codecs = problem.exchange(round, 1).up, problem.codecs["up"]
    for k, size in enumerate(sizes):
        file = upload_path(uploads_folder(run), round, 1, k)
        envelope = read_upload(file, f"the upload of client {k} in round {round}")
        up = decode(kind, envelope, codecs, problem.dims, str(file), NOTHING, problem.net.layout)
        mean += size / sum(sizes) * up.mean  # type: ignore[attr-defined]
        lengths.append((up.mean - last).norm())  # type: ignore[attr-defined]
    return mean, float(max(lengths) / torch.stack(lengths).median())


def looked_at(problem: Problem, run: Path) -> Iterator[Looked]:
    """Every round of the run."""
    inputs = problem.read(torch.from_numpy(np.array(problem.dataset.test_inputs)))
    targets = torch.from_numpy(np.array(problem.dataset.test_targets))
    classes = range(problem.dataset.classes)

    def right(weights: Tensor) -> Tensor:
        return (problem.net.logits(weights.float(), inputs).argmax(1) == targets).double()

    last, step = problem.start.double(), None
    for r in range(1, problem.experiment.rounds + 1):
        mean, longest = folded(problem, run, r, last)
        now, before, step = mean - last, step, mean - last
        cosine = float("nan") if before is None else float(now @ before / (now.norm() * before.norm()))
        correct, of_two = right(mean), right((mean + last) / 2)
        by_class = np.array([100 * float(correct[targets == c].mean()) for c in classes])
        yield Looked(r, 100 * float(correct.mean()), by_class, 100 * float(of_two.mean()), cosine, longest)
        last = mean


def drawn(rounds: Sequence[Looked], swinging: Sequence[int]) -> object:
    """Accuracy of the rounds' models and of means of two; accuracy by class."""
    fig, axes = figure(9, 3.4, 1, 2)
    left, right = axes  # type: ignore[misc]
    at = [r.round for r in rounds]
    left.plot(at, [r.correct for r in rounds], color=BLUE, label="model of the round")
    left.plot(at, [r.of_two for r in rounds], color=ORANGE, label="mean of two rounds' models")
    for c, color in zip(swinging, (SKY, VERMILION, BLUE, ORANGE), strict=False):
        right.plot(at, [r.by_class[c] for r in rounds], color=color, label=f"class {c}", linewidth=1)
    for axis, title in ((left, "Test accuracy"), (right, "Accuracy by class, model of the round")):
        axis.set(xlabel="round", ylabel="%", title=title)
        axis.legend()
        if len(at) > 50:
            axis.set(xlim=(50, at[-1]), ylim=(60 if axis is right else 90, 100 if axis is right else 95))
    return fig


def main(argv: Sequence[str] | None = None) -> None:
    folders = {"--data-dir": "folder of MNIST", "--run": "a run that is there, with --keep-uploads"}
    args = options("fedavg's fall at the end of S6", argv, folders)
    settings = QUICK if args.quick else S6
    e = Experiment(**settings)
    torch.set_num_threads(1)
    page = Page("two_round_cycle", "Why fedavg falls at the end of S6: a cycle of two rounds", args)
    problem = Problem.build(e, build_algorithm(find(e.algo), e.hyperparameters), args.data_dir)
    with tempfile.TemporaryDirectory() as scratch:
        run = args.run or Path(scratch) / "run"
        if args.run is None:
            fedsim.run(**settings, out=run, data_dir=args.data_dir, keep_uploads=True, quiet=True)
        rounds = list(looked_at(problem, run))
    page.add(FINDING)
    shown = [r for r in rounds if r.round in SHOWN]
    head = [
        "round",
        "accuracy %",
        "mean of two rounds %",
        "cosine of steps",
        "longest",
        *(f"class {c}" for c in CLASSES),
    ]
    cells = [
        [
            r.round,
            *(f"{x:.2f}" for x in (r.correct, r.of_two, r.cosine, r.longest)),
            *(f"{r.by_class[c]:.1f}" for c in CLASSES),
        ]
        for r in (shown or rounds)
    ]
    page.add(table(head, cells))
    page.add(LEGEND)
    page.picture(drawn(rounds, CLASSES), "test accuracy and accuracy by class over the rounds")  # type: ignore[arg-type]
    page.write()


if __name__ == "__main__":
    main()
