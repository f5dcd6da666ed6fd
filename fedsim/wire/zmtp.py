"""Bytes that ZMTP 3.1 adds to frames on the stream, in closed form (NULL mechanism).

The formulas and how they were checked to the byte against a counting relay: docs/wire.md and
reference/wire.md section 2. They hold for ipc and tcp alike.
"""

from __future__ import annotations

from collections.abc import Iterable

HANDSHAKE = 107
"""Greeting (64) and READY command of a NULL connection without routing id, bytes per direction."""


def framing(frame_bytes: Iterable[int]) -> int:
    """Overhead of one message: a flag byte and a length of 1 or 8 bytes per frame."""
    return sum(2 if n <= 255 else 9 for n in frame_bytes)
