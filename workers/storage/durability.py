"""Calls of fsync, which limit the loss in a power cut to the rounds that are not yet synced.

A renamed file survives kill -9. A power cut preserves the content of files and the entries of folders only up
to the last fsync; later changes may survive in part. A checkpoint is therefore durable if it, the states that
it names and the other files that recovery reads have been synced, each with its folder, and if none of them
has been removed.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedsim.errors import DiskError
from workers.storage.atomic_files import patiently

Durability = Literal["process", "power"]
"""The events that a committed round survives. process: the end of any process. power: also a power cut."""
LARGE_PARAMETERS = 4_000_000
"""The number of parameters from which the default is process: a client's state then has at least 64 MB, and
syncing it takes longer than the round (docs/decisions/026-large-models.md)."""
SYNC_SECONDS = 1.0
"""The shortest time between two syncs, in seconds."""


@dataclass(frozen=True)
class Written:
    """A checkpoint and the files that it needs.

    versions: the versions of all clients' states. states: the files of states that no earlier checkpoint
    names, by client. needed: the first round whose checkpoint recovery may read, because the line of that
    round may be missing in metrics.jsonl.
    """

    path: Path
    round: int
    versions: tuple[int, ...]
    states: Mapping[int, Path]
    needed: int


def fsync(path: Path) -> None:
    """Sync a file's content, or a folder's entries."""
    handle = patiently(lambda: os.open(path, os.O_RDONLY))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def by_size(parameters: int) -> Durability:
    """Return the default durability for a model of P parameters."""
    return "process" if parameters >= LARGE_PARAMETERS else "power"


class NoSyncer:
    """The syncer for durability = process, which syncs only the results at the end of a run.

    A checkpoint counts as soon as it is renamed; the kernel writes it to the disk later. folder: the folder
    of checkpoints. beside: the run's other files, which may not exist yet. durable: the newest checkpoint.
    """

    threads: tuple[threading.Thread, ...] = ()

    def __init__(self, folder: Path, beside: Sequence[Path]) -> None:
        self.folder, self.beside = folder, beside
        self.durable: Written | None = None
        self.error: DiskError | None = None

    def adopt(self, written: Written) -> None:
        """Do nothing."""

    def add(self, written: Written) -> None:
        self.durable = written

    def close(self) -> None:
        """Sync the run's other files, because a summary with status done is not accepted without them."""
        try:
            _sync_files(self.beside, self.folder.parent)
        except OSError as e:
            self.error = _not_durable(e, self.folder)


class Syncer(NoSyncer):
    """The syncer for durability = power, which has its own thread, so that no round waits.

    durable is the newest durable checkpoint. Code that removes files must keep it, the checkpoints from round
    durable.needed on, the states that they name, and everything newer.
    """

    def __init__(self, folder: Path, beside: Sequence[Path]) -> None:
        super().__init__(folder, beside)
        self._written: queue.SimpleQueue[Written | None] = queue.SimpleQueue()
        self._unsynced: list[Written] = []
        self._last = -math.inf
        self.threads = (threading.Thread(target=self._run, name="fsync", daemon=True),)
        self.threads[0].start()

    def adopt(self, written: Written) -> None:
        """Add a checkpoint of an earlier start of the run, which is synced with the next one, perhaps again.
        Call this before add()."""
        self._unsynced.append(written)

    def add(self, written: Written) -> None:
        """Queue a checkpoint, and return at once."""
        self._written.put(written)

    def close(self) -> None:
        """Let the thread end once all added checkpoints are durable."""
        self._written.put(None)

    def _run(self) -> None:
        try:
            while self._gather():
                self._sync()
            if self._unsynced:
                self._sync()
            else:  # lines and rows may have been written after the last checkpoint
                _sync_files(self.beside, self.folder.parent)
        except OSError as e:
            self.error = _not_durable(e, self.folder)

    def _gather(self) -> bool:
        """Wait for a checkpoint, then until the next sync is due. Return False after close()."""
        written = self._written.get()
        due = self._last + SYNC_SECONDS
        while written is not None:
            self._unsynced.append(written)
            try:
                written = self._written.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._last = time.monotonic()
                return True
        return False

    def _sync(self) -> None:
        """Sync the newest checkpoint and those that it needs. Each is synced after the files that it names,
        because a power cut may come in between. Other checkpoints may already be removed."""
        newest = self._unsynced[-1]
        states: dict[int, Path] = {}
        files: dict[Path, None] = {}
        checkpoints = []
        for written in self._unsynced:
            states |= written.states
            if written.round >= newest.needed:
                files |= dict.fromkeys(states.values())
                checkpoints.append(written.path)
        clients = dict.fromkeys(path.parent for path in files)
        folders = dict.fromkeys(path.parent for path in clients)  # a client's folder may be new
        for path in [*files, *clients, *folders]:
            fsync(path)
        _sync_files(self.beside, self.folder.parent)
        for path in [*checkpoints, self.folder]:
            fsync(path)
        self.durable = newest
        self._unsynced.clear()


def _sync_files(files: Sequence[Path], folder: Path) -> None:
    """Sync the files that exist, and the folder that contains them."""
    for path in files:
        with suppress(FileNotFoundError):
            fsync(path)
    fsync(folder)


def _not_durable(e: OSError, folder: Path) -> DiskError:
    return DiskError(f"cannot make {e.filename or folder} durable: {e.strerror}")
