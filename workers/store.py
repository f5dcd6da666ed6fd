"""Files a run resumes from: versioned client states and checkpoints.

A client's state lives in state/<client>/<version>.state; workers are caches of it. A worker writes
version s+1 before it replies; the round's checkpoint names the version of every client and is the
single commit point. Files are written under another name and renamed, which survives kill -9; a
background thread makes them durable (fsync) off the critical path.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.errors import DiskError
from fedsim.problem import Problem
from fedsim.wire.codecs import raw_bytes
from fedsim.wire.state import decode_state, encode_state

S = TypeVar("S")
KEEP = 3
CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """One committed round: versions (K,) int64 of all clients' states; server is its encoded state."""

    round: int
    versions: Tensor
    server: Tensor


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name and rename. Errors: DiskError with path and size."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise DiskError(f"cannot write {path} ({len(data)} bytes): {e.strerror}") from None


class ClientStates:
    """Client states by (client, version), with a bounded cache of decoded ones."""

    def __init__(self, folder: Path, kind: type) -> None:
        self.folder, self.kind = folder, kind
        self._cache: OrderedDict[tuple[int, int], tuple[Any, int]] = OrderedDict()
        self._cached_bytes = 0

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:06d}" / f"{version:06d}.state"

    def load(self, client: int, version: int) -> Any:
        """Errors: WireError if the file is damaged, DiskError if it is not there."""
        hit = self._cache.get((client, version))
        if hit is not None:
            return hit[0]
        path = self.path(client, version)
        try:
            data = path.read_bytes()
        except OSError as e:
            raise DiskError(f"the state of client {client}, {path}: {e.strerror}") from None
        return decode_state(self.kind, data, f"the state of client {client}, {path}")

    def save(self, client: int, version: int, state: Any) -> None:
        data = encode_state(state)
        path = self.path(client, version)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
        self._cache[client, version] = (state, len(data))
        self._cached_bytes += len(data)
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1][1]

    def forget(self, client: int, below: int) -> None:
        """Drop cached versions older than `below`: no task will start from them again."""
        for key in [k for k in self._cache if k[0] == client and k[1] < below]:
            self._cached_bytes -= self._cache.pop(key)[1]

    def digest(self, client: int, version: int, initial: bytes) -> bytes:
        """sha256 of the encoded state; `initial` is the encoded version 0."""
        return sha256(self.path(client, version).read_bytes() if version else initial).digest()


class Checkpoints:
    """The coordinator's side: commits, what they keep alive, and the fsyncs behind them."""

    def __init__(self, folder: Path, states: ClientStates) -> None:
        self.folder, self.states = folder, states
        self._kept: deque[tuple[Path, tuple[int, ...]]] = deque()
        self._alive: dict[int, int] = {}
        self._queue: queue.SimpleQueue[tuple[Path, list[Path]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._sync, name="fsync", daemon=True)
        self._thread.start()

    def commit(self, round: int, server: Any, versions: tuple[int, ...], folded: tuple[int, ...]) -> None:
        """Write the checkpoint of a round, keep the last three, and drop states none of them names."""
        encoded = torch.frombuffer(bytearray(encode_state(server)), dtype=torch.uint8)
        path = self.folder / f"{round:06d}.checkpoint"
        write_atomically(path, encode_state(Checkpoint(round, torch.tensor(versions), encoded)))
        self._kept.append((path, versions))
        self._queue.put((path, [self.states.path(k, versions[k]) for k in folded]))
        if len(self._kept) > KEEP:
            old_path, old = self._kept.popleft()
            old_path.unlink(missing_ok=True)
            oldest = self._kept[0][1]
            for k, version in enumerate(old):
                if version and version != oldest[k]:
                    self.states.path(k, version).unlink(missing_ok=True)

    def close(self, deadline: float = 30.0) -> None:
        """Wait until everything committed is durable, at most `deadline` seconds."""
        self._queue.put(None)
        self._thread.join(deadline)

    def _sync(self) -> None:
        stop = False
        while not stop:
            work = [self._queue.get()]
            while not self._queue.empty():
                work.append(self._queue.get())
            stop = work[-1] is None
            done = [item for item in work if item is not None]
            # a later checkpoint supersedes the earlier ones; their files may be gone already
            for path in dict.fromkeys(p for item in done for p in item[1]):
                _fsync(path)
            if done:
                _fsync(done[-1][0])
                _fsync(self.folder)


def _fsync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def model_digest(mean: Tensor, precision: Tensor | None) -> str:
    """sha256 of the little-endian float32 mean in layout order, then of the precision if any."""
    hashed = sha256(raw_bytes(mean.float().cpu()))
    if precision is not None:
        hashed.update(raw_bytes(precision.float().cpu()))
    return hashed.hexdigest()


def clients_digest(problem: Problem, states: ClientStates, versions: tuple[int, ...]) -> str:
    """sha256 over the digests of all clients' encoded states, in ascending id."""
    ctx = problem.context(0, 0)
    hashed = sha256()
    for k, version in enumerate(versions):
        initial = b"" if version else encode_state(problem.algorithm.client_init(ctx, k))
        hashed.update(states.digest(k, version, initial))
    return hashed.hexdigest()
