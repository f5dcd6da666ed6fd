"""Selection of the codec of each field of an algorithm's messages."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from fedsim.algorithm import Exchange
from fedsim.compressed_sums import coded
from fedsim.errors import UsageError, unknown
from fedsim.wire.codecs import Codec, codec
from fedsim.wire.codecs.base import ONE_SIGN
from fedsim.wire.message_context import SCALES
from fedsim.wire.schema import RUNNING, TRIANGLE, Field, FieldKind, all_fields, schema

SENDERS = {"down": "broadcast", "up": "upload", "edge": "sum"}
"""The messages whose fields have codecs, by the prefix in --codec."""


def select_codecs(
    options: Mapping[str, str], exchanges: tuple[Exchange, ...], stored_as_bytes: bool, sums: bool = False
) -> Mapping[str, Mapping[str, str]]:
    """Return the codecs by direction ('down', 'up', or 'edge' for the sums of edge servers) and field.

    Args:
        options: Codecs by field or by direction.field, as `--codec` names them. Without a direction, a codec
            is for broadcasts and uploads.
        exchanges: All exchanges of the run.
        stored_as_bytes: True if the data set's inputs are whole numbers of one byte.
        sums: True if edge servers send sums.

    Raises:
        UsageError: If a field or codec is unknown, or if a codec cannot encode a field.
    """
    sides: dict[str, dict[str, str]] = {side: {} for side in SENDERS}
    fields = {side: [f for e in exchanges for f in all_fields(getattr(e, side))] for side in ("down", "up")}
    fields["edge"] = [f for e in exchanges if sums for f in edge_fields(e)]
    known = {side: {f.name for f in fields[side]} for side in sides}
    for name, option in options.items():
        selected = codec(option)
        direction, _, field = name.rpartition(".")
        if direction not in ("", *SENDERS):
            raise UsageError(f"--codec {name}: the direction is 'down', 'up' or 'edge', not {direction!r}")
        if direction == "edge" and not sums:
            raise UsageError(
                f"--codec {name}: edge servers send sums only with --tree and at least two of them"
            )
        if direction == "edge" and not known["edge"]:
            raise UsageError(
                f"--codec {name}: a sum has codecs only if it is of natural parameters, with P numbers each, "
                "and the broadcast has mean and precision"
            )
        searched = [direction] if direction else ["down", "up"]
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


def edge_fields(exchange: Exchange) -> list[Field]:
    """Return the fields of an edge server's sums that can have codecs."""
    down = {f.name for f in schema(exchange.down) if f.kind.dims == ("P",)}
    message = coded(exchange.sums) if exchange.sums and {"mean", "precision"} <= down else None
    return [f for f in schema(message) if f.kind.name in ("mean", "precision")] if message else []


def _not_sent(name: str, direction: str, field: str, known: Mapping[str, set[str]]) -> UsageError:
    """Return the error for a field that is not sent in this direction; `known`: the fields by direction."""
    others = [side for side in SENDERS if direction and field in known[side]]
    if not others:
        fields = known["edge"] if direction == "edge" else known["down"] | known["up"]
        return unknown("message field", field, fields)
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
    if side == "edge" and candidate.lossy and not candidate.contracts:
        return (
            "its error may be as large as the value, so that it need not shrink when the edge server adds it "
            "to its next sum; take sigma:c, sigma:auto, ratio:e, bf16 or log8"
        )
    if (candidate.delta or candidate.last) and side == "edge":
        return f"a sum refers to its broadcast; write {candidate.alone or 'zstd'}"
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
    if side == "edge":
        return True  # the broadcast has a precision, see edge_fields
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
