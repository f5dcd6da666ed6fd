"""Personal models of all clients (--personalise), trained from a run's last model and used only for scores.

    q_g   the broadcast that would open the next round, as clients decode it
    w_k   client k's weights after N epochs of its local problem, started from q_g; they are not sent or kept

Both w_k and the global model are scored on the client's own test rows if clients have any, else on the test
set with the classes weighted as in the client's training rows (fedsim.learning.client_scores).

The local problem is the algorithm's, with the client's state. If the algorithm has duals and a posterior, the
prior is q_g or the cavity q_g / t_k. In fedivon it is q_g without the client's share (Pal et al. 2025,
https://arxiv.org/abs/2411.18385); ba_ivon keeps the prior N(0, I/delta). A model is evaluated at its mean,
with its client's final running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, Task
from fedsim.errors import UsageError
from fedsim.evaluation import CHUNK
from fedsim.experiment import resolved_hyperparameters
from fedsim.learning.client_scores import ClientScores, LabelShares
from fedsim.learning.gaussian import Model
from fedsim.learning.likelihoods import Tally, added
from fedsim.learning.score_names import PERSONAL_NUMBERS
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from fedsim.wire.codecs import codec
from fedsim.wire.envelope import decode_own, encode
from fedsim.wire.message_context import codec_stream, of_broadcast
from fedsim.wire.schema import all_fields, map_tensors, optional_group

T = TypeVar("T")


@dataclass(frozen=True)
class PersonalScores:
    """The scores by client of the personal models (personal) and of the global model (common)."""

    personal: ClientScores
    common: ClientScores

    def numbers(self) -> dict[str, float | None]:
        """Return the values of PERSONAL_NUMBERS; None if no client has a score. A gain is the clients' mean
        increase in accuracy, or mean decrease in nll, from the global to the personal model."""
        mine, ours = self.personal, self.common
        if not len(mine.accuracy):
            return dict.fromkeys(PERSONAL_NUMBERS)
        values = (
            *(mine.accuracy.mean(), mine.accuracy.min(), (mine.accuracy - ours.accuracy).mean()),
            *(mine.nll.mean(), mine.nll.max(), (ours.nll - mine.nll).mean()),
        )
        return {name: float(x) for name, x in zip(PERSONAL_NUMBERS, values, strict=True)}

    def to_json(self, epochs: int) -> dict[str, Any]:
        """Return the number of clients whose accuracy increases, and their scores if clients are few."""
        better = int((self.personal.accuracy > self.common.accuracy).sum())
        lists = {f"global_{name}": scores for name, scores in self.common.lists().items()}
        scored = int(self.personal.scored.sum())
        return {"epochs": epochs, "scored": scored, "better": better, **self.personal.lists(), **lists}


def check_personalised(problem: Problem) -> None:
    """Check that the experiment's clients can have personal models.

    Raises:
        UsageError: If they cannot; the message says why.
    """
    algorithm, why = problem.algorithm, ""
    if algorithm.centralised:
        why = f"{algorithm.name} is not federated"
    elif len(algorithm.exchanges) > 1:
        why = f"a round of {algorithm.name} has several exchanges, and a client alone cannot go through them"
    elif "mean" not in {f.name for f in all_fields(algorithm.exchanges[0].down)}:
        why = f"the broadcast of {algorithm.name} has no weights from which a client could start"
    elif not any(name.endswith("epochs") for name in resolved_hyperparameters(algorithm.unwrapped)):
        why = f"clients of {algorithm.name} do not train in epochs"
    elif not _has_local_mean(algorithm):
        why = f"an upload of {algorithm.name} does not have the client's weights"
    elif problem.experiment.error_feedback:
        why = "with --error-feedback an upload also has what earlier ones have lost"
    elif problem.client_scoring is None:
        why = "scores by client need targets that are classes"
    if why:
        raise UsageError(f"--personalise: {why}")


def _has_local_mean(algorithm: Algorithm[Any, Any, Any, Any]) -> bool:
    own = type(algorithm.unwrapped).local_mean is not Algorithm.local_mean
    return own or "mean" in {f.name for f in all_fields(algorithm.exchanges[0].up)}


def with_epochs(value: T, epochs: int) -> T:
    """Return a copy of the hyperparameters with this number of local epochs."""
    changes: dict[str, Any] = {}
    for f in fields(value):  # type: ignore[arg-type]
        now = getattr(value, f.name)
        if f.name == "epochs":
            changes[f.name] = epochs
        elif is_dataclass(now) and not isinstance(now, type):
            changes[f.name] = with_epochs(now, epochs)
    return replace(value, **changes)  # type: ignore[type-var]


def personal_scores(
    problem: Problem, server: Any, state: Callable[[int], Any], round: int, folds: int
) -> PersonalScores:
    """Train and score every client's model, one after the other.

    server: the state after the last `round`. state: returns a client's state. folds: as in Context.
    """
    algorithm = with_epochs(problem.algorithm, problem.experiment.personalise)
    clients, ctx = len(problem.clients), problem.context(round + 1, 1, folds, len(problem.clients))
    dims, layout = problem.dims, problem.net.layout
    # no earlier broadcast is a reference here; without one, a code by +last or +own is too coarse
    codecs = {name: c for name, c in problem.codecs["down"].items() if not codec(c).last}
    context = of_broadcast(None, codec_stream(problem.experiment.seed, round + 1, 1))
    sent = algorithm.broadcast(server, ctx)
    common = decode_own(
        type(sent), encode(sent, codecs, dims, context, layout), codecs, dims, context, layout
    )
    part, net = optional_group(type(common)), problem.net
    net.acquire()
    tallies = [_global_tally(problem, algorithm.model(server, problem.context(0, 0)), round)]
    for k in range(clients):
        down, own = common, algorithm.broadcast_to(server, k, ctx)
        if part is not None and own is not None:
            payload = encode(own, codecs, dims, layout=layout)
            down = replace(down, **{part.name: decode_own(type(own), payload, codecs, dims, layout=layout)})
        rng = RandomStream(problem.experiment.seed, "personal", round + 1, k)
        task = Task(
            *(problem.start, problem.sizes, round + 1, 1, k, rng, folds, clients, problem.public_inputs),
            personal=True,
        )
        there = map_tensors((state(k), down, task.start), lambda t: t.to(net.device))
        _, up = algorithm.client_update(there[0], there[1], problem.shard(k), replace(task, start=there[2]))
        mean = algorithm.local_mean(there[1], up)
        tallies.append(_tally_of(problem, mean.float(), k))
    scoring = problem.client_scoring
    assert scoring is not None  # check_personalised
    if isinstance(scoring, LabelShares):
        alone = [LabelShares(scoring.shares[k : k + 1]).scores(t) for k, t in enumerate(tallies[1:])]
        return PersonalScores(_joined(alone), scoring.scores(tallies[0]))
    counted = np.array(tallies[1:]).reshape(clients, 3, -1).sum(axis=2)
    return PersonalScores(scoring.scores(counted.T.flatten().tolist()), scoring.scores(tallies[0]))


def _joined(alone: list[ClientScores]) -> ClientScores:
    each = ([getattr(s, name) for s in alone] for name in ("accuracy", "nll", "scored"))
    return ClientScores(*(np.concatenate(arrays) for arrays in each))


def _global_tally(problem: Problem, model: Model, round: int) -> Tally:
    """Return the global model's tally by client, or by class if clients have no test rows."""
    evaluation = replace(problem.evaluation, requested_samples=0)
    scores = [evaluation.score(model, chunk, round) for chunk in range(problem.chunks)]
    own = reduce(added, (s.clients for s in scores))
    return own or _per_class(problem, reduce(added, (s.tally for s in scores)))


def _per_class(problem: Problem, tally: Tally) -> Tally:
    assert problem.measure.per_class is not None  # check_personalised
    return tally[problem.measure.per_class]


def _tally_of(problem: Problem, weights: Tensor, client: int) -> Tally:
    """Return the tally per class of a client's model, on the client's test rows or on all rows."""
    data, measure, net = problem.dataset, problem.measure, problem.net
    rows = np.arange(len(data.test_targets))
    if problem.test_clients is not None:
        rows = np.flatnonzero(problem.test_clients == client)
    tallies: list[Tally] = []
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        inputs = problem.read(torch.from_numpy(np.array(data.test_inputs[part])))
        targets = torch.from_numpy(np.array(data.test_targets[part])).to(net.device)
        pieces = zip(torch.split(inputs, measure.rows), torch.split(targets, measure.rows), strict=True)
        tallies += [measure.tally(net.logits(weights, x).double(), y) for x, y in pieces]
    empty = (0.0,) * (3 * data.classes)
    return _per_class(problem, reduce(added, tallies)) if tallies else empty
