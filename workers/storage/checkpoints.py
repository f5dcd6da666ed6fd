"""Checkpoints: the files from which a run resumes.

A round's checkpoint names the version of every client's state and is the single commit point. It records
digests of the run's growing files and of the experiment, so that a change in any of them is detected. It is
written under a temporary name and renamed, which survives kill -9. A background thread makes the checkpoint
durable (workers.storage.durability), so that no round waits.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor

from fedsim.errors import DiskError
from fedsim.wire.state_file import decode_state, state_chunks
from workers.storage.atomic_files import SPARE, disk_errors, remove_or_spare, write_atomically
from workers.storage.client_states import ClientStates
from workers.storage.committed_files import checkpoint_bytes
from workers.storage.durability import Durability, NoSyncer, Syncer, Written
from workers.storage.growing_file import FileDigest

Server = TypeVar("Server")
KEEP: Mapping[Durability, int] = {"power": 3, "process": 2}
"""The number of checkpoints that are always kept, with the states that they name."""
DISK_DEADLINE = 120.0
"""The maximum number of seconds for writing one checkpoint."""


@dataclass(frozen=True)
class Checkpoint(Generic[Server]):
    """One committed round.

    Attributes:
        round: The number of the round.
        versions: The versions of all clients' states, (K,) int64.
        server: The server's state.
        folds: The number of rounds that have folded an upload.
        files: The lengths and digests of the run's growing files at the commit.
        experiment: The digest of the manifest's experiment.
        run: The run's name.
        states: The checksums of all clients' states, (K,) int64, 0 for version 0; None before it is written.
        broadcast: The last broadcast as clients decoded it, if the next one refers to it.
        broadcast_round: The round of `broadcast`.
    """

    round: int
    versions: Tensor
    server: Server
    folds: int = 0
    files: tuple[FileDigest, ...] = ()
    experiment: str = ""
    run: str = ""
    states: Tensor | None = None
    broadcast: Any = None
    broadcast_round: int = 0

    def load_state(self, states: ClientStates, client: int) -> Any:
        """Return a client's state in the version that the checkpoint names, which must not be 0."""
        expected = None if self.states is None else int(self.states[client]) % 2**64
        return states.load(client, int(self.versions[client]), expected)

    def ends(self) -> dict[str, int]:
        """Return the recorded length of each of the run's files."""
        return {file.name: file.bytes for file in self.files}


def read_checkpoint(
    path: Path, server_type: type[Server], broadcast_type: type | None = None
) -> Checkpoint[Server]:
    """Read a checkpoint.

    broadcast_type: the class of the checkpoint's broadcast, if it has one.

    Raises:
        WireError: if the file is damaged or belongs to another algorithm.
        DiskError: if the file cannot be read.
    """
    of_algorithm = {"server": server_type, "broadcast": (broadcast_type or server_type) | None}
    hints = get_type_hints(Checkpoint) | of_algorithm
    kind = make_dataclass("Checkpoint", [(f.name, hints[f.name]) for f in fields(Checkpoint)], frozen=True)
    read: Any = decode_state(kind, checkpoint_bytes(path), f"checkpoint {path}")
    return Checkpoint(**vars(read))


class Checkpoints:
    """A writer of the coordinator's checkpoints, which also removes files that are no longer needed.

    One thread writes and renames checkpoints in order; another thread makes them durable. commit() returns at
    once unless the previous checkpoint is still being written. A kill -9 costs at most the last committed
    round and the current one. No round waits for fsync.
    """

    def __init__(
        self,
        folder: Path,
        states: ClientStates,
        beside: Sequence[Path] = (),
        durability: Durability = "power",
    ) -> None:
        """Start the threads. beside: other files to sync before a checkpoint; they may not exist yet."""
        self.folder, self.states, self._keep = folder, states, KEEP[durability]
        self._spares = durability != "power"
        """True if old state files may be overwritten even if some clients do not take part."""
        self._kept: deque[Written] = deque()
        self._to_write: queue.SimpleQueue[tuple[Written, Checkpoint[Any]] | None] = queue.SimpleQueue()
        self._writing = threading.Semaphore(1)
        self._syncer = Syncer(folder, beside) if durability == "power" else NoSyncer(folder, beside)
        self._checksums: Tensor | None = None
        """The checksums of the states that the last checkpoint names, (K,) int64."""
        self._error: BaseException | None = None
        self._threads = (
            threading.Thread(target=self._write, name="checkpoints", daemon=True),
            *self._syncer.threads,
        )
        self._threads[0].start()

    def commit(
        self,
        round: int,
        server: Any,
        versions: tuple[int, ...],
        folded: tuple[int, ...],
        needed: int | None = None,
        folds: int = 0,
        files: tuple[FileDigest, ...] = (),
        experiment: str = "",
        broadcast: tuple[Any, int] = (None, 0),
    ) -> None:
        """Write the checkpoint of a round, and remove files that are no longer needed.

        This keeps the last KEEP checkpoints, those from round `needed` on (whose models may not be evaluated
        yet), the newest durable one with those that it needs, and all states that these checkpoints name.
        folded: the clients whose versions changed. needed: never less than at an earlier commit. folds,
        files, experiment, broadcast (with its round): the attributes of Checkpoint.

        Raises:
            DiskError: if an earlier write failed, or has not finished within DISK_DEADLINE seconds.
        """
        self._raise()
        if not self._writing.acquire(timeout=DISK_DEADLINE):
            raise DiskError(f"{self.folder}: nothing could be written for {DISK_DEADLINE:g} s")
        self._raise()
        states = {k: self.states.path(k, versions[k]) for k in folded}
        first = round if needed is None else needed
        written = Written(self.path(round), round, versions, states, first)
        checkpoint = Checkpoint(
            round, torch.tensor(versions), server, folds, files, experiment, self.states.run, None, *broadcast
        )
        self._to_write.put((written, checkpoint))

    def close(self, deadline: float = 30.0) -> None:
        """Wait until all commits are durable, at most `deadline` seconds for each thread."""
        self._to_write.put(None)
        for thread in self._threads:
            thread.join(deadline)
            if thread.is_alive():
                raise DiskError(f"{self.folder}: {thread.name} has not finished after {deadline:g} s")
        self._raise()
        with disk_errors(self.folder):
            self._drop()  # the writer has ended, and the last checkpoint is durable
            for path in (self.folder / SPARE, *self.states.folder.glob(f"*/{SPARE}")):
                path.unlink(missing_ok=True)

    def adopt(self, checkpoints: Iterable[Checkpoint[Any]]) -> None:
        """Add the checkpoints of an earlier start of the run, in ascending order, before any commit."""
        for checkpoint in checkpoints:
            r, versions = checkpoint.round, tuple(checkpoint.versions.tolist())
            paths = ((k, self.states.path(k, version)) for k, version in enumerate(versions) if version)
            files = {k: path for k, path in paths if path.exists()}  # an older version's file may be removed
            first = self._kept[0].round if self._kept else r  # lines missing in metrics.jsonl are not known
            adopted = Written(self.path(r), r, versions, files, first)
            self._kept.append(adopted)
            self._syncer.adopt(adopted)
            self._checksums = checkpoint.states

    def path(self, round: int) -> Path:
        return self.folder / f"{round:06d}.checkpoint"

    def _raise(self) -> None:
        error = self._error or self._syncer.error
        if error is not None:
            raise error

    def _write(self) -> None:
        while (commit := self._to_write.get()) is not None:
            written, checkpoint = commit
            try:
                checkpoint = replace(checkpoint, states=self._checksums_of(written))
                write_atomically(written.path, state_chunks(checkpoint), spare=self.folder / SPARE)
                self._kept.append(written)
                self._syncer.add(written)
                self._drop()
            except BaseException as e:  # raised in the main thread by the next commit, or by close
                self._error = e
            del commit, checkpoint  # free the server's state
            self._writing.release()
        self._syncer.close()

    def _checksums_of(self, written: Written) -> Tensor:
        """Return the checksums of a checkpoint's states; only the files in written.states have to be read."""
        if self._checksums is None:
            self._checksums = torch.zeros(len(written.versions), dtype=torch.int64)
        for k in written.states:
            unsigned = self.states.checksum(k, written.versions[k])
            self._checksums[k] = unsigned - (unsigned >> 63 << 64)
        return self._checksums

    def _drop(self) -> None:
        """Delete the files that neither the last KEEP checkpoints nor the newest durable checkpoint needs.

        A power cut may leave no newer checkpoint than the durable one. All are kept until one is durable.
        """
        durable = self._syncer.durable
        dropped: list[Written] = []
        while durable and len(self._kept) > self._keep and self._kept[0].round < durable.needed:
            dropped.append(self._kept.popleft())
        for old in dropped:
            remove_or_spare(old.path)
        if dropped:  # versions only grow
            oldest = self._kept[0].versions
            changed = [k for k, version in enumerate(dropped[0].versions) if version != oldest[k]]
            spare = self._spares or len(changed) == len(oldest)
            for k in changed:
                self.states.remove(k, below=oldest[k], spare=spare)
