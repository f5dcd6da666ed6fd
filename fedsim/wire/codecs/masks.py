"""Codecs for the probabilities of masks: fields of kind probability, values q in [0, 1].

    bernoulli   a mask m ~ Bernoulli(q), entropy-coded, of about the entropy of m given the broadcast's p
    mrc:b       a mask with approximately the distribution Bernoulli(q), as an index of b bits per block
    levels:b    q itself as the nearest multiple of 2^-b, entropy-coded

bernoulli and mrc send a sample instead of q: the decoded values are 0 and 1, and their mean over messages is
q. In an upload, p is the same field of the answered broadcast. If the broadcast does not have this field,
bernoulli encodes layer by layer, and mrc uses p = 1/2. In a broadcast, mrc:b+last takes p from the last
broadcast, and mrc:bxN sends N samples, whose mean is the decoded value.

Minimal random coding (mrc). Both ends draw 2^b candidates of a block from Bernoulli(p). An integer hash of
the message's key computes every bit of a candidate on its own, and equally on all machines. The sender
chooses candidate c with probability proportional to q(c) / p(c), and sends its number. Samples are exact if
2^b is much larger than exp(KL); with fewer candidates, they are biased towards p. Therefore the number of
places (entries of the field) in a block is chosen for a mean KL of b - SPARE bits, and is sent before the
indices of a layer. The places of a layer are permuted first, which gives its blocks about the same KL
(differs from the sources, which choose blocks by position).

Sources: FedPM, Isik et al. 2023, https://arxiv.org/abs/2209.15328 (bernoulli); minimal random coding,
Havasi et al. 2019, Algorithm 1, https://arxiv.org/abs/1810.00440; KLMS, Isik, Pase et al. 2024,
https://arxiv.org/abs/2306.12625 (uploads, one block size per layer); BiCompFL, Egger et al. 2025,
https://arxiv.org/abs/2502.00206 (both directions, the mean of N samples in broadcasts)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import partial

import numpy as np
from torch import Tensor

from fedsim.errors import WireError
from fedsim.seeds import RandomStream
from fedsim.wire.codecs.base import Array, Bound, Codec, Part, Spec, flat32, tensor_of
from fedsim.wire.codecs.entropy import (
    FEW,
    LEAST,
    decode_integers,
    decode_layers,
    encode_integers,
    encode_layers,
    layer_bounds,
    layers_entropy,
)

_codec = partial(
    Codec, lossy=True, kinds=frozenset({"probability"}), why="this codec is for probabilities of masks"
)
BINS = 16
"""The number of intervals of p; bernoulli has one table of frequencies for each interval."""
FEWEST, MOST = 3, 12
"""The limits of b in mrc."""
SAMPLES = 64
"""The largest N of mrc."""
SPARE = 2.0
"""The bits by which an index exceeds the mean KL of a block. The mean of the samples covers 0.8 of the way
from p to q; SPARE = 5 would cover 0.93, for twice the bytes (docs/decisions/028-masks.md)."""
LONGEST = 1 << 14
"""The largest number of places in a block."""
PRIOR = 0.02
"""mrc clips p to [PRIOR, 1 - PRIOR], so that every mask can be a candidate."""
HEAD = struct.Struct("<I")
"""The number of places in a layer's blocks."""
UNIT = 1 << 16
INDICES = 1 << 16
"""The number of indices packed or unpacked at a time, a multiple of 8; it limits the memory of their bits."""


def bernoulli() -> Codec:
    return _codec("bernoulli", _pack_mask, _unpack_mask, _mask_bounds, may_refer=True)


def levels(b: int) -> Codec:
    pack, unpack = partial(_pack_levels, b), partial(_unpack_levels, b)
    return _codec(f"levels:{b}", pack, unpack, layer_bounds, entropy=layers_entropy)


def mrc(b: int, samples: int = 1, last: bool = False) -> Codec:
    name = f"mrc:{b}" + (f"x{samples}" if samples > 1 else "")
    return _codec(
        f"{name}+last" if last else name,
        partial(_pack_mrc, b, samples),
        partial(_unpack_mrc, b, samples),
        partial(_mrc_bounds, b, samples),
        may_refer=True,
        last=last,
        alone=name if last else "",
    )


def _probabilities(x: Tensor) -> Array | None:
    """Return q, (count,) float64; None if a value is not a probability."""
    q = flat32(x).astype(np.float64)
    return q if np.isfinite(q).all() and ((q >= 0) & (q <= 1)).all() else None


# ---- a mask, entropy-coded


def _bins(ref: Tensor | None, spec: Spec) -> list[Array]:
    """Return the groups of places that share a table: places of similar p or, without p, of one layer."""
    if ref is None:
        return [np.arange(s.offset, s.offset + s.size) for s in spec.layout.slices]
    bins = np.minimum((flat32(ref) * BINS).astype(np.int64), BINS - 1)
    return [np.flatnonzero(bins == b) for b in range(BINS)]


def _mask_bounds(spec: Spec) -> tuple[Bound, ...]:
    groups = max(BINS, len(spec.layout.slices))  # each has at least LEAST bytes
    return (Bound("values", LEAST, spec.dense_bytes + LEAST * groups + FEW),)


def _pack_mask(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
    q = _probabilities(x)
    if q is None:
        return None
    mask = (_stream(spec).numpy("bernoulli").random(spec.count) < q).astype(np.int64)
    data = b"".join(encode_integers(mask[places]) for places in _bins(ref, spec))
    return (("values", memoryview(data)),) if len(data) <= _mask_bounds(spec)[0].most else None


def _unpack_mask(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
    out, at = np.empty(spec.count, dtype=np.float32), 0
    for places in _bins(ref, spec):
        mask, used = decode_integers(parts[0][at:], len(places))
        if ((mask < 0) | (mask > 1)).any():
            raise WireError("a mask with other values than 0 and 1")
        out[places], at = mask, at + used
    if at != len(parts[0]):
        raise WireError(f"{len(parts[0]) - at} bytes behind the mask")
    return tensor_of(out, spec)


# ---- levels


def _pack_levels(b: int, x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
    q = _probabilities(x)
    if q is None:
        return None
    data = encode_layers(np.rint(q * 2**b).astype(np.int64), spec)
    return (("values", memoryview(data)),) if len(data) <= layer_bounds(spec)[0].most else None


def _unpack_levels(b: int, parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
    integers = decode_layers(parts[0], spec)
    if ((integers < 0) | (integers > 2**b)).any():
        raise WireError("a level that is no probability")
    return tensor_of((integers / 2**b).astype(np.float32), spec)


# ---- minimal random coding


def _stream(spec: Spec) -> RandomStream:
    if spec.stream is None:
        raise WireError("a sample of a mask needs the random stream of a task")
    return spec.stream


def _thresholds(ref: Tensor | None, spec: Spec) -> Array:
    """Return p in units of 1 / UNIT, (count,) uint64; integers are equal at both ends."""
    p = np.full(spec.count, 0.5) if ref is None else flat32(ref).astype(np.float64)
    thresholds: Array = np.rint(UNIT * p.clip(PRIOR, 1 - PRIOR)).astype(np.uint64)
    return thresholds


def _hash(counters: Array, key: int) -> Array:
    """Return 64 random bits for every counter, uint64, by SplitMix64's finaliser (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = (counters + np.uint64(key % 2**64)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def _candidate(number: int, size: int, key: int) -> Array:
    """Return the random integers, uniform below UNIT, of candidate `number` of a layer, (size,) uint16."""
    words = -(-size // 4)
    counters = np.arange(number * words, (number + 1) * words, dtype=np.uint64)
    return _hash(counters, key).astype("<u8").view("<u2")[:size]


def _drawn(numbers: Array, size: int, key: int) -> Array:
    """Return place i of candidate numbers[i] for every i, (size,) uint64; compute only these places."""
    words, places = -(-size // 4), np.arange(size, dtype=np.uint64)
    counters = numbers.astype(np.uint64) * np.uint64(words) + places // np.uint64(4)
    lanes = np.uint64(16) * (places % np.uint64(4))
    uniform: Array = (_hash(counters, key) >> lanes) & np.uint64(UNIT - 1)
    return uniform


def _layers(spec: Spec) -> Iterator[tuple[int, int, int, Array]]:
    """Yield the offset, size, key and permutation of every layer."""
    stream = _stream(spec)
    for number, s in enumerate(spec.layout.slices):
        order = stream.numpy(f"order {number}").permutation(s.size)
        yield s.offset, s.size, stream.key(f"candidates {number}"), order


def _mrc_bounds(b: int, samples: int, spec: Spec) -> tuple[Bound, ...]:
    least = most = 0
    for s in spec.layout.slices:
        least += HEAD.size + -(-samples * b * -(-s.size // LONGEST) // 8)
        most += HEAD.size + -(-samples * b * s.size // 8)
    few = max(spec.dense_bytes, FEW * len(spec.layout.slices), least)  # a longer part is sent dense
    return (Bound("values", least, min(most, few)),)


def _length(b: int, kl: float, size: int) -> int:
    """Return the number of places of a block, from the layer's mean KL per place in bits."""
    longest, room = max(1, min(size, LONGEST)), b - SPARE
    return longest if kl * longest <= room else max(1, int(room / kl))


def _pack_mrc(b: int, samples: int, x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
    q = _probabilities(x)
    if q is None:
        return None
    q, thresholds = q.clip(1e-6, 1 - 1e-6), _thresholds(ref, spec)
    p = thresholds / UNIT
    kl = (q * np.log2(q / p) + (1 - q) * np.log2((1 - q) / (1 - p))).clip(min=0)
    gain = np.log(q / p) - np.log((1 - q) / (1 - p))
    draws, data = _stream(spec).numpy("choice"), b""
    for offset, size, key, order in _layers(spec):
        places = offset + order
        length = _length(b, float(kl[places].mean()) if size else 0.0, size)
        starts = np.arange(0, size, length)
        indices = [
            _best(b, n, size, key, gain[places], thresholds[places], starts, draws) for n in range(samples)
        ]
        data += HEAD.pack(length) + _packed(np.concatenate(indices), b)
    return (("values", memoryview(data)),) if len(data) <= _mrc_bounds(b, samples, spec)[0].most else None


def _best(
    b: int,
    sample: int,
    size: int,
    key: int,
    gain: Array,
    thresholds: Array,
    starts: Array,
    draws: np.random.Generator,
) -> Array:
    """Draw a candidate's number for every block, in proportion to q(c) / p(c), by the Gumbel-max trick."""
    best = np.full(len(starts), -math.inf)
    index = np.zeros(len(starts), dtype=np.int64)
    for candidate in range(2**b if size else 0):
        mask = _candidate((sample << b) + candidate, size, key) < thresholds
        value = np.add.reduceat(np.where(mask, gain, 0.0), starts) + draws.gumbel(size=len(starts))
        better = value > best
        best[better], index[better] = value[better], candidate
    return index


def _unpack_mrc(
    b: int, samples: int, parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None
) -> Tensor:
    thresholds, data, at = _thresholds(ref, spec), parts[0], 0
    out = np.zeros(spec.count, dtype=np.float32)
    for offset, size, key, order in _layers(spec):
        if len(data) - at < HEAD.size:
            raise WireError("a layer without the length of its blocks")
        (length,) = HEAD.unpack(data[at : at + HEAD.size])
        if not 1 <= length <= LONGEST:
            raise WireError(f"blocks of {length} places; the limit is {LONGEST}")
        blocks = -(-size // length)
        used = -(-samples * blocks * b // 8)
        at += HEAD.size
        if len(data) - at < used:
            raise WireError(f"{len(data) - at} bytes where {samples * blocks} indices need {used}")
        indices = _unpacked(data[at : at + used], samples * blocks, b).reshape(samples, blocks)
        at, places = at + used, offset + order
        for n in range(samples):
            numbers = (n << b) + np.repeat(indices[n], length)[:size].astype(np.int64)
            out[places] += _drawn(numbers, size, key) < thresholds[places]
    if at != len(data):
        raise WireError(f"{len(data) - at} bytes behind the last layer")
    return tensor_of(out / np.float32(samples), spec)


def _packed(indices: Array, b: int) -> bytes:
    """Pack numbers below 2^b, with b bits each."""
    shifts, out = np.arange(b - 1, -1, -1), []
    for at in range(0, len(indices), INDICES):
        bits = ((indices[at : at + INDICES, None] >> shifts) & 1).astype(np.uint8)
        out.append(np.packbits(bits.reshape(-1)).tobytes())
    return b"".join(out)


def _unpacked(data: memoryview, count: int, b: int) -> Array:
    """Unpack the numbers, (count,) uint16, from the ceil(count b / 8) bytes of `data`."""
    if data and data[-1] & ((1 << (-count * b % 8)) - 1):
        raise WireError("bits behind the last index")
    numbers, values = np.empty(count, dtype=np.uint16), 1 << np.arange(b - 1, -1, -1)
    for at in range(0, count, INDICES):
        some = numbers[at : at + INDICES]
        packed = np.frombuffer(data[at * b // 8 : -(-(at + len(some)) * b // 8)], dtype=np.uint8)
        some[:] = np.unpackbits(packed, count=len(some) * b).reshape(-1, b) @ values
    return numbers
