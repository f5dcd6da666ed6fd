"""Who has joined: what a newcomer is told, and whether it has what the run needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fedsim.errors import WireError
from fedsim.wire.envelope import Envelope


class WorkerManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker says when it is ready. data: Problem.data_digest, '' if it was not asked for; sources:
    the user's own files and their sha256."""

    data: str
    sources: dict[str, str]

    @staticmethod
    def of(envelope: Envelope) -> WorkerManifest:
        """See below.

        Raises:
            WireError: if it is damaged or does not fit.
        """
        try:
            return msgspec.json.decode(envelope.frames[0], type=WorkerManifest)
        except (IndexError, msgspec.DecodeError, UnicodeDecodeError) as e:
            raise WireError(f"an unreadable 'ready': {e}") from None

    def differ(self, other: WorkerManifest) -> str:
        """In what `other`, the coordinator's, is not the same; '' if it is."""
        if self.data != other.data:
            return f"its partitioned data has the digest {self.data}; this run's has {other.data}"
        for path, digest in other.sources.items():
            theirs = self.sources.get(path, "none")
            if theirs != digest:
                return f"its {path} has the sha256 {theirs[:12]}; this run's has {digest[:12]}"
        return ""


class Registration:
    """orders: what every worker is told in its welcome; ours: what it must have, too."""

    def __init__(self, worker_config: Mapping[str, Any], ours: WorkerManifest, workers: int) -> None:
        self.worker_config, self.ours, self.workers = worker_config, ours, workers
        self.ready: set[int] = set()

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.workers)) - self.ready)

    def registration_reply(self, worker: int) -> bytes:
        return msgspec.json.encode({**self.worker_config, "index": worker})

    def check_worker(self, worker: int, envelope: Envelope) -> str:
        """Why a worker that says it is ready must not take part; '' if it may, and it is counted.

        Raises:
            WireError: if it is damaged or does not fit.
        """
        why = WorkerManifest.of(envelope).differ(self.ours)
        if not why:
            self.ready.add(worker)
        return why
