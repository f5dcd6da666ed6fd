"""Uploads that have arrived before their turn: in memory up to a bound, on disk beyond it."""

from __future__ import annotations

import threading
from pathlib import Path

from fedsim.wire.envelope import NONE, Buffer, Envelope, unpack
from workers.storage.atomic_files import disk_errors, write_atomically
from workers.storage.descriptors import patiently
from workers.storage.upload_archive import keep_upload

MEMORY_BYTES = 64 * 2**20
"""Of uploads that wait; one is kept in memory however large it is."""


class Spool:
    """Envelopes by client; only frames go to disk, headers stay.

    keep: the folder of the message trace, if the run leaves one.
    """

    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES, keep: Path | None = None) -> None:
        """Remove what an earlier start of the run has left in the folder: no fold will take it.

        Raises:
            DiskError: If the folder cannot be cleared.
        """
        with disk_errors(folder):
            for path in folder.glob("*.upload*") if folder.exists() else ():
                path.unlink()
        self.folder, self.room, self.keep = folder, memory_bytes, keep
        self._lock = threading.Lock()
        """put runs in the main thread, take in the fold's"""
        self._envelopes: dict[int, tuple[Envelope, int]] = {}
        self._spilled: set[int] = set()

    def put(self, client: int, envelope: Envelope, worker: int = NONE) -> None:
        """Keep an upload until its turn; worker: the worker that has sent it.

        Raises:
            DiskError: If it cannot be written.
        """
        if self.keep is not None:
            keep_upload(self.keep, envelope)
        with self._lock:
            self._put(client, envelope, worker)

    def _put(self, client: int, envelope: Envelope, worker: int) -> None:
        size = envelope.total_bytes()
        if size > self.room and len(self._envelopes) > len(self._spilled):
            with disk_errors(self.folder):
                self.folder.mkdir(exist_ok=True)
            write_atomically(self._path(client), envelope.frames)
            self._spilled.add(client)
            envelope = Envelope(envelope.header, envelope.head, ())
        else:
            self.room -= size
        self._envelopes[client] = envelope, worker

    def take(self, client: int) -> tuple[Envelope, int]:
        """Return an upload and the worker that has sent it, and forget it.

        Raises:
            WireError: If its file was damaged.
            DiskError: If its file cannot be read.
        """
        with self._lock:
            return self._pop(client)

    def discard(self, client: int) -> None:
        """Forget an upload, if there is one: a client that has dropped out has sent none.

        Raises:
            DiskError: If its file cannot be removed.
        """
        with self._lock:
            if client not in self._envelopes:
                return
            envelope, _ = self._envelopes.pop(client)
            if client not in self._spilled:
                self.room += envelope.total_bytes()
                return
            self._spilled.discard(client)
            with disk_errors(self._path(client)):
                self._path(client).unlink()

    def _pop(self, client: int) -> tuple[Envelope, int]:
        envelope, worker = self._envelopes.pop(client)
        if client not in self._spilled:
            self.room += envelope.total_bytes()
            return envelope, worker
        self._spilled.discard(client)
        path = self._path(client)
        with disk_errors(path):
            data = memoryview(patiently(path.read_bytes))
            path.unlink()
        frames: list[Buffer] = []
        at = 0
        for part in (p for f in envelope.header.fields for p in f.parts):
            frames.append(data[at : at + part.nbytes])
            at += part.nbytes
        return unpack([envelope.head, *frames], f"spooled upload of client {client}, {path}"), worker

    def _path(self, client: int) -> Path:
        return self.folder / f"{client:06d}.upload"
