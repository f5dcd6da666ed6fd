"""Measure the cost of messages, and the limits of this cost: bits on the wire, entropy, KL divergence.

    bits       bits of a field's frames per value
    entropy    zeroth-order entropy of the integers of an entropy-coded field, in bits per value
    step       step c of a mean (codec sigma), in units of the posterior's standard deviation
    rounding   root mean square of a mean's rounding error, divided by the root mean square of its change
    kl         KL(q_k || q_g) per parameter, in bits; q_k is an upload with mean and diagonal precision, and
               q_g the broadcast that it answers. A sample of q_k costs about kl if the receiver knows q_g

A run measures one upload per round, so the cost of measuring does not grow with the number of clients. The
clients take turns: of M participants, the one with index (round mod M) is measured, or the next participant
whose upload is aggregated. Sources: docs/compression.md#lower-limits-of-the-size; for the KL divergence,
Havasi et al. 2019, https://arxiv.org/abs/1810.00440.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedsim.learning.gaussian import kl_divergence
from fedsim.learning.params import Layout
from fedsim.round_events import Open
from fedsim.wire.codecs import codec
from fedsim.wire.envelope import Payload, field_spec, frames_by_field
from fedsim.wire.schema import all_fields

BLOCK = 65_536
"""Number of entries whose terms are summed at once. Sums depend on it, so it is no setting of the cache."""


def measured(opened: Open) -> int:
    """Return the participant of this exchange whose messages are measured."""
    return opened.participants[opened.round % len(opened.participants)]


def of_message(kind: type, payload: Payload, layout: Layout) -> dict[str, Any]:
    """Return the cost of each entropy-coded field of an encoded message of class `kind`, by field name."""
    known, out = {f.name: f for f in all_fields(kind)}, {}
    frames_of = frames_by_field(payload.fields, payload.frames)
    for header, frames in zip(payload.fields, frames_of, strict=True):
        selected, count = codec(header.codec), math.prod(header.shape)
        if selected.entropy is None or not count:
            continue
        spec = field_spec(known[header.name], header.shape, header.dtype, layout)
        data = memoryview(frames[0])
        out[header.name] = {
            "bits": 8 * sum(part.nbytes for part in header.parts) / count,
            "entropy": selected.entropy(data, spec) / count,
            **({} if selected.step is None else {"step": selected.step(data)}),
        }
    return out


def with_rounding(measured: dict[str, Any], up: Any, down: Any, scale: Tensor | None) -> dict[str, Any]:
    """Add `rounding` to the `measured` cost of an upload. scale: the broadcast's precision S, (P,)."""
    mean, before = _vector(up, "mean"), _vector(down, "mean")
    if "step" not in measured.get("mean", {}) or mean is None or before is None or scale is None:
        return measured
    change = math.sqrt(_squares(mean, before, scale) / len(mean))
    share = measured["mean"]["step"] / math.sqrt(12) / change if change else None
    return {**measured, "mean": {**measured["mean"], "rounding": share}}


def divergence(up: Any, down: Any) -> float | None:
    """Return KL(q_k || q_g) per parameter in bits; None unless both have a mean and a diagonal precision."""
    each = (_vector(message, name) for message in (up, down) for name in ("mean", "precision"))
    vectors = [v for v in each if v is not None]
    if len(vectors) < 4 or len({len(v) for v in vectors}) > 1:
        return None
    blocks = zip(*(torch.split(v, BLOCK) for v in vectors), strict=True)
    return sum(kl_divergence(*block) for block in blocks) / math.log(2) / len(vectors[0])


def _vector(message: Any, name: str) -> Tensor | None:
    value = getattr(message, name, None)
    return value if isinstance(value, Tensor) and value.dim() == 1 and len(value) else None


def _squares(mean: Tensor, before: Tensor, scale: Tensor) -> float:
    """Return sum S (m - m_g)^2 in float64, computed block by block."""
    blocks = zip(*(torch.split(v, BLOCK) for v in (mean, before, scale)), strict=True)
    return sum(float((s.double() * (m.double() - b.double()) ** 2).sum()) for m, b, s in blocks)
