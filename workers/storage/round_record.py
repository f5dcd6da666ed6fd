"""The record of one round, for its line in metrics.jsonl and its entry in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from fedsim.errors import UsageError
from fedsim.evaluation import ChunkScore
from fedsim.learning.client_scores import LabelShares, OwnTestRows
from fedsim.learning.gaussian import Model
from fedsim.learning.likelihoods import Likelihood, Tally, added
from workers.storage.metrics_file import EDGE_BYTES, RESERVED

NOT_KEPT = ("model", "committed", "sampled", "scores")
"""The fields that the journal does not keep."""


@dataclass
class RoundRecord:
    """The record of one round.

    model: the model to evaluate. reported: the numbers that the algorithm reports. sampled: True if posterior
    samples are evaluated as well as the posterior's mean. committed: True if traffic and time are known; the
    line is complete once all chunks are evaluated, too.
    """

    number: int
    participants: tuple[int, ...] = ()
    folded: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    unchanged: tuple[int, ...] = ()
    """The clients that have computed but sent no fields, because their event rule did not fire (+event)."""
    refused: tuple[int, ...] = ()
    """The clients whose uploads must not be folded (bad_uploads = skip)."""
    simulated: float | None = None
    """Seconds of the round on the virtual clock, if there is one."""
    joules: float | None = None
    """The energy of all clients in the round, if their devices state an energy."""
    staleness: tuple[int, ...] = ()
    """For each participant of an asynchronous run, the server steps since the broadcast that it answers."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """The cost of the last exchange's messages and their limits (fedsim.wire.limits)."""
    seconds: float = 0.0
    seconds_clients: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    edge_bytes: tuple[int, int] | None = None
    """Bytes between edge servers and the root, down and up; None without edge servers."""
    reported: dict[str, float] = field(default_factory=dict)
    model: Model | None = None
    committed: bool = False
    sampled: bool = False
    scores: dict[int, ChunkScore] = field(default_factory=dict)

    def known(self) -> dict[str, Any]:
        """Return the fields that the journal keeps of a committed round: all but NOT_KEPT."""
        reported = {name: float(x) for name, x in self.reported.items()}
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NOT_KEPT}
        return kept | {"reported": reported}

    @staticmethod
    def restored(known: Mapping[str, Any], model: Model) -> RoundRecord:
        """Return the record of a round that an earlier start committed and that is still to be evaluated."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
        return RoundRecord(**values, model=model, committed=True)

    def report(self, numbers: Mapping[str, float]) -> None:
        """Add numbers that the algorithm reports.

        Raises:
            UsageError: if a line of metrics.jsonl already has a value of that name.
        """
        for name in numbers:
            if name in RESERVED or name.startswith("seconds"):
                raise UsageError(f"an algorithm cannot report {name!r}: metrics.jsonl has its own")
        self.reported.update(numbers)

    def accuracy(self, chunks: int, measure: Likelihood) -> float | None:
        """Return the test accuracy; None if the measure has none or a chunk has not been evaluated."""
        if len(self.scores) < chunks:
            return None
        return measure.numbers(self._tally(chunks))["test_accuracy"]

    def _tally(self, chunks: int) -> Tally:
        return reduce(added, (self.scores[chunk].tally for chunk in range(chunks)))

    def line(
        self, chunks: int, measure: Likelihood, scoring: LabelShares | OwnTestRows | None = None
    ) -> dict[str, Any]:
        """Return the round's line of metrics.jsonl; sums are combined in chunk order.

        scoring: the rule for clients' scores; None for no scores per client.
        """
        tally = self._tally(chunks)
        numbers = measure.numbers(tally)
        lists: dict[str, Any] = {"reliability": measure.reliability(tally)}
        if scoring is not None and measure.per_class is not None:
            own = reduce(added, (self.scores[chunk].clients for chunk in range(chunks)))
            clients = scoring.scores(own or tally[measure.per_class])
            numbers |= clients.numbers()
            lists |= {"client_accuracy_histogram": clients.histogram(), **clients.lists()}
        if self.sampled:
            average = reduce(added, (self.scores[chunk].ensemble for chunk in range(chunks)))
            averaged = measure.numbers(average)
            numbers |= {f"ensemble_{name.removeprefix('test_')}": n for name, n in averaged.items()}
            lists["ensemble_reliability"] = measure.reliability(average)
        return {
            "round": self.number,
            "participants": list(self.participants),
            **({"folded": list(self.folded)} if self.folded != self.participants and self.number else {}),
            **({"late": list(self.late)} if self.late else {}),
            **({"refused": list(self.refused)} if self.refused else {}),
            **({"unchanged": list(self.unchanged)} if self.unchanged else {}),
            **({} if self.simulated is None else {"simulated_seconds": self.simulated}),
            **({} if self.joules is None else {"joules": self.joules}),
            **({"staleness": list(self.staleness)} if self.staleness else {}),
            **({"limits": dict(self.limits)} if self.limits else {}),
            **numbers,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            **(dict(zip(EDGE_BYTES, self.edge_bytes, strict=True)) if self.edge_bytes else {}),
            **self.reported,
            "seconds": round(self.seconds, 6),
            "seconds_clients": round(self.seconds_clients, 6),
            **{name: values for name, values in lists.items() if values is not None},
        }
