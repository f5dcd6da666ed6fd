"""Uploads that have arrived before their turn, in memory up to a limit and on disk beyond it."""

from __future__ import annotations

import threading
from pathlib import Path

from fedsim.wire.envelope import NONE, Envelope, slices_of, unpack
from workers.storage.atomic_files import disk_errors
from workers.storage.spill_file import Region, SpillFile

MEMORY_BYTES = 64 * 2**20
"""The memory for waiting uploads, in bytes; one upload is kept in memory whatever its size."""


class Spool:
    """The waiting envelopes by client. Only frames are written to disk; headers stay in memory."""

    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        """Remove the files of an earlier start of the run, which no fold will use."""
        with disk_errors(folder):
            for path in folder.glob("*.upload*") if folder.exists() else ():
                path.unlink()
        self.folder, self.room = folder, memory_bytes
        self._lock = threading.Lock()
        """A lock, because put() runs in the main thread and take() in the fold thread."""
        self._envelopes: dict[int, tuple[Envelope, int]] = {}
        self._spilled: dict[int, Region] = {}
        self._file: SpillFile | None = None

    def put(self, client: int, envelope: Envelope, worker: int = NONE) -> None:
        """Keep an upload until its turn. worker: the worker that sent it."""
        size = envelope.total_bytes()
        with self._lock:
            if size <= self.room or len(self._envelopes) == len(self._spilled):
                self.room -= size
                self._envelopes[client] = envelope, worker
                return
            if self._file is None:
                self._file = SpillFile(self.folder)
            file, region = self._file, self._file.reserve(size - len(envelope.head))
        file.write(region, envelope.frames)  # without the lock, so that take() need not wait
        with self._lock:
            self._spilled[client] = region
            self._envelopes[client] = Envelope(envelope.header, envelope.head, ()), worker

    def take(self, client: int) -> tuple[Envelope, int]:
        """Return an upload and the worker that sent it, and forget the upload."""
        with self._lock:
            envelope, worker = self._envelopes.pop(client)
            region = self._spilled.pop(client, None)
            if region is None:
                self.room += envelope.total_bytes()
                return envelope, worker
        assert self._file is not None
        data = self._file.read(region)
        with self._lock:
            self._file.free(region)
        frames = slices_of(data, envelope.sizes[1:])
        return unpack([envelope.head, *frames], f"spooled upload of client {client}, {self.folder}"), worker

    def discard(self, client: int) -> None:
        """Forget a client's upload, if there is one; dropouts have none."""
        with self._lock:
            envelope, _ = self._envelopes.pop(client, (None, NONE))
            region = self._spilled.pop(client, None)
            if self._file is not None and region is not None:
                self._file.free(region)
            elif envelope is not None:
                self.room += envelope.total_bytes()
