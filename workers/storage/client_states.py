"""Versioned client states: state/<client>/<version>.state.

Workers cache these files. A worker writes version s+1 before it replies; the round's checkpoint names the
version that counts (workers.storage.checkpoints). A large state overwrites an older version that is no longer
needed, because new pages of the page cache cost ten times as much as writing to existing ones.

The checksum of a state proves that its bytes are complete, but not their client or version. A backup may swap
files, and a power cut may leave an overwritten file with the new name and the old bytes. So a mark at the end
of the file names the run, the client and the version, and repeats the checksum. The mark of a small state has
version 0, because versions with the same bytes share one file. Checkpoints record the checksums of states.

file = encoded state (fedsim.wire.state_file) | b"FEDOWNER" | xxh3_64 of the run's name (u64) | client (u64) |
version (u64) | the state's checksum (u64)
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from torch import Tensor

from fedsim.errors import DiskError, WireError
from fedsim.foreign_files import opened
from fedsim.learning.models import weights
from fedsim.problem import Problem
from fedsim.wire.state_file import decode_state, encode_state, state_chunks
from workers.storage.atomic_files import SPARE, disk_errors, patiently, remove_or_spare, write_atomically

CACHE_BYTES = max(64 * 2**20, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 64)
"""The largest total encoded size of the states that a process keeps decoded, which depends on the machine's
memory. Other states are read from the page cache."""
LARGEST_CACHED = 32 << 20
"""Larger states are not cached but read again from the page cache, which takes little time compared with a
task on a model of that size."""
SMALL_BYTES = 4096
"""A state file up to this size is a hard link to its predecessor if both are equal. It is not overwritten,
and its mark names no version."""

MAGIC = b"FEDOWNER"
_MARK = struct.Struct(">8sQQQQ")
_CHECKSUM = slice(8, 16)
"""The position of the checksum in an encoded state."""
ANY = 0
"""The version in the mark of a small state."""


class ClientStates:
    """Client states by (client, version), with a bounded cache of decoded ones."""

    def __init__(self, folder: Path, kind: type, run: str = "") -> None:
        """Open a folder. kind: the class of states. run: the run's name in marks; '' accepts any run."""
        self.folder, self.kind, self.run = folder, kind, run
        self._cache: OrderedDict[tuple[int, int], tuple[Any, int]] = OrderedDict()
        self._cached_bytes = 0
        self._folders: set[int] = set()
        self._small: dict[int, tuple[int, bytes]] = {}

    def path(self, client: int, version: int) -> Path:
        return self.folder / f"{client:06d}" / f"{version:06d}.state"

    def load(self, client: int, version: int, expected: int | None = None) -> Any:
        """Return a client's state. expected: the checksum that the state must have, if known."""
        hit = self._cache.get((client, version))
        if hit is not None:
            return hit[0]
        owner, data = self._owner(client, version), self.mapped(client, version)
        state: Any = decode_state(self.kind, data, owner)
        if expected not in (None, checksum(data)):
            raise WireError(f"{owner}: it holds another state than version {version}")
        return state

    def checksum(self, client: int, version: int) -> int:
        """Return the checksum of an encoded state, read from the beginning of its file."""
        with disk_errors(self._owner(client, version)), self._opened(client, version) as file:
            return checksum(file.read(16))

    def read(self, client: int, version: int) -> bytes:
        """Return the bytes of an encoded state."""
        return bytes(self.mapped(client, version))

    def mapped(self, client: int, version: int) -> memoryview:
        """Return an encoded state as read-only memory; decoding copies each tensor once."""
        with disk_errors(self._owner(client, version)), self._opened(client, version) as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return unmarked(data, self.run, client, version, self._owner(client, version))

    def _opened(self, client: int, version: int) -> BinaryIO:
        try:
            return patiently(lambda: opened(self.path(client, version)))
        except FileNotFoundError as e:
            if self.folder.is_dir():
                raise
            raise DiskError(
                f"{self._owner(client, version)}: {e.strerror}; the folder of all states is not there, "
                "as after `fedsim sweep --remove-states`"
            ) from None

    def _owner(self, client: int, version: int) -> str:
        return f"the state of client {client}, {self.path(client, version)}"

    def put(self, client: int, version: int, data: bytes) -> None:
        """Check the bytes of an encoded state, and write the state's file."""
        path = self.path(client, version)
        decode_state(self.kind, data, f"the state of client {client}, version {version}")
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [data, self._mark(client, version, data, len(data))])

    def save(self, client: int, version: int, state: Any) -> None:
        """Write a state's file and keep the state in the cache."""
        path = self.path(client, version)
        if client not in self._folders:
            with disk_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(client)
        chunks = state_chunks(state)
        size = sum(memoryview(chunk).nbytes for chunk in chunks)
        chunks.append(self._mark(client, version, chunks[0], size))
        if size > SMALL_BYTES:
            write_atomically(path, chunks, spare=path.parent / SPARE)
        elif not self._linked(client, version, b"".join(chunks)):
            write_atomically(path, chunks)
        self._cached_bytes -= self._cache.pop((client, version), (None, 0))[1]  # a task may be computed again
        if size > min(CACHE_BYTES, LARGEST_CACHED):
            return
        self._cache[client, version] = (state, size)
        self._cached_bytes += size
        while self._cached_bytes > CACHE_BYTES:
            self._cached_bytes -= self._cache.popitem(last=False)[1][1]

    def _mark(self, client: int, version: int, start: bytes | memoryview, size: int) -> bytes:
        return mark(self.run, client, version if size > SMALL_BYTES else ANY, start)

    def _linked(self, client: int, version: int, data: bytes) -> bool:
        """Make this version a hard link to the last one if the bytes are equal; return whether it is one. The
        file of a stateless client is thus written only once."""
        before, same = self._small.get(client, (version, b""))
        self._small[client] = (version, data)
        if before == version or same != data:
            return False
        try:
            os.link(self.path(client, before), self.path(client, version))
        except OSError:  # a file is removed or exists already, or the file system has no links
            return False
        return True

    def forget(self, client: int, below: int) -> None:
        """Drop cached versions older than `below`: no task will start from them again."""
        for key in [k for k in self._cache if k[0] == client and k[1] < below]:
            self._cached_bytes -= self._cache.pop(key)[1]

    def remove(self, client: int, below: int, spare: bool = False) -> None:
        """Delete the files of all versions older than `below`, including drafts that no round committed.

        spare: True to keep a large file, which the client's next version overwrites.
        """
        folder = self.path(client, 0).parent
        for name in patiently(lambda: os.listdir(folder)):
            if name.endswith(".state") and int(name.removesuffix(".state")) < below:
                if spare:
                    remove_or_spare(folder / name)
                else:
                    (folder / name).unlink(missing_ok=True)

    def digest(self, client: int, version: int) -> bytes:
        """Return the sha256 of an encoded state."""
        return sha256(self.mapped(client, version)).digest()


def checksum(start: bytes | memoryview) -> int:
    """Return the checksum of an encoded state, given the state or its first 16 bytes."""
    return int.from_bytes(start[_CHECKSUM], "big")


def mark(run: str, client: int, version: int, start: bytes | memoryview) -> bytes:
    """Return the mark of a client's state.

    run: the run's name, '' if it has none. version: the state's version, or ANY. start: the encoded state, or
    its first 16 bytes.
    """
    return _MARK.pack(MAGIC, _tag(run), client, version, checksum(start))


def unmarked(data: memoryview, run: str, client: int, version: int, owner: str) -> memoryview:
    """Return the encoded state in the content of a file, without the mark.

    run, client, version: the expected values; '' accepts any run. owner: the state and its file, for errors.

    Raises:
        WireError: if the mark is of another state, or the state is incomplete. Messages begin with `owner`.
    """
    state, end = data[: -_MARK.size], data[-_MARK.size :]
    if end.nbytes < _MARK.size or end[:8] != MAGIC:
        raise WireError(f"{owner}: the mark at its end is not there; it is damaged or cut off")
    _, tag, owned_by, which, written = _MARK.unpack(end)
    if run and tag not in (_tag(run), _tag("")):
        raise WireError(f"{owner}: it holds a state of client {owned_by} of another run")
    if owned_by != client:
        raise WireError(f"{owner}: it holds a state of client {owned_by}")
    if which not in (version, ANY):
        raise WireError(f"{owner}: it holds version {which}, not version {version}")
    if written != checksum(state):
        raise WireError(
            f"{owner}: it does not hold all of version {version}; the machine stopped while it was written"
        )
    return state


def _tag(run: str) -> int:
    return xxhash.xxh3_64_intdigest(run.encode())


def model_digest(mean: Tensor, precision: Tensor | None, statistics: Tensor | None = None) -> str:
    """Return the sha256 of a model: its mean, then precision and running statistics, if any, as little-endian
    float32 in layout order."""
    return weights.digest(part for part in (mean, precision, statistics) if part is not None)


def clients_digest(problem: Problem, states: ClientStates, versions: tuple[int, ...]) -> str:
    """Return the sha256 over the digests of all clients' encoded states, in ascending order of the clients.

    Clients that were never sampled still have their initial state, which most algorithms make equal for all
    clients. If it equals the previous client's initial state, it is not hashed again.
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
