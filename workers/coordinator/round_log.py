"""The records of rounds that are not reported yet; complete ones are reported in ascending order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedsim.learning.client_scores import LabelShares
from fedsim.learning.likelihoods import Likelihood
from workers.storage.round_record import RoundRecord


class RoundLog:
    """Records by round, from its first broadcast until its line is reported."""

    def __init__(
        self,
        chunks: int,
        report: Callable[[Mapping[str, Any]], None],
        measure: Likelihood,
        shares: LabelShares | None = None,
    ) -> None:
        self.chunks, self._report, self._measure, self._shares = chunks, report, measure, shares
        self._records: dict[int, RoundRecord] = {}

    def open(self, round: int, participants: tuple[int, ...]) -> RoundRecord:
        """Return the record of a round, and begin it if there is none."""
        return self._records.setdefault(round, RoundRecord(round, participants))

    def restore(self, record: RoundRecord) -> None:
        """Add the record of a round that an earlier start has committed."""
        self._records[record.number] = record

    @property
    def oldest(self) -> int | None:
        """Return the first round whose line is not reported yet."""
        return min(self._records, default=None)

    def __getitem__(self, round: int) -> RoundRecord:
        return self._records[round]

    def drop(self, round: int) -> None:
        """Forget a round that is not evaluated."""
        del self._records[round]

    def accuracy(self, round: int) -> float | None:
        """Return a round's test accuracy; None while a chunk is not evaluated, or where there is none."""
        return self._records[round].accuracy(self.chunks, self._measure)

    def flush(self) -> None:
        """Report complete rounds in order; a round that is complete early waits for those before it."""
        while self._records:
            first = self._records[min(self._records)]
            if not first.committed or len(first.scores) < self.chunks:
                return
            self._report(first.line(self.chunks, self._measure, self._shares))
            del self._records[first.number]
