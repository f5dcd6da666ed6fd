"""Quantisers for a posterior: means in units of their standard deviation, precisions by their logarithm.

    sigma:c   u = (m - m_ref) sqrt(S), as a multiple of c       m = m_ref + c k / sqrt(S)
    ratio:e   log(S / S_ref), as a multiple of e                S = S_ref exp(e k)

In an upload, the references are the fields of the answered broadcast, as the client decoded them, and S is
the broadcast's precision. In a broadcast, S is the decoded precision of the same message, m_ref = 0 and
S_ref = 1. With +last, the references are the fields of the last broadcast as decoded; with +own, of the last
broadcast that the client got (fedsim.own_references). fedsim.wire.message_context provides the references.
The integers k are entropy-coded layer by layer (fedsim.wire.codecs.entropy).

Increments of natural parameters have steps of c sqrt(S), a shift, or c S, a precision, and no reference.

The step of a mean:

    sigma:c      c standard deviations
    sigma:P%     the step with which P % of the k in this message are not 0
    sigma:auto   the step with which the rounding error is a tenth of u (root mean squares)

sigma:P% and sigma:auto send the step, a float32, before the layers. The step follows the size of the changes,
so late rounds with small changes neither stall nor waste bits. sigma:P% fixes the number of bits (about 0.35
per value for 5 % and 0.65 for 10 %), and outliers do not enlarge its step.

Rounding:

    (no flag)    to the nearest level; ratio in an upload: +random
    +nearest     ratio only: to the nearest level in an upload, too
    +random      to one of the two neighbouring levels, at random, so that the decoded m or S is unbiased
    +dither      sigma only: adds noise from a stream that both ends know, and the decoder subtracts it; the
                 error is uniform, independent of the mean, and 0 on average (Ziv 1985; Zamir and Feder 1992)

Random rounding keeps zeros: a change far below the step nearly always has k = 0 and few bits. An algorithm
with a dual needs no error feedback, because t <- t + rho C(change) is DIANA's rule (Mishchenko et al.,
arXiv:1901.09269, Alg. 1). If C is unbiased with variance at most omega |change|^2 and rho <= 1 / (1 + omega)
(Horvath et al. 2019, arXiv:1904.05115), this rule has the fixed point of exact messages. For sigma:P%+random
omega <= 100 / P (docs/decisions/027-few-bits.md).

Rounding an uploaded precision to the nearest level changes the posterior: once |log(S_k / S_g)| < e / 2 for a
client, it sends no change any more, and all clients alike lose what is below half a step. With the duals of K
clients, S_g then stays above H / (1 + K (exp(e / 2) - 1)), and may reach that: half of the exact precision at
K = 10 and e = 0.25. So `ratio` rounds uploads at random unless +nearest says otherwise. In a broadcast the
error does not add up, because each one is coded anew.

If steps are fine, c costs c^2 / 24 nats of KL per parameter and e about e^2 / 48; random rounding costs twice
as much. These costs exclude the error of a dual, which is a difference of decoded values;
docs/compression.md has steps without loss.

With rounding to the nearest level, the error of a mean is at most c / 2 standard deviations and the relative
error of a precision at most exp(e / 2) - 1; with random rounding, c and exp(e) - 1. No sign changes. A zero
of a curvature stays zero: the integer 0 stands for it, and a multiple k >= 0 is sent as k + 1. The levels
exp(e k) are correctly rounded, so all machines decode the same values.

Source: entropy-coded scalar quantisation (Gish and Pierce 1968), here in the units of the posterior; random
rounding as in QSGD (Alistarh et al. 2017, Sec. 3.1, arXiv:1610.02132).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial

import numpy as np
from torch import Tensor

from fedsim.errors import WireError
from fedsim.wire.codecs.base import ONE_SIGN, Array, Codec, Part, Spec, flat32, tensor_of
from fedsim.wire.codecs.entropy import LARGEST, decode_layers, encode_layers, layer_bounds, layers_entropy

TABLE = 1 << 16
"""A table of levels may have this many more entries than the tensor has values."""
SMALLEST = float(np.finfo(np.float32).tiny)
_LOGARITHMS = 104.0
"""A bound of |log x|: a positive float32 x is between exp(-103.3), which is denormal, and exp(88.8)."""


AUTO = "auto"
PERCENT = "%"
"""The suffix of a step that is given by the percentage of integers that are not 0."""
SHARE = 0.1
"""The root mean square of the rounding error in sigma:auto, divided by the root mean square of u."""
STEP = struct.Struct("<f")
LEAST_STEP, MOST_STEP = 1e-9, 1e6
"""The limits of a step that depends on the message, in standard deviations."""
BELOW_TIE = 1 - 2.0**-20
"""Keeps the smallest number that is sent above half a step: rint would round half a step to 0."""
FINEST = 2.0**-30
"""The lower limit of a step that depends on the message, divided by the largest |u| of the message."""


@dataclass(frozen=True)
class Rounding:
    """The rule that rounds u to integers: to the nearest, at random, or after adding dither."""

    random: bool = False
    dither: bool = False

    @property
    def flags(self) -> str:
        return "+random" * self.random + "+dither" * self.dither

    def draws(self, spec: Spec) -> Array:
        """Return random numbers, uniform on [0, 1) and equal at both ends, (count,) float64.

        Raises:
            WireError: If the message has no random stream.
        """
        if spec.stream is None:
            raise WireError("a codec with +random or +dither needs the random stream of a task")
        return spec.stream.numpy("random" if self.random else "dither").random(spec.count)

    def noise(self, spec: Spec) -> Array | float:
        """Return the dither, uniform on [-1/2, 1/2); 0 without dither."""
        return self.draws(spec) - 0.5 if self.dither else 0.0

    def steps(self, u: Array, spec: Spec) -> Array:
        """Round u, (count,), to whole numbers, float64."""
        steps: Array = np.floor(u + self.draws(spec)) if self.random else np.rint(u + self.noise(spec))
        return steps

    def step(self, unit: str, c: float, u: Array) -> float:
        """Return the step of a message, from its changes u, (count,), finite, in standard deviations."""
        size = np.abs(u)
        largest = float(size.max(initial=0.0))
        if unit == AUTO:
            step = SHARE * math.sqrt(12) * float(np.sqrt(np.mean(u**2))) if largest else 0.0
        elif self.random:
            step = 100 / c * float(size.mean()) if largest else 0.0
        else:
            kept = math.ceil(c / 100 * len(size))
            step = BELOW_TIE * 2 * float(np.partition(size, -kept)[-kept]) if largest else 0.0
        return min(max(step, FINEST * largest, LEAST_STEP), MOST_STEP)


def sigma(
    c: float,
    unit: str = "",
    dither: bool = False,
    random: bool = False,
    last: bool = False,
    own: bool = False,
) -> Codec:
    """Return the codec of a mean with steps of c standard deviations, or with a step for each message.

    unit: '%' for the step with which c % of the integers are not 0, 'auto' (c is ignored), or ''.
    """
    how = Rounding(random, dither)
    alone, head = f"sigma:{AUTO if unit == AUTO else f'{c!r}{unit}'}{how.flags}", STEP.size if unit else 0
    return Codec(
        f"{alone}{_suffix(last, own)}",
        partial(_pack_mean, c, unit, how),
        partial(_unpack_mean, c, unit, how),
        partial(layer_bounds, beside=head),
        lossy=True,
        kinds=frozenset({"mean"}),
        why="this codec measures a mean by its standard deviation",
        may_refer=True,
        entropy=lambda data, spec: layers_entropy(data[head:], spec),
        step=None if random or unit == PERCENT else partial(_sent_step, None if unit else c),
        scaled=True,
        last=last or own,
        own=own,
        alone=alone,
    )


def ratio(
    e: float, random: bool = False, nearest: bool = False, last: bool = False, own: bool = False
) -> Codec:
    """Return the codec of a precision or curvature with steps of e in the logarithm.

    Without `random` and `nearest`, it rounds at random in uploads and to the nearest level in broadcasts.
    """
    how = Rounding(random)
    alone = f"ratio:{e!r}{how.flags}{'+nearest' * nearest}"
    return Codec(
        f"{alone}{_suffix(last, own)}",
        partial(_pack_ratio, e, how),
        partial(_unpack_ratio, e),
        layer_bounds,
        lossy=True,
        kinds=ONE_SIGN,
        why="this codec has logarithms; it is for a precision or a curvature",
        may_refer=True,
        entropy=layers_entropy,
        bias=0.0 if random else e / 2,
        upwards="" if random or nearest or last or own else f"{alone}+random",
        last=last or own,
        own=own,
        alone=alone,
    )


def _sent_step(c: float | None, data: memoryview) -> float:
    """Return c or, for sigma:auto, the step at the beginning of the message."""
    return float(STEP.unpack(data[: STEP.size])[0]) if c is None else c


def _suffix(last: bool, own: bool) -> str:
    return "+last" * last + "+own" * own


# ---- means


def _step(c: float, spec: Spec) -> Array:
    """Return c standard deviations of every parameter, float64."""
    if spec.scale is None:
        raise WireError("sigma needs the precision of the message, or of the broadcast")
    step: Array = c / np.sqrt(flat32(spec.scale).astype(np.float64))
    return step


def _pack_mean(
    c: float, unit: str, how: Rounding, x: Tensor, spec: Spec, ref: Tensor | None
) -> tuple[Part, ...] | None:
    if spec.scale is None:
        return None
    distance = flat32(x).astype(np.float64)
    if ref is not None:
        distance = distance - flat32(ref)
    if not unit:
        return _packed(how.steps(distance / _step(c, spec), spec), spec)
    u = distance / _step(1.0, spec)
    if not np.isfinite(u).all():
        return None
    head = STEP.pack(how.step(unit, c, u))
    step = _step(STEP.unpack(head)[0], spec)
    parts = _packed(how.steps(distance / step, spec), spec)
    return None if parts is None else (("values", memoryview(head + bytes(parts[0][1]))),)


def _unpack_mean(
    c: float, unit: str, how: Rounding, parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None
) -> Tensor:
    data = parts[0]
    if unit:
        (c,), data = STEP.unpack(data[: STEP.size]), data[STEP.size :]
        if not LEAST_STEP / 2 < c < 2 * MOST_STEP:
            raise WireError(f"a step of {c:g} standard deviations")
    values = (decode_layers(data, spec) - how.noise(spec)) * _step(c, spec)
    if ref is not None:
        values = values + flat32(ref)
    return tensor_of(_float32(values), spec)


# ---- precisions


def _pack_ratio(
    e: float, how: Rounding, x: Tensor, spec: Spec, ref: Tensor | None
) -> tuple[Part, ...] | None:
    values, zeros = flat32(x).astype(np.float64), flat32(x) == 0
    if not (np.isfinite(values).all() and (values >= 0).all()):
        return None
    base = _base(spec, ref)
    u = np.log(np.where(zeros, 1.0, values) / base) / e
    if how.random:  # interpolate so that the decoded precision, not its logarithm, is unbiased
        whole = np.floor(u)
        u = whole + np.expm1(e * (u - whole)) / math.expm1(e)
    steps = how.steps(u, spec)
    if (np.abs(steps * e) > 2 * _LOGARITHMS).any():
        return None
    if (base * np.exp(e * steps) < SMALLEST).any():  # the decoded value might become 0
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
    """Return the level of every integer; equal levels are computed once."""
    if largest - least > integers.size + TABLE:
        distinct, which = np.unique(integers, return_inverse=True)
        return np.array([_level(e, int(k)) for k in distinct])[which.reshape(-1)]
    table = np.zeros(largest - least + 1)
    table[integers - least] = 1.0  # mark the integers that occur
    table[:] = [_level(e, k) if occurs else 0.0 for k, occurs in enumerate(table, least)]
    levels: Array = table[integers - least]
    return levels


@lru_cache(maxsize=1 << 16)
def _level(e: float, k: int) -> float:
    """Return exp of the multiple of e that k stands for, correctly rounded; 0 for k = 0."""
    return float((Decimal(e) * (k - 1 if k > 0 else k)).exp()) if k else 0.0


def _base(spec: Spec, ref: Tensor | None) -> Array:
    """Return the reference of a precision where it is positive and finite, else 1."""
    if ref is None:
        return np.ones(spec.count)
    base = flat32(ref).astype(np.float64)
    usable: Array = np.where(np.isfinite(base) & (base > 0), base, 1.0)
    return usable


# ---- integers


def _packed(steps: Array, spec: Spec) -> tuple[Part, ...] | None:
    if not (np.abs(steps) <= LARGEST).all():  # refuses NaN, too
        return None
    data = encode_layers(steps.astype(np.int64), spec)
    return (("values", memoryview(data)),) if len(data) <= layer_bounds(spec)[0].most else None


def _float32(values: Array) -> Array:
    with np.errstate(over="ignore"):
        result: Array = values.astype(np.float32)
    return result
