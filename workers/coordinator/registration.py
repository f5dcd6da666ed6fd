"""Which workers are ready, what each is told when it joins, and whether it has what the run needs."""

from __future__ import annotations

import msgspec

from fedsim.wire.envelope import Envelope
from workers.protocol_messages import WorkerConfig, WorkerManifest


class Registration:
    """The expected workers.

    worker_config: what all workers are told; each also gets its index. manifest: what a worker must have.
    workers: how many there should be, 0 in process.
    """

    def __init__(self, worker_config: WorkerConfig, manifest: WorkerManifest, workers: int) -> None:
        self.worker_config, self.manifest, self.workers = worker_config, manifest, workers
        self.ready: set[int] = set()

    @property
    def missing(self) -> list[int]:
        """The workers that are not ready yet."""
        return sorted(set(range(self.workers)) - self.ready)

    def config_of(self, worker: int) -> WorkerConfig:
        """Return what a worker is told when it joins."""
        return msgspec.structs.replace(self.worker_config, index=worker)

    def check_worker(self, worker: int, envelope: Envelope) -> str:
        """Check a worker that is set up, and count it as ready if it may take part.

        Returns:
            Why it must not take part; '' if it may.

        Raises:
            WireError: If its message cannot be read.
        """
        why = WorkerManifest.of(envelope).differ(self.manifest)
        if not why:
            self.ready.add(worker)
        return why
