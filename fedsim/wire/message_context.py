"""The context that both ends of a message share: reference tensors, and a random stream.

An upload refers to the broadcast that it answers, as the client decoded it. A broadcast refers to the last
broadcast if the client is known to have it (workers.coordinator.broadcasts). The codec sigma scales the mean
of an upload by the broadcast's precision. For a broadcast, or if that precision is missing or not positive,
it scales the mean by the precision of the same message.

It measures an increment of natural parameters by the same precision S: a shift in units of sqrt(S), because
a change by sqrt(S) moves the mean by one standard deviation, and a precision in units of S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsim.seeds import RandomStream
from fedsim.wire.schema import FieldKind, schema

SCALES = ("precision", "curvature")
"""The fields whose values can be the scale of a scaled codec."""
FLOOR = 1e-3
"""The lower limit of a curvature that is used as a scale, as a fraction of its mean."""


@dataclass(frozen=True)
class MessageContext:
    """The references, the scale and the random stream of a message's codecs.

    fields, last: reference tensors by field name, of the answered broadcast (for an upload) and of the last
    broadcast (for a broadcast). scale: a positive precision, (P,). stream: the stream of random codecs. own:
    that of codecs with +own, one for each client, so that the errors of their broadcasts are independent."""

    fields: Mapping[str, Tensor] = field(default_factory=dict)
    last: Mapping[str, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    stream: RandomStream | None = None
    own: RandomStream | None = None


NOTHING = MessageContext()


def of_upload(down: object, stream: RandomStream | None = None, scaled: bool = True) -> MessageContext:
    """Return the context of an upload, from the decoded broadcast that it answers and the task's stream.

    scaled: True if a codec may need the scale; checking the scale takes time and memory.
    """
    fields = _tensors(down)
    scales = (scale_of(name, fields[name]) for name in SCALES if scaled and name in fields)
    return MessageContext(fields, scale=next((s for s in scales if s is not None), None), stream=stream)


def of_broadcast(last: object | None, stream: RandomStream | None = None, client: int = -1) -> MessageContext:
    """Return the context of a broadcast.

    last: the last broadcast as decoded; None if there is none. client: the only receiver; -1 for all clients.
    """
    own = stream
    if stream is not None and client >= 0:  # not the stream of the client's upload
        own = replace(stream, purpose=f"{stream.purpose} down", client=client)
    return MessageContext(last={} if last is None else _tensors(last), stream=stream, own=own)


def scale_for(kind: FieldKind, context: MessageContext) -> Tensor | None:
    """Return the scale of a field, (P,): a scaled codec's unit is 1 / sqrt(scale)."""
    S = context.scale
    if S is None or not kind.natural:
        return S
    return 1 / S.double() if kind.natural == "shift" else 1 / S.double() ** 2


def codec_stream(seed: int, round: int, exchange: int, client: int = -1) -> RandomStream:
    """Return the random stream of a message's codecs. client: -1 for a broadcast."""
    return RandomStream(seed, "codec", round, client).part(exchange - 1)


def scale_of(name: str, values: Tensor) -> Tensor | None:
    """Convert the values of a field of SCALES to a scale, (P,); return None if they cannot be a scale."""
    if values.dim() != 1 or not values.numel():
        return None
    least, most = (float(end) for end in torch.aminmax(values))  # NaN if any value is NaN
    if not (math.isfinite(least) and math.isfinite(most)):
        return None
    if name == "curvature":
        values = values.clamp(min=FLOOR * float(values.double().mean()))
        least = float(values.amin())
    return values if least > 0 else None


def _tensors(message: object) -> dict[str, Tensor]:
    return {f.name: getattr(message, f.name) for f in schema(type(message)) if f.python is Tensor}
