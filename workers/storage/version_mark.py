"""The mark behind a large state's file: which version it is, so that an older one's bytes do not pass for it.

A large file is written over a version that is needed no more. After a power cut the new name may be there
with the old bytes, whose checksum is right. The mark names the version and repeats the checksum, so that
neither the old file nor old bytes before a new mark pass.

file = encoded state (fedsim.wire.state_file) | b"FEDVERSN" | version (u64) | the state's checksum
"""

from __future__ import annotations

import struct

from fedsim.errors import WireError

MAGIC = b"FEDVERSN"
_MARK = struct.Struct(">8sQ8s")
_CHECKSUM = slice(8, 16)
"""Of an encoded state: where its checksum is."""


def mark(version: int, start: bytes | memoryview) -> bytes:
    """The mark of a version; start: the encoded state, or its first 16 bytes."""
    return _MARK.pack(MAGIC, version, bytes(start[_CHECKSUM]))


def unmarked(data: memoryview, version: int, owner: str) -> memoryview:
    """The encoded state of a file; one without a mark is small, or of an earlier fedsim.

    Raises:
        WireError: beginning with `owner`, if the mark is of another version or another state.
    """
    if data.nbytes < _MARK.size or data[-_MARK.size :][:8] != MAGIC:
        return data
    _, written, checksum = _MARK.unpack(data[-_MARK.size :])
    if written != version or checksum != data[_CHECKSUM]:
        raise WireError(
            f"{owner}: it holds version {written}, not all of version {version}; the machine stopped while "
            "it was written"
        )
    return data[: -_MARK.size]
