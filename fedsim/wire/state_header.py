"""Read the header of an encoded state (fedsim.wire.state_file) without importing torch."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import xxhash

from fedsim.errors import WireError

MAGIC = b"FEDSTATE"
MAX_HEADER = 1 << 19
"""Largest size of a header in bytes. A foreign header may take 70 times its size in memory when decoded."""


def state_header(data: bytes, owner: str) -> dict[str, Any]:
    """Return the fields of a state whose class is not known.

    Tensors and nested states are returned as the lists and mappings that describe them.
    """
    header, _ = opened_state(data, owner)
    if not isinstance(header, dict):
        raise WireError(f"{owner}: its header is no mapping")
    return header


def opened_state(data: bytes | memoryview, owner: str) -> tuple[Any, memoryview]:
    """Check a state; return its decoded header and the bytes of its tensors."""
    if data[:8] != MAGIC or len(data) < 20:
        raise WireError(f"{owner}: not a fedsim state")
    body = memoryview(data)[16:]
    if struct.unpack(">Q", data[8:16])[0] != xxhash.xxh3_64_intdigest(body):
        raise WireError(f"{owner}: the checksum does not match; the state is damaged")
    (length,) = struct.unpack(">I", body[:4])
    if length > MAX_HEADER:
        raise WireError(f"{owner}: a header of {length} bytes; the limit is {MAX_HEADER}")
    try:
        header = msgspec.msgpack.decode(body[4 : 4 + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise WireError(f"{owner}: unreadable header: {e}") from None
    return header, body[4 + length :]
