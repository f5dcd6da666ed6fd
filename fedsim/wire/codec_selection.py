"""Selection of the codec of each field of an algorithm's messages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from torch import Tensor

from fedsim.algorithm import Exchange
from fedsim.errors import UsageError, unknown
from fedsim.removed import removed
from fedsim.wire.codecs import Codec, codec
from fedsim.wire.codecs.base import ONE_SIGN
from fedsim.wire.message_context import SCALES
from fedsim.wire.schema import RUNNING, TRIANGLE, FieldKind, all_fields, schema

SENDERS = {"down": "broadcast", "up": "upload"}
"""The messages whose fields have codecs, by the prefix in --codec."""


def select_codecs(
    options: Mapping[str, str], exchanges: tuple[Exchange, ...], stored_as_bytes: bool
) -> Mapping[str, Mapping[str, str]]:
    """Return the codecs by direction ('down' or 'up') and field.

    Args:
        options: Codecs by field or by direction.field, as `--codec` names them. Without a direction, a codec
            is for broadcasts and uploads.
        exchanges: All exchanges of the run.
        stored_as_bytes: True if the data set's inputs are whole numbers of one byte.

    Raises:
        UsageError: If a field or codec is unknown, or if a codec cannot encode a field.
    """
    sides: dict[str, dict[str, str]] = {side: {} for side in SENDERS}
    fields = {side: [f for e in exchanges for f in all_fields(getattr(e, side))] for side in SENDERS}
    known = {side: {f.name for f in fields[side]} for side in sides}
    for name, option in options.items():
        selected = codec(option)
        direction, _, field = name.rpartition(".")
        if direction not in ("", *SENDERS):
            wrong = f"--codec {name}: the direction is 'down' or 'up', not {direction!r}"
            raise UsageError(removed("option", f"--codec {direction}.FIELD") or wrong)
        searched = [direction] if direction else [*SENDERS]
        hit = [side for side in searched if field in known[side]]
        if not hit:
            raise _not_sent(name, direction, field, known)
        for side in hit:
            selected = codec(selected.upwards) if side == "up" and selected.upwards else codec(option)
            for kind in dict.fromkeys(f.kind for f in fields[side] if f.name == field):
                if why := unfit(selected, side, field, kind, exchanges, stored_as_bytes):
                    raise UsageError(f"--codec {name}={option}: {why}")
            sides[side][field] = selected.name
    return sides


def bias_remarks(
    uploads: Mapping[str, str], exchanges: tuple[Exchange, ...], duals: bool, clients: int
) -> tuple[str, ...]:
    """Return a line for each codec of uploads that changes the posterior's precision beyond its own error.

    uploads: the codecs by field. duals: True if clients have duals, so that a change below half a step is
    lost in every round. Source: docs/compression.md#what-a-codec-does-to-the-posterior.
    """
    remarks = []
    for field, name in uploads.items():
        kinds = {f.kind.name for e in exchanges for f in all_fields(e.up) if f.name == field}
        bias = codec(name).bias
        if not duals or not bias or not kinds & ONE_SIGN:
            continue
        least = 1 / (1 + clients * math.expm1(bias)) if bias < math.inf else 0.0
        change = f"may fall to {least:.2g} of the exact one" if least else "may be far from the exact one"
        remarks.append(
            f"up.{field}={name} errs alike for all clients: the posterior's precision {change}, which "
            "accuracy does not show; ratio:e rounds at random and is unbiased"
        )
    return tuple(remarks)


def noise_remarks(uploads: Mapping[str, str], damping: float) -> tuple[str, ...]:
    """Return a line for each codec of uploads whose random rounding a dual step with this damping amplifies.

    damping: rho of the dual step; 1 if steps are not damped, for which the rule does not hold. The rule is
    rho (1 + omega) < 2, with 1 + omega = 2 / (pi p). Source: docs/compression.md.
    """
    remarks = []
    for field, name in uploads.items():
        share = re.fullmatch(r"sigma:([0-9.]+)%\+random.*", name)
        if share is None or damping == 1 or 2 / math.pi / (float(share[1]) / 100) * damping < 2:
            continue
        remarks.append(
            f"up.{field}={name}: with a damping of {damping:.3g} the dual steps may not converge; "
            f"sigma:{100 * damping / math.pi:.1f}%+random or more would (docs/compression.md)"
        )
    return tuple(remarks)


def _not_sent(name: str, direction: str, field: str, known: Mapping[str, set[str]]) -> UsageError:
    """Return the error for a field that is not sent in this direction; `known`: the fields by direction."""
    others = [side for side in SENDERS if direction and field in known[side]]
    if not others:
        return unknown("message field", field, known["down"] | known["up"])
    sent, what, other = ", ".join(sorted(known[direction])) or "no field", SENDERS[direction], others[0]
    return UsageError(
        f"--codec {name}: no {what} of this run has the field {field!r}, which its {SENDERS[other]}s have "
        f"({other}.{field}); its {what}s have: {sent}"
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
    measured = candidate.scaled and kind.natural  # by the broadcast's precision
    if candidate.kinds is not None and kind.name not in candidate.kinds and not measured:
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
    sent = getattr(exchange, side)
    messages = (exchange.down, exchange.up) if side == "up" else (exchange.down,)
    if field not in {f.name for f in all_fields(sent)}:
        return True
    return any(f.name in SCALES and f.kind.dims == ("P",) for m in messages for f in schema(m))


def _refers(exchange: Exchange, field: str, kind: FieldKind) -> bool:
    """Return whether the broadcast has `field` with the same shape, or the exchange does not upload it."""
    if field not in {f.name for f in all_fields(exchange.up)}:
        return True
    down = {f.name: f for f in schema(exchange.down) if f.python is Tensor and not f.kind.elastic}
    return field in down and (down[field].kind.dims, down[field].kind.dtype) == (kind.dims, kind.dtype)
