"""Selection of the codec of each field of an algorithm's messages."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedsim.algorithm import Exchange
from fedsim.errors import UsageError, unknown
from fedsim.wire.codecs import Codec, codec
from fedsim.wire.message_context import SCALES
from fedsim.wire.schema import RUNNING, TRIANGLE, FieldKind, all_fields, schema


def select_codecs(
    options: Mapping[str, str], exchanges: tuple[Exchange, ...], stored_as_bytes: bool
) -> Mapping[str, Mapping[str, str]]:
    """Return the codecs by direction ('down', 'up') and field.

    Args:
        options: Codecs by field or by direction.field, as `--codec` names them.
        exchanges: All exchanges of the run.
        stored_as_bytes: True if the data set's inputs are whole numbers of one byte.

    Raises:
        UsageError: If a field or codec is unknown, or if a codec cannot encode a field.
    """
    sides: dict[str, dict[str, str]] = {"down": {}, "up": {}}
    fields = {side: [f for e in exchanges for f in all_fields(getattr(e, side))] for side in sides}
    known = {side: {f.name for f in fields[side]} for side in sides}
    for name, option in options.items():
        selected = codec(option)
        direction, _, field = name.rpartition(".")
        if direction not in ("", "down", "up"):
            raise UsageError(f"--codec {name}: the direction is 'down' or 'up', not {direction!r}")
        hit = [s for s in sides if direction in ("", s) and field in known[s]]
        if not hit:
            raise _not_sent(name, direction, field, known)
        for side in hit:
            for kind in dict.fromkeys(f.kind for f in fields[side] if f.name == field):
                if why := unfit(selected, side, field, kind, exchanges, stored_as_bytes):
                    raise UsageError(f"--codec {name}={option}: {why}")
            sides[side][field] = selected.name
    return sides


def _not_sent(name: str, direction: str, field: str, known: Mapping[str, set[str]]) -> UsageError:
    """Return the error for a field that is not sent in this direction; `known`: the fields by direction."""
    other = {"down": "up", "up": "down"}.get(direction, "")
    if not other or field not in known[other]:
        return unknown("message field", field, known["down"] | known["up"])
    what = {"down": "broadcast", "up": "upload"}
    sent = ", ".join(sorted(known[direction])) or "no field"
    return UsageError(
        f"--codec {name}: no {what[direction]} of this run has the field {field!r}, which its {what[other]}s "
        f"have ({other}.{field}); its {what[direction]}s have: {sent}"
    )


def unfit(
    candidate: Codec,
    side: str,
    field: str,
    kind: FieldKind,
    exchanges: tuple[Exchange, ...],
    stored_as_bytes: bool,
) -> str:
    """Return the reason why a codec cannot encode this field; '' if it can."""
    for_floats = candidate.lossy or candidate.delta
    if for_floats and not kind.dtype.startswith("f"):
        return f"{field!r} holds no floats"
    if for_floats and kind.stored and stored_as_bytes:
        return f"{field!r} is sent as it is stored, in whole numbers of one byte; this codec is for floats"
    if candidate.lossy and kind.dims == (RUNNING,):
        return "running variances must stay positive; send them dense or by a lossless codec"
    if candidate.lossy and kind.dims == (TRIANGLE,) and (kind.positive or candidate.kinds is not None):
        return (
            "a full precision whose entries are rounded or left out one by one is in general not "
            "positive definite any more; send it dense or by a lossless codec"
        )
    if candidate.kinds is not None and kind.name not in candidate.kinds:
        return f"{candidate.why}, and {field!r} is a {kind.name}"
    if candidate.delta and side == "down":
        return (
            "a broadcast has nothing to refer to, because a client may have missed the last one; "
            f"use it upwards (up.{field})"
        )
    if candidate.last and side == "up":
        return f"an upload refers to its broadcast, not to the last one; write {candidate.alone}"
    if candidate.last and len(exchanges) > 1:
        return (
            "+last and +own refer to the broadcast of an earlier round, and a round of this algorithm has "
            f"several; write {candidate.alone}"
        )
    if candidate.scaled and not all(_has_scale(e, side, field) for e in exchanges):
        return (
            f"neither the broadcast nor the message with {field!r} has a precision or curvature of all "
            "parameters to measure it by; use bf16, which needs none"
        )
    if candidate.delta and not all(_refers(e, field, kind) for e in exchanges):
        return (
            f"the broadcast has no field {field!r} of the same shape to refer to; use zstd, which needs none"
        )
    return ""


def _has_scale(exchange: Exchange, side: str, field: str) -> bool:
    """Return whether a message with `field`, or the broadcast it answers, has a scale for all parameters."""
    messages = (exchange.down, exchange.up) if side == "up" else (exchange.down,)
    if field not in {f.name for f in all_fields(messages[-1])}:
        return True
    return any(f.name in SCALES and f.kind.dims == ("P",) for m in messages for f in schema(m))


def _refers(exchange: Exchange, field: str, kind: FieldKind) -> bool:
    """Return whether the broadcast has `field` with the same shape, or the exchange does not upload it."""
    if field not in {f.name for f in all_fields(exchange.up)}:
        return True
    down = {f.name: f for f in schema(exchange.down) if f.python is Tensor and not f.kind.elastic}
    return field in down and (down[field].kind.dims, down[field].kind.dtype) == (kind.dims, kind.dtype)
