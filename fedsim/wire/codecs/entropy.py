"""Entropy coding of integers close to their zeroth-order entropy: a range coder with one table per layer.

A layer of integers k consists of

    2 bytes   T, the number of tokens in the table; if T = 0, all integers are 0 and nothing follows
    1 byte    s: every |k| < 2^s has its own bucket; the sender chooses s for the fewest bytes
    4 bytes   W, the number of 32-bit words of the range code
    T bytes   the frequency of every token: bytes 0 to 7 stand for themselves; other bytes have the low 3 bits
              m and the other bits e, and stand for (8 + m) 2^(e - 1). The relative difference from the count
              is at most 1/16, which costs at most 0.3 %
    4 W bytes the tokens, coded with these frequencies
    the rest  the low bits of every |k| >= 2^s, which the token does not determine

A token is the sign of k and a bucket of |k|. Each of 0 to 2^s - 1 is a bucket, and every higher octave has
four buckets. Therefore the table is short, any |k| < 2^40 has a token, and no distribution is assumed.
Frequencies and the coder's arithmetic are integers, so all machines decode the same values. Decoders raise
WireError if the bytes do not have this format.

Source: range coding, Martin 1979, by the package constriction (https://bamler-lab.github.io/constriction).
"""

from __future__ import annotations

import struct
from functools import cache

import constriction
import numpy as np

from fedsim.errors import WireError
from fedsim.wire.codecs.base import Array, Bound, Spec

HEAD = struct.Struct("<HBI")
LEAST = 2
"""The smallest size of a layer in bytes."""
FEW = 64
"""The size in bytes that any layer may have, even with few values."""
BITS = 40
LARGEST = (1 << BITS) - 1
"""The largest |k|."""
SAMPLE = 4096
"""The approximate number of integers from which s is chosen."""
_SINGLE = (2, 4, 6, 8)
"""The values of s that are tried."""


def encode_integers(integers: Array) -> bytes:
    """Encode a layer of integers, (n,) int64 with |k| <= LARGEST."""
    if not integers.any():
        return bytes(LEAST)
    size = np.abs(integers)
    some = slice(None, None, max(1, len(integers) // SAMPLE))
    s = min(_SINGLE, key=lambda candidate: _expected(integers[some], size[some], candidate, len(integers)))
    tokens, width = _tokens(integers, size, s)
    table = _as_bytes(np.bincount(tokens))
    coder = constriction.stream.queue.RangeEncoder()
    coder.encode(tokens, _model(table))
    words = coder.get_compressed().astype("<u4")
    head = HEAD.pack(len(table), s, len(words))
    return b"".join((head, table.tobytes(), words.tobytes(), _rest(size, width)))


def decode_integers(data: memoryview, count: int) -> tuple[Array, int]:
    """Decode the `count` integers of a layer; also return the number of bytes of `data` that they occupy."""
    if len(data) < LEAST:
        raise WireError("a layer without a head")
    if not (data[0] or data[1]):
        return np.zeros(count, dtype=np.int64), LEAST
    if len(data) < HEAD.size:
        raise WireError("a layer without a head")
    tokens_known, s, words = HEAD.unpack(data[: HEAD.size])
    begin = HEAD.size + tokens_known
    end = begin + 4 * words
    if s not in _SINGLE or not 2 <= tokens_known < 2 * _buckets_of(s) or end > len(data):
        raise WireError(f"a table of {tokens_known} tokens and {words} words in {len(data)} bytes")
    table = np.frombuffer(data[HEAD.size : begin], dtype=np.uint8)
    if not table[-1]:
        raise WireError("a table that ends with a token of no frequency")
    code = np.frombuffer(data[begin:end], dtype="<u4").astype(np.uint32)
    try:
        tokens = constriction.stream.queue.RangeDecoder(code).decode(_model(table), count)
    except (AssertionError, ValueError) as e:
        raise WireError(f"no range code of {count} tokens ({e})") from None
    if not table[tokens].all():
        raise WireError("a token of no frequency")
    least, width = _table(s)
    if tokens_known <= 2 ** (s + 1) - 1:  # every token determines its integer
        return least[tokens], end
    size, used = _sizes(np.abs(least)[tokens], width[tokens], data[end:])
    return np.where(tokens % 2 == 1, size, -size), end + used


def entropy_bits(integers: Array) -> float:
    """Return the zeroth-order entropy of a layer of integers, in bits for the whole layer."""
    if not len(integers):
        return 0.0
    counts = np.unique(integers, return_counts=True)[1].astype(np.float64)
    return float(-(counts * np.log2(counts / len(integers))).sum())


# ---- layers of a tensor


def encode_layers(integers: Array, spec: Spec) -> bytes:
    """Encode the integers of a tensor, (count,) int64, layer by layer."""
    return b"".join(encode_integers(integers[s.offset : s.offset + s.size]) for s in spec.layout.slices)


def decode_layers(data: memoryview, spec: Spec) -> Array:
    """Decode the integers of a tensor, (count,) int64."""
    out, at = np.empty(spec.count, dtype=np.int64), 0
    for s in spec.layout.slices:
        out[s.offset : s.offset + s.size], used = decode_integers(data[at:], s.size)
        at += used
    if at != len(data):
        raise WireError(f"{len(data) - at} bytes behind the last layer")
    return out


def layer_bounds(spec: Spec, beside: int = 0) -> tuple[Bound, ...]:
    """Return the bound of a part that contains `beside` bytes and all entropy-coded layers."""
    layers = len(spec.layout.slices)
    return (Bound("values", beside + LEAST * layers, beside + max(spec.dense_bytes, FEW * layers)),)


def layers_entropy(data: memoryview, spec: Spec) -> float:
    """Return the sum of the zeroth-order entropies of all layers, in bits."""
    integers = decode_layers(data, spec)
    return sum(entropy_bits(integers[s.offset : s.offset + s.size]) for s in spec.layout.slices)


# ---- tokens


def _buckets_of(s: int) -> int:
    return int(2**s) + 4 * (BITS - s)


def _tokens(integers: Array, size: Array, s: int) -> tuple[Array, Array]:
    """Return the token of every integer, and the number of bits that the token does not determine."""
    if int(size.max(initial=0)) < 2**s:
        return (2 * size - (integers > 0)).astype(np.int32), np.zeros(len(size), dtype=np.int64)
    octave = np.frexp(size.astype(np.float64))[1].astype(np.int64) - 1  # floor(log2), exact below 2^53
    single = size < 2**s
    width = np.where(single, 0, octave - 2)
    bucket = np.where(single, size, 2**s + 4 * (octave - s) + ((size >> width) & 3))
    return (2 * bucket - (integers > 0)).astype(np.int32), width


def _expected(integers: Array, size: Array, s: int, count: int) -> float:
    """Estimate the bits of a layer of `count` integers with this s from a sample of its integers."""
    tokens, width = _tokens(integers, size, s)
    counts = np.bincount(tokens)
    used = counts[counts > 0]
    bits = float(-(used * np.log2(used / len(integers))).sum())
    return (bits + float(width.sum())) * count / len(integers) + 8 * len(counts)


@cache
def _table(s: int) -> tuple[Array, Array]:
    """Return each token's integer of smallest magnitude, and the number of bits the token leaves open."""
    tokens = np.arange(2 * _buckets_of(s), dtype=np.int64)
    bucket = (tokens + 1) // 2
    single = bucket < 2**s
    octave, quarter = s + (bucket - 2**s) // 4, (bucket - 2**s) % 4
    width = np.where(single, 0, octave - 2)
    least = np.where(single, bucket, (4 + quarter) << np.maximum(width, 0))
    return np.where(tokens % 2 == 1, least, -least), width


def _rest(size: Array, width: Array) -> bytes:
    """Return the low `width` bits of each integer's size, ordered by width and then by position."""
    bits = [
        ((size[width == w][:, None] >> np.arange(w - 1, -1, -1)) & 1).astype(np.uint8).reshape(-1)
        for w in range(1, int(width.max(initial=0)) + 1)
    ]
    return np.packbits(np.concatenate(bits)).tobytes() if bits else b""


def _sizes(size: Array, width: Array, data: memoryview) -> tuple[Array, int]:
    """Add the low bits at the start of `data` to the smallest sizes; return |k| and the bytes read."""
    total = int(width.sum())
    used = -(-total // 8)
    if used > len(data):
        raise WireError(f"{len(data)} bytes, but the tokens need {total} more bits")
    bits = np.unpackbits(np.frombuffer(data[:used], dtype=np.uint8)).astype(np.int64)
    if bits[total:].any():
        raise WireError("bits behind the last one")
    at = 0
    for w in range(1, int(width.max(initial=0)) + 1):
        places = np.flatnonzero(width == w)
        low = bits[at : at + w * len(places)].reshape(-1, w) @ (1 << np.arange(w - 1, -1, -1))
        size[places] += low
        at += w * len(places)
    return size, used


# ---- frequencies


def _as_bytes(counts: Array) -> Array:
    """Convert every count to the nearest byte of the table, at least 1 for a token that occurs."""
    exponent = np.maximum(np.frexp(counts.astype(np.float64))[1] - 4, 0)  # counts below 16 are exact
    mantissa = np.rint(counts / 2.0**exponent).astype(np.int64)  # 8 to 16, or 1 to 15 with exponent 0
    carries = mantissa == 16
    exponent, mantissa = np.where(carries, exponent + 1, exponent), np.where(carries, 8, mantissa)
    table = np.where(mantissa < 8, mantissa, 8 * (exponent + 1) + mantissa - 8)
    return table.astype(np.uint8)


def _frequencies(table: Array) -> Array:
    """Return the frequencies of a table's bytes: 0 to 7, then eight values per octave."""
    wide = table.astype(np.int64)
    return np.where(wide < 8, wide, (8 + wide % 8) << np.minimum(np.maximum(wide // 8 - 1, 0), 50))


def _model(table: Array) -> constriction.stream.model.Categorical:
    frequencies = _frequencies(table).astype(np.float64)
    return constriction.stream.model.Categorical(frequencies / frequencies.sum(), perfect=False)
