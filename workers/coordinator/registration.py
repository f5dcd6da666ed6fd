"""Registration: checks each worker that joins, and answers it."""

from __future__ import annotations

import msgspec

from fedsim.wire.envelope import Envelope
from workers.numerics import Difference, differences
from workers.place import Place
from workers.protocol_messages import WorkerConfig, WorkerManifest


class Registration:
    """The expected workers.

    worker_config: for all workers; each also gets its index. manifest: the values that a worker must have.
    workers: their number, 0 in process. allow_drift: accept workers that compute other bits.
    """

    def __init__(
        self, worker_config: WorkerConfig, manifest: WorkerManifest, workers: int, allow_drift: bool = False
    ) -> None:
        self.worker_config, self.manifest, self.workers = worker_config, manifest, workers
        self.allow_drift = allow_drift
        self.facts = dict(manifest.facts)
        """The numerics of the run; the coordinator takes unknown values from the first worker."""
        self.places: dict[int, Place] = {}
        """The place of each registered worker."""
        self.ready: set[int] = set()
        self.setting_up: set[int] = set()
        """Workers that are being set up, and have not answered yet."""
        self.refused: list[str] = []
        """Why workers could not take part, one reason each."""

    def cannot_start(self) -> bool:
        """Return whether as many workers were refused as are missing, and no other one is being set up."""
        return bool(self.missing) and len(self.refused) >= len(self.missing) and not self.setting_up

    @property
    def missing(self) -> list[int]:
        """The workers that are not ready yet."""
        return sorted(set(range(self.workers)) - self.ready)

    def config_of(self, worker: int) -> WorkerConfig:
        """Return the data for a worker that joins; it is being set up from now on."""
        self.setting_up.add(worker)
        return msgspec.structs.replace(self.worker_config, index=worker)

    def check_worker(self, worker: int, envelope: Envelope) -> tuple[str, str]:
        """Check a worker that is set up, and count it as ready if it may take part.

        Returns:
            The reason to refuse it, '' if it may take part; and the possible difference of its bits, '' if
            there is none.

        Raises:
            WireError: If its message cannot be read.
        """
        theirs = WorkerManifest.of(envelope)
        self.places[worker] = theirs.place
        drift = list(differences(theirs.facts, self.facts))
        why = theirs.differ(self.manifest)
        if not why and drift and not self.allow_drift:
            why = self._other_bits(theirs, drift)
        if not why:
            self.ready.add(worker)
            self.setting_up.discard(worker)
            self.facts = {**theirs.facts, **self.facts}
        return why, "; ".join(map(str, drift))

    def _other_bits(self, theirs: WorkerManifest, drift: list[Difference]) -> str:
        """Return the reason for refusing a worker that computes other bits, with possible remedies."""
        processors = ""
        if theirs.processor != self.manifest.processor:
            processors = f" (it runs on {theirs.processor}, the coordinator on {self.manifest.processor})"
        return (
            f"it computes other bits: {'; '.join(map(str, drift))}{processors}. Take machines of one "
            "kind, or start the run with --numerics portable, or with --allow-drift"
        )

    def refuse(self, worker: int, why: str) -> None:
        """Note that a worker cannot take part."""
        self.setting_up.discard(worker)
        self.refused.append(f"worker {worker}: {why}")

    def left(self, worker: int) -> None:
        """Note that a worker has left."""
        self.setting_up.discard(worker)
        self.ready.discard(worker)
