"""Bytes that ZMTP 3.1 adds to frames on the stream, in closed form.

The formulas and how they were checked to the byte against a counting relay: docs/wire.md and
docs/references/bytes.md. They hold for ipc and tcp alike; connections have no routing id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Mechanism:
    """NULL or CURVE. per_frame: bytes that encryption adds to a frame's content; handshake: of a new
    connection by direction (greeting and commands; up is what the worker sends)."""

    name: str
    per_frame: int
    handshake: Mapping[str, int]

    def framing(self, frame_bytes: Iterable[int]) -> int:
        """Overhead of one message: encryption, and a flag byte and a length of 1 or 8 bytes per frame."""
        extra = self.per_frame
        return sum(extra + (2 if n + extra <= 255 else 9) for n in frame_bytes)


NULL = Mechanism("NULL", 0, MappingProxyType({"up": 107, "down": 107}))
CURVE = Mechanism("CURVE", 33, MappingProxyType({"up": 567, "down": 301}))
"""A worker's HELLO and INITIATE, the coordinator's WELCOME and READY."""

framing = NULL.framing
