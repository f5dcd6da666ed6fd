"""Files a run resumes from: versioned client states and checkpoints.

A client's state lives in state/<client>/<version>.state; workers are caches of it. A worker writes
version s+1 before it replies; the round's checkpoint names the version of every client and is the
single commit point. Files are written under another name and renamed, which survives kill -9; a
background thread makes them durable (workers.storage.durability) off the critical path.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, make_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedsim.errors import DiskError
from fedsim.problem import Problem
from fedsim.wire.codecs import raw_bytes
from fedsim.wire.envelope import Buffer
from fedsim.wire.state_file import decode_state, encode_state, state_chunks
from workers.storage.durability import Syncer, Written

Server = TypeVar("Server")
KEEP = 3
CACHE_BYTES = 256 * 2**20
SMALL_BYTES = 4096
DISK_DEADLINE = 120.0


@dataclass(frozen=True)
class Checkpoint(Generic[Server]):
    """One committed round: versions (K,) int64 of all clients' states, the server's state, and where
    ledger.csv ends with this round's rows."""

    round: int
    versions: Tensor
    server: Server
    ledger: int = 0


@contextmanager
def disk_errors(what: str | Path) -> Iterator[None]:
    """OSErrors of the block as DiskErrors that begin with `what`."""
    try:
        yield
    except OSError as e:
        raise DiskError(f"{what}: {e.strerror}") from None


def read_checkpoint(path: Path, server_type: type[Server]) -> Checkpoint[Server]:
    """See below.

    Raises:
        WireError: if the file is damaged or of another algorithm.
        DiskError: if it is not there.
    """
    fields = [("round", int), ("versions", Tensor), ("server", server_type), ("ledger", int)]
    with disk_errors(f"checkpoint {path}"):
        data = path.read_bytes()
    read: Any = decode_state(make_dataclass("Checkpoint", fields, frozen=True), data, f"checkpoint {path}")
    return Checkpoint(read.round, read.versions, read.server, read.ledger)


def write_atomically(path: Path, chunks: Iterable[Buffer]) -> int:
    """Write under a temporary name and rename; returns the bytes.

    Raises:
        DiskError: with the path.
    """
    temporary = f"{path.parent}/.{path.name}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            size = sum(file.write(chunk) for chunk in chunks)
        os.rename(temporary, path)
    except OSError as e:
        with suppress(OSError):
            os.unlink(temporary)
        raise DiskError(f"cannot write {path}: {e.strerror}") from None
    return size


class ClientStates:
    """Client states by (client, version), with a bounded cache of decoded ones."""

    def __init__(self, folder: Path, kind: type) -> None:
        self.folder, self.kind = folder, kind
        self._cache: OrderedDict[tuple[int, int], tuple[Any, int]] = OrderedDict()
        self._cached_bytes = 0
        self._folders: set[int] = set()
        self._small: dict[int, tuple[int, bytes]] = {}

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:06d}" / f"{version:06d}.state"

    def load(self, client: int, version: int) -> Any:
        """See below.

        Raises:
            WireError: if the file is damaged.
            DiskError: if it is not there.
        """
        hit = self._cache.get((client, version))
        if hit is not None:
            return hit[0]
        owner = f"the state of client {client}, {self.path(client, version)}"
        return decode_state(self.kind, self.read(client, version), owner)

    def read(self, client: int, version: int) -> bytes:
        """A state's file.

        Raises:
            DiskError: if the disk cannot be read or written.
        """
        path = self.path(client, version)
        with disk_errors(f"the state of client {client}, {path}"):
            return path.read_bytes()

    def put(self, client: int, version: int, data: bytes) -> None:
        """Write a state's file as somebody else has read it.

        Raises:
            WireError: if it holds no such state.
            DiskError: if the disk cannot be read or written.
        """
        path = self.path(client, version)
        decode_state(self.kind, data, f"the state of client {client}, version {version}")
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [data])

    def save(self, client: int, version: int, state: Any) -> None:
        path = self.path(client, version)
        if client not in self._folders:
            with disk_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(client)
        chunks = state_chunks(state)
        size = sum(memoryview(chunk).nbytes for chunk in chunks)
        if size > SMALL_BYTES or not self._linked(client, version, b"".join(chunks)):
            write_atomically(path, chunks)
        _, replaced = self._cache.pop((client, version), (None, 0))  # a task may be computed again
        self._cache[client, version] = (state, size)
        self._cached_bytes += size - replaced
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1][1]

    def _linked(self, client: int, version: int, data: bytes) -> bool:
        """Make this version a hard link to the last one if it has the same bytes: a stateless client's
        file is written once, not every round."""
        before, same = self._small.get(client, (version, b""))
        self._small[client] = (version, data)
        if before == version or same != data:
            return False
        try:
            os.link(self.path(client, before), self.path(client, version))
        except OSError:  # removed, there already, or a file system without links
            return False
        return True

    def forget(self, client: int, below: int) -> None:
        """Drop cached versions older than `below`: no task will start from them again."""
        for key in [k for k in self._cache if k[0] == client and k[1] < below]:
            self._cached_bytes -= self._cache.pop(key)[1]

    def remove(self, client: int, below: int) -> None:
        """Delete the files of all versions older than `below`, also of drafts that no round committed."""
        folder = self.path(client, 0).parent
        for name in os.listdir(folder):
            if name.endswith(".state") and int(name.removesuffix(".state")) < below:
                with suppress(FileNotFoundError):
                    os.unlink(folder / name)

    def digest(self, client: int, version: int) -> bytes:
        """sha256 of a state's file.

        Raises:
            DiskError: if the disk cannot be read.
        """
        return sha256(self.read(client, version)).digest()


class Checkpoints:
    """The coordinator's side: commits, and what they keep alive.

    One thread writes and renames, in order; another makes durable what has been written. commit()
    returns at once unless the previous checkpoint is still being written: a kill -9 costs at most the
    round just committed and what was under way, and no round waits for fsync.
    """

    def __init__(self, folder: Path, states: ClientStates, beside: Sequence[Path] = ()) -> None:
        """beside: the run's other files that are made durable before a checkpoint is; they may not be there
        yet."""
        self.folder, self.states = folder, states
        self._kept: deque[Written] = deque()
        self._to_write: queue.SimpleQueue[tuple[Written, Checkpoint[Any]] | None] = queue.SimpleQueue()
        self._writing = threading.Semaphore(1)
        self._syncer = Syncer(folder, beside)
        self._error: BaseException | None = None
        self._threads = (
            threading.Thread(target=self._write, name="checkpoints", daemon=True),
            self._syncer.thread,
        )
        self._threads[0].start()

    def commit(
        self,
        round: int,
        server: Any,
        versions: tuple[int, ...],
        folded: tuple[int, ...],
        needed: int | None = None,
        ledger: int = 0,
    ) -> None:
        """Write the checkpoint of a round, and drop what is needed no more: the last three are kept, those
        from round `needed` on (whose models are still to be evaluated), and the newest durable one with what
        it needs; of states, those that any of them names.

        folded: whose versions changed. needed: never less than at an earlier commit.

        Raises:
            DiskError: of an earlier write, or if the disk does not take one.
        """
        self._raise()
        if not self._writing.acquire(timeout=DISK_DEADLINE):
            raise DiskError(f"{self.folder}: nothing could be written for {DISK_DEADLINE:g} s")
        self._raise()
        files = {k: self.states.path(k, versions[k]) for k in folded}
        first = round if needed is None else needed
        written = Written(self.path(round), round, versions, files, first)
        self._to_write.put((written, Checkpoint(round, torch.tensor(versions), server, ledger)))

    def close(self, deadline: float = 30.0) -> None:
        """Wait until everything committed is durable, at most `deadline` seconds each.

        Raises:
            DiskError: if the disk cannot be read or written.
        """
        self._to_write.put(None)
        for thread in self._threads:
            thread.join(deadline)
            if thread.is_alive():
                raise DiskError(f"{self.folder}: {thread.name} has not finished after {deadline:g} s")
        self._raise()
        with disk_errors(self.folder):
            self._drop()  # the writer has ended, and the last checkpoint is durable

    def adopt(self, checkpoints: Iterable[Checkpoint[Any]]) -> None:
        """Those that an earlier start of the run has left, in ascending order. Call before any commit."""
        for checkpoint in checkpoints:
            r, versions = checkpoint.round, tuple(checkpoint.versions.tolist())
            paths = ((k, self.states.path(k, version)) for k, version in enumerate(versions) if version)
            files = {k: path for k, path in paths if path.exists()}  # an older one's may be gone
            first = self._kept[0].round if self._kept else r  # which lines are missing is not known here
            adopted = Written(self.path(r), r, versions, files, first)
            self._kept.append(adopted)
            self._syncer.adopt(adopted)

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
                write_atomically(written.path, state_chunks(checkpoint))
                self._kept.append(written)
                self._syncer.add(written)
                self._drop()
            except BaseException as e:  # raised in the main thread by the next commit, or by close
                self._error = e
            self._writing.release()
        self._syncer.close()

    def _drop(self) -> None:
        """What neither the last three nor the newest durable one needs: a power cut may leave nothing newer.
        Before one is durable, nothing."""
        durable = self._syncer.durable
        dropped: list[Written] = []
        while durable and len(self._kept) > KEEP and self._kept[0].round < durable.needed:
            dropped.append(self._kept.popleft())
        for old in dropped:
            old.path.unlink(missing_ok=True)
        if dropped:  # versions only grow
            oldest = self._kept[0].versions
            for k, version in enumerate(dropped[0].versions):
                if version != oldest[k]:
                    self.states.remove(k, below=oldest[k])


def model_digest(mean: Tensor, precision: Tensor | None) -> str:
    """sha256 of the little-endian float32 mean in layout order, then of the precision if any."""
    hashed = sha256(raw_bytes(mean.float().cpu()))
    if precision is not None:
        hashed.update(raw_bytes(precision.float().cpu()))
    return hashed.hexdigest()


def clients_digest(problem: Problem, states: ClientStates, versions: tuple[int, ...]) -> str:
    """sha256 over the digests of all clients' encoded states, in ascending id.

    Clients that were never sampled are still at their initial state, which most algorithms make equal for
    all clients: bytes that equal those of the client before are not hashed again.
    """
    ctx = problem.context(0, 0)
    hashed, last, digest = sha256(), b"", sha256(b"").digest()
    for k, version in enumerate(versions):
        if version:
            hashed.update(states.digest(k, version))
            continue
        initial = encode_state(problem.algorithm.client_init(ctx, k))
        if initial != last:
            last, digest = initial, sha256(initial).digest()
        hashed.update(digest)
    return hashed.hexdigest()
