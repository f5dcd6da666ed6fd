"""Likelihoods of the targets given a network's outputs: training losses and test scores.

    categorical   outputs (n, C) logits,     targets (n,) int64 classes      cross-entropy
    bernoulli     outputs (n, C) logits,     targets (n, C) 0/1              summed over C tags
    token_classes outputs (n, T, C) logits,  targets (n, T) int64, -1: none  cross-entropy per token
    gaussian      outputs (n, C) means,      targets (n, C) float32          1/2 |y - f(x)|^2

Losses are MEANS over the examples or tokens of a batch, in nats, without additive constants.

A tally is a tuple of float64 sums over examples. Tallies of parts of the data are added, so the assignment of
parts to workers does not matter. Counts of examples are whole numbers, hence exact.

    likelihood    test_accuracy: correct share of             test_nll (nats)        more
    categorical   examples                                    per example
    bernoulli     (example, tag) pairs, at p = 1/2            per example (all tags) precision, micro_f1,
                                                                                     macro_f1, recall_at_5,
                                                                                     micro_recall_at_5
    token_classes tokens                                      per token
    gaussian      None                                        per example, 1/2 |y - f|^2

All likelihoods but gaussian also have test_ece and test_brier: a calibration tally
(fedsim.learning.calibration) follows the likelihood's own part of the tally. A categorical tally ends with
sums per class, for fedsim.learning.client_scores: the test examples of each class, then the correct ones,
then the summed nll.

precision and micro_f1 are over all pairs. macro_f1 is the mean of F1 over all tags; a tag that neither occurs
nor is predicted has F1 = 0. recall_at_5 is the share of an example's tags that are among the 5 largest
outputs, averaged over the examples with a tag. micro_recall_at_5 is the same share over the tags of all
examples together, as in TensorFlow's Recall(top_k=5) and thus in FedPA's table. Recalls
without tags and scores without tokens are None; a precision or micro_f1 of 0/0 is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.errors import UsageError, unknown
from fedsim.learning import calibration
from fedsim.learning.calibration import ReliabilityTable

Tally = tuple[float, ...]
Numbers = dict[str, float | None]

TOP = 5


@dataclass(frozen=True)
class Likelihood:
    """A likelihood with its training loss and test scores, as in the tables above.

    Attributes:
        loss: Function from a batch's outputs and targets to the mean negative log-likelihood, 0-d.
        own: Function from the number of classes to the length of the likelihood's own part of a tally.
        tally: Function from outputs (n, ..., C) float64 and their targets to their tally.
        numbers: Function from a sum of tallies to test_accuracy, test_nll and further scores by name.
        calibration: Position of the calibration tally in a tally; None: there is none.
        per_class: Position of the counts, correct counts and nll per class in a tally; None: there are none.
        rows: Number of examples whose outputs are computed at a time, to bound memory.
        averages: True if predictions can be averaged over samples of a posterior.
        has_accuracy: True if there is a test accuracy; targets that are numbers have none.
        sequences: True if there are outputs at every position of a sequence.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    own: Callable[[int], int]
    tally: Callable[[Tensor, Tensor], Tally]
    numbers: Callable[[Tally], Numbers]
    calibration: slice | None = None
    per_class: slice | None = None
    rows: int = 2000
    averages: bool = False
    has_accuracy: bool = True
    sequences: bool = False

    def width(self, classes: int) -> int:
        """Return the length of a tally."""
        return (
            self.own(classes)
            + (calibration.SIZE if self.calibration else 0)
            + (3 * classes if self.per_class else 0)
        )

    def reliability(self, tally: Tally) -> ReliabilityTable | None:
        """Return a summed tally's reliability table; None without calibration or if a prediction is nan."""
        return calibration.table(tally[self.calibration]) if self.calibration else None

    def classes_only(self, what: str) -> None:
        """Raise a UsageError that names `what` unless the likelihood is categorical."""
        if self.name != "categorical":
            raise UsageError(
                f"{what} is for targets that are classes; this data set's are {self.name}. Choose an "
                "algorithm that trains by gradients alone, such as fedavg, fedavgm, fedprox or fedpa"
            )


# ---- losses


def _fits(outputs: Tensor, shape: tuple[int, ...], what: str) -> None:
    """Check the shape of outputs, because a loss could broadcast or fail with an obscure message."""
    if outputs.shape != shape:
        raise UsageError(
            f"the model gives outputs of shape {tuple(outputs.shape)} where {what} need {tuple(shape)}"
        )


def _bernoulli_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    _fits(outputs, targets.shape, "bernoulli targets")
    summed = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="sum")
    return summed / len(outputs)


def _tokens_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    _fits(outputs, (*targets.shape, outputs.shape[-1]), "tokens")
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return each / (targets >= 0).sum().clamp(min=1)


def _gaussian_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    _fits(outputs, targets.shape, "gaussian targets")
    return (outputs - targets).square().sum() / 2 / len(outputs)


# ---- tallies


def added(one: Tally, other: Tally) -> Tally:
    """Add the tallies of two parts."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


# ---- categorical tally: examples, correct, nll; calibration; then per class examples, correct, nll

_CATEGORICAL = 3
_OF_CLASSES = slice(_CATEGORICAL, _CATEGORICAL + calibration.SIZE)


def classified(log_probabilities: Tensor, targets: Tensor) -> Tally:
    """Return the categorical tally of log-probabilities (n, C)."""
    nll = F.nll_loss(log_probabilities, targets, reduction="sum")
    right = log_probabilities.argmax(dim=1) == targets
    head = (float(len(targets)), float(right.sum()), float(nll))
    return (
        *head,
        *calibration.of_classes(log_probabilities, targets),
        *_per_class(log_probabilities, right, targets),
    )


def _per_class(log_probabilities: Tensor, right: Tensor, targets: Tensor) -> list[float]:
    return _per_group(log_probabilities, right, targets, targets.cpu(), log_probabilities.shape[1])


def _per_group(
    log_probabilities: Tensor, right: Tensor, targets: Tensor, groups: Tensor, count: int
) -> list[float]:
    """Return 3 * count sums: examples of each group, correct examples of each, nll of each.

    groups: (n,), on the CPU, where the order of summation is fixed.
    """
    nll = F.nll_loss(log_probabilities, targets, reduction="none")
    rows = (torch.ones_like(nll), right.double(), nll)
    sums = [torch.bincount(groups, row.cpu(), minlength=count) for row in rows]
    sums_of_groups: list[float] = torch.cat(sums).tolist()
    return sums_of_groups


def by_client(outputs: Tensor, targets: Tensor, clients: Tensor, count: int) -> Tally:
    """Return 3 * count sums over each client's own rows: examples, correct examples, nll.

    outputs: (n, C) logits. targets: (n,) classes. clients: (n,) client ids 0 to count-1, on the CPU; -1 for
    rows that belong to no client.
    """
    here = clients >= 0
    log_probabilities, own = outputs[here].log_softmax(dim=1), targets[here]
    right = log_probabilities.argmax(dim=1) == own
    return tuple(_per_group(log_probabilities, right, own, clients[here], count))


def _categorical_numbers(tally: Tally) -> Numbers:
    examples, correct, nll = tally[:_CATEGORICAL]
    return {
        "test_accuracy": correct / examples,
        "test_nll": nll / examples,
        **calibration.numbers(tally[_OF_CLASSES]),
    }


# ---- bernoulli tally: examples, nll, examples with a tag, their summed recall, top-5 tags; then per class
# true positives, false positives, false negatives; calibration

_HEAD = 5
_OF_TAGS = slice(-calibration.SIZE, None)


def _bernoulli_tally(outputs: Tensor, targets: Tensor) -> Tally:
    applies, predicted = targets > 0, outputs > 0
    nll = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="sum")
    # a stable sort keeps equal outputs (such as those of weights 0) in the order of their classes
    order = outputs.sort(dim=1, descending=True, stable=True).indices[:, :TOP]
    result, tags = applies.gather(1, order).sum(dim=1), applies.sum(dim=1)
    tagged = tags > 0
    recall = (result[tagged].double() / tags[tagged]).sum()
    head = (float(len(targets)), float(nll), float(tagged.sum()), float(recall), float(result.sum()))
    per_class = torch.stack(
        [
            (applies & predicted).sum(dim=0),
            (predicted & ~applies).sum(dim=0),
            (applies & ~predicted).sum(dim=0),
        ]
    )
    own = (*head, *per_class.double().flatten().tolist())
    return (*own, *calibration.of_tags(outputs, targets))


def _bernoulli_numbers(tally: Tally) -> Numbers:
    examples, nll, tagged, recall, result = tally[:_HEAD]
    classes = (len(tally) - _HEAD - calibration.SIZE) // 3
    right, false, missed = (tally[_HEAD + i * classes : _HEAD + (i + 1) * classes] for i in range(3))
    all_right, all_false, all_missed = sum(right), sum(false), sum(missed)
    each = [
        2 * r / (2 * r + f + m) if r + f + m else 0.0 for r, f, m in zip(right, false, missed, strict=True)
    ]
    return {
        "test_accuracy": 1 - (all_false + all_missed) / (examples * classes),
        "test_nll": nll / examples,
        **calibration.numbers(tally[_OF_TAGS]),
        "recall_at_5": recall / tagged if tagged else None,
        "micro_recall_at_5": result / (all_right + all_missed) if tagged else None,
        "precision": all_right / max(all_right + all_false, 1.0),
        "micro_f1": 2 * all_right / max(2 * all_right + all_false + all_missed, 1.0),
        "macro_f1": sum(each) / classes,
    }


# ---- tokens tally: tokens, correct, nll; calibration

_TOKENS = 3
_OF_TOKENS = slice(_TOKENS, _TOKENS + calibration.SIZE)


def _tokens_tally(outputs: Tensor, targets: Tensor) -> Tally:
    there = targets >= 0
    log_probabilities, target = outputs[there].log_softmax(dim=1), targets[there]
    nll = F.nll_loss(log_probabilities, target, reduction="sum")
    correct = log_probabilities.argmax(dim=1) == target
    own = (float(len(target)), float(correct.sum()), float(nll))
    return (*own, *calibration.of_classes(log_probabilities, target))


def _tokens_numbers(tally: Tally) -> Numbers:
    tokens, correct, nll = tally[:_TOKENS]
    return {
        "test_accuracy": correct / tokens if tokens else None,
        "test_nll": nll / tokens if tokens else None,
        **calibration.numbers(tally[_OF_TOKENS]),
    }


# ---- gaussian tally: examples, nll


def _gaussian_tally(outputs: Tensor, targets: Tensor) -> Tally:
    return float(len(targets)), float((outputs - targets).square().sum() / 2)


def _gaussian_numbers(tally: Tally) -> Numbers:
    examples, nll = tally
    return {"test_accuracy": None, "test_nll": nll / examples}


CATEGORICAL = Likelihood(
    "categorical",
    F.cross_entropy,
    lambda classes: _CATEGORICAL,
    lambda outputs, targets: classified(outputs.log_softmax(dim=1), targets),
    _categorical_numbers,
    calibration=_OF_CLASSES,
    per_class=slice(_OF_CLASSES.stop, None),
    averages=True,
)

LIKELIHOODS: Mapping[str, Likelihood] = MappingProxyType(
    {
        row.name: row
        for row in (
            CATEGORICAL,
            Likelihood(
                "bernoulli",
                _bernoulli_loss,
                lambda classes: _HEAD + 3 * classes,
                _bernoulli_tally,
                _bernoulli_numbers,
                calibration=_OF_TAGS,
            ),
            Likelihood(
                "token_classes",
                _tokens_loss,
                lambda classes: _TOKENS,
                _tokens_tally,
                _tokens_numbers,
                calibration=_OF_TOKENS,
                # 32 sentences of 20 words over 10,004 ids are 51 MB in float64
                rows=32,
                sequences=True,
            ),
            Likelihood(
                "gaussian",
                _gaussian_loss,
                lambda classes: 2,
                _gaussian_tally,
                _gaussian_numbers,
                has_accuracy=False,
            ),
        )
    }
)


def likelihood(name: str) -> Likelihood:
    if name not in LIKELIHOODS:
        raise unknown("likelihood", name, LIKELIHOODS)
    return LIKELIHOODS[name]
