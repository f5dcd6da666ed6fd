"""Few bits for a posterior: means in units of their own standard deviation, precisions by their logarithm.

    sigma:c   u = (m - m_ref) sqrt(S), rounded to multiples of c       m = m_ref + c k / sqrt(S)
    ratio:e   log(S / S_ref), rounded to multiples of e                S = S_ref exp(e k)

Upwards the references are the fields of the broadcast that the upload answers, as the client decoded them; S
is the broadcast's precision. A broadcast has no reference (m_ref = 0, S_ref = 1), or with +last the last
broadcast as decoded; S is the decoded precision of the same message. The integers k are
entropy-coded layer by layer (fedsim.wire.codecs.entropy). fedsim.wire.message_context has the references.

sigma:c+dither adds noise of a stream that both ends know before it rounds, and subtracts it afterwards: the
error is uniform, independent of the mean, and 0 on average (Ziv 1985; Zamir and Feder 1992).

sigma:auto chooses c for every message so that the rounding has a tenth of the size of what the message
changes (root mean squares, in standard deviations), and sends it as a float32 before the layers: late rounds,
whose changes are small, neither stall nor waste bits.

A step of c costs c^2 / 24 nats of KL per parameter, a step of e about e^2 / 48. This does not measure the
error of a dual, which is a difference of decoded values: docs/compression.md has steps without loss.

The error of a mean is at most c / 2 of its standard deviation, the relative error of a precision at most
exp(e / 2) - 1, and no sign changes. A zero of a curvature stays zero: k counts from 1 on, and 0 stands for
it. Levels exp(e k) are rounded correctly, so that two machines decode alike.

Source: entropy-coded scalar quantisation (Gish and Pierce 1968), here in the units of the posterior.
"""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from functools import lru_cache, partial

import numpy as np
from torch import Tensor

from fedsim.errors import WireError
from fedsim.wire.codecs.base import ONE_SIGN, Array, Codec, Part, Spec, flat32, tensor_of
from fedsim.wire.codecs.entropy import LARGEST, decode_layers, encode_layers, layer_bounds, layers_entropy

TABLE = 1 << 16
"""The number of entries by which a table of levels may exceed the number of values."""
SMALLEST = float(np.finfo(np.float32).tiny)
_LOGARITHMS = 104.0
"""No float32 is above exp(88.8) or, normal or not, below exp(-103.3)."""


AUTO = "auto"
SHARE = 0.1
"""The rounding's root mean square in sigma:auto, relative to that of the message's own change."""
STEP = struct.Struct("<f")
LEAST_STEP, MOST_STEP = 1e-9, 16.0
"""The limits of the step in sigma:auto."""


def sigma(c: float | None, dither: bool = False, last: bool = False) -> Codec:
    """c None: auto, chosen for every message."""
    alone = f"sigma:{AUTO if c is None else repr(c)}{'+dither' * dither}"
    return Codec(
        f"{alone}{'+last' * last}",
        partial(_pack_mean, c, dither),
        partial(_unpack_mean, c, dither),
        partial(layer_bounds, beside=0 if c else STEP.size),
        lossy=True,
        kinds=frozenset({"mean"}),
        why="this codec measures a mean by its standard deviation",
        may_refer=True,
        entropy=lambda data, spec: layers_entropy(data[0 if c else STEP.size :], spec),
        step=lambda data: float(c or STEP.unpack(data[: STEP.size])[0]),
        scaled=True,
        noisy=dither,
        last=last,
        alone=alone,
    )


def ratio(e: float, last: bool = False) -> Codec:
    return Codec(
        f"ratio:{e!r}{'+last' * last}",
        partial(_pack_ratio, e),
        partial(_unpack_ratio, e),
        layer_bounds,
        lossy=True,
        kinds=ONE_SIGN,
        why="this codec has logarithms; it is for a precision or a curvature",
        may_refer=True,
        entropy=layers_entropy,
        last=last,
        alone=f"ratio:{e!r}",
    )


# ---- means


def _step(c: float, spec: Spec) -> Array:
    """c standard deviations of every parameter, float64."""
    if spec.scale is None:
        raise WireError("sigma needs the precision of the message, or of the broadcast")
    step: Array = c / np.sqrt(flat32(spec.scale).astype(np.float64))
    return step


def _noise(dither: bool, spec: Spec) -> Array | float:
    """The dither of a mean, uniform on [-1/2, 1/2) and equal at both ends; 0 without dither."""
    if not dither:
        return 0.0
    if spec.stream is None:
        raise WireError("sigma with dither needs the random stream of a task")
    return spec.stream.numpy("dither").random(spec.count) - 0.5


def _pack_mean(
    c: float | None, dither: bool, x: Tensor, spec: Spec, ref: Tensor | None
) -> tuple[Part, ...] | None:
    if spec.scale is None:
        return None
    distance = flat32(x).astype(np.float64)
    if ref is not None:
        distance = distance - flat32(ref)
    if c is not None:
        return _packed(np.rint(distance / _step(c, spec) + _noise(dither, spec)), spec)
    size = float(np.sqrt(np.mean((distance / _step(1.0, spec)) ** 2))) if len(distance) else 0.0
    fitting = min(max(SHARE * math.sqrt(12) * size, LEAST_STEP), MOST_STEP)
    head = STEP.pack(fitting if math.isfinite(size) else MOST_STEP)  # not finite: _packed refuses it
    step = _step(STEP.unpack(head)[0], spec)
    parts = _packed(np.rint(distance / step + _noise(dither, spec)), spec)
    return None if parts is None else (("values", memoryview(head + bytes(parts[0][1]))),)


def _unpack_mean(
    c: float | None, dither: bool, parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None
) -> Tensor:
    data = parts[0]
    if c is None:
        (c,), data = STEP.unpack(data[: STEP.size]), data[STEP.size :]
        if not LEAST_STEP / 2 < c < 2 * MOST_STEP:
            raise WireError(f"a step of {c:g} standard deviations")
    values = (decode_layers(data, spec) - _noise(dither, spec)) * _step(c, spec)
    if ref is not None:
        values = values + flat32(ref)
    return tensor_of(_float32(values), spec)


# ---- precisions


def _pack_ratio(e: float, x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
    values, zeros = flat32(x).astype(np.float64), flat32(x) == 0
    if not (np.isfinite(values).all() and (values >= 0).all()):
        return None
    base = _base(spec, ref)
    steps = np.rint(np.log(np.where(zeros, 1.0, values) / base) / e)
    if (np.abs(steps * e) > 2 * _LOGARITHMS).any():
        return None
    if (base * np.exp(e * steps) < SMALLEST).any():  # it might become 0
        return None
    return _packed(np.where(zeros, 0, np.where(steps >= 0, steps + 1, steps)), spec)


def _unpack_ratio(e: float, parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
    integers = decode_layers(parts[0], spec)
    if not integers.size:
        return tensor_of(integers.astype(np.float32), spec)
    least, largest = int(integers.min()), int(integers.max())
    if max(-least, largest) * e > 2 * _LOGARITHMS + e:
        raise WireError(f"a logarithm of {max(-least, largest) * e:g}")
    return tensor_of(_float32(_base(spec, ref) * _levels(e, integers, least, largest)), spec)


def _levels(e: float, integers: Array, least: int, largest: int) -> Array:
    """The level of every integer; each is computed once."""
    if largest - least > integers.size + TABLE:
        distinct, which = np.unique(integers, return_inverse=True)
        return np.array([_level(e, int(k)) for k in distinct])[which.reshape(-1)]
    table = np.zeros(largest - least + 1)
    table[integers - least] = 1.0  # those that occur
    table[:] = [_level(e, k) if occurs else 0.0 for k, occurs in enumerate(table, least)]
    levels: Array = table[integers - least]
    return levels


@lru_cache(maxsize=1 << 16)
def _level(e: float, k: int) -> float:
    """exp of the multiple of e that k stands for, correctly rounded; 0 for 0."""
    return float((Decimal(e) * (k - 1 if k > 0 else k)).exp()) if k else 0.0


def _base(spec: Spec, ref: Tensor | None) -> Array:
    """The reference of a precision where it is positive and finite, else 1."""
    if ref is None:
        return np.ones(spec.count)
    base = flat32(ref).astype(np.float64)
    usable: Array = np.where(np.isfinite(base) & (base > 0), base, 1.0)
    return usable


# ---- integers


def _packed(steps: Array, spec: Spec) -> tuple[Part, ...] | None:
    if not (np.abs(steps) <= LARGEST).all():  # NaN, too
        return None
    data = encode_layers(steps.astype(np.int64), spec)
    return (("values", memoryview(data)),) if len(data) <= layer_bounds(spec)[0].most else None


def _float32(values: Array) -> Array:
    with np.errstate(over="ignore"):
        result: Array = values.astype(np.float32)
    return result
