"""The mark at the end of a state's file, which names its owner and version.

The checksum of a state proves that its bytes are complete, but not their client or version. A backup may swap
files, and a large file overwrites an old version, so that a power cut may leave the new name with old bytes.
The mark names the run, the client and the version, and repeats the checksum, so that neither an old file nor
old bytes with a new mark are accepted. A small state has version 0, because files of several versions with
the same bytes are one file; a checkpoint has the checksums of the versions that it names.

file = encoded state (fedsim.wire.state_file) | b"FEDOWNER" | xxh3_64 of the run's name (u64) | client (u64) |
version (u64) | the state's checksum (u64)

Earlier versions wrote b"FEDVERSN" | version (u64) | checksum after large states, and nothing after small
ones.
"""

from __future__ import annotations

import struct

import xxhash

from fedsim.errors import WireError

MAGIC, EARLIER = b"FEDOWNER", b"FEDVERSN"
_MARK = struct.Struct(">8sQQQQ")
_EARLIER = struct.Struct(">8sQQ")
_CHECKSUM = slice(8, 16)
"""The position of the checksum in an encoded state."""
ANY = 0
"""The version of a small state's mark."""


def checksum(start: bytes | memoryview) -> int:
    """Return the checksum of an encoded state, given the state or its first 16 bytes."""
    return int.from_bytes(start[_CHECKSUM], "big")


def mark(run: str, client: int, version: int, start: bytes | memoryview) -> bytes:
    """Return the mark of a client's state.

    run: the run's name, '' if it has none. version: of the state, or ANY. start: the encoded state, or its
    first 16 bytes.
    """
    return _MARK.pack(MAGIC, _tag(run), client, version, checksum(start))


def unmarked(data: memoryview, run: str, client: int, version: int, owner: str) -> memoryview:
    """Return the encoded state in the content of a file.

    run, client, version: what is expected; run '': any. owner: the state and its file, for errors.

    Raises:
        WireError: If the file has the mark of another state; it begins with `owner`.
    """
    if data.nbytes >= _MARK.size and data[-_MARK.size :][:8] == MAGIC:
        _, tag, owned_by, which, written = _MARK.unpack(data[-_MARK.size :])
        state = data[: -_MARK.size]
        if run and tag not in (_tag(run), _tag("")):
            raise WireError(f"{owner}: it holds a state of client {owned_by} of another run")
        if owned_by != client:
            raise WireError(f"{owner}: it holds a state of client {owned_by}")
    elif data.nbytes >= _EARLIER.size and data[-_EARLIER.size :][:8] == EARLIER:
        _, which, written = _EARLIER.unpack(data[-_EARLIER.size :])
        state = data[: -_EARLIER.size]
    else:
        return data
    if which not in (version, ANY):
        raise WireError(f"{owner}: it holds version {which}, not version {version}")
    if written != checksum(state):
        raise WireError(
            f"{owner}: it does not hold all of version {version}; the machine stopped while it was written"
        )
    return state


def _tag(run: str) -> int:
    return xxhash.xxh3_64_intdigest(run.encode())
