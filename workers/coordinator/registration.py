"""Who has joined: what a newcomer is told, and whether it has what the run needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fedsim.errors import WireError
from fedsim.wire.envelope import Letter


class Belongings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker says when it is ready. data: Problem.data_digest, '' if it was not asked for; sources:
    the user's own files and their sha256."""

    data: str
    sources: dict[str, str]

    @staticmethod
    def of(letter: Letter) -> Belongings:
        """Errors: WireError."""
        try:
            return msgspec.json.decode(letter.frames[0], type=Belongings)
        except (IndexError, msgspec.DecodeError, UnicodeDecodeError) as e:
            raise WireError(f"an unreadable 'ready': {e}") from None

    def differ(self, other: Belongings) -> str:
        """In what `other`, the coordinator's, is not the same; '' if it is."""
        if self.data != other.data:
            return f"its partitioned data has the digest {self.data}; this run's has {other.data}"
        for path, digest in other.sources.items():
            theirs = self.sources.get(path, "none")
            if theirs != digest:
                return f"its {path} has the sha256 {theirs[:12]}; this run's has {digest[:12]}"
        return ""


class Admission:
    """orders: what every worker is told in its welcome; ours: what it must have, too."""

    def __init__(self, orders: Mapping[str, Any], ours: Belongings, workers: int) -> None:
        self.orders, self.ours, self.workers = orders, ours, workers
        self.ready: set[int] = set()

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.workers)) - self.ready)

    def welcome(self, worker: int) -> bytes:
        return msgspec.json.encode({**self.orders, "index": worker})

    def examine(self, worker: int, letter: Letter) -> str:
        """Why a worker that says it is ready must not take part; '' if it may, and it is counted.

        Errors: WireError.
        """
        why = Belongings.of(letter).differ(self.ours)
        if not why:
            self.ready.add(worker)
        return why
