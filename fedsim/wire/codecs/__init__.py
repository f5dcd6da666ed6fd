"""The table of codecs. A codec encodes a tensor by two pure functions, pack and unpack.

An encoding has one or more parts. Each part is one frame on the wire, with the layer 'values' or 'indices'. A
codec may have one parameter after a colon, as in csr:0.1. If a codec would not save bytes, the sender uses
dense instead, and the header says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedsim.errors import WireError
from fedsim.specs import Form, number, parse, whole
from fedsim.wire.codecs import bitmap, csr, float_formats, log8, qsgd, sigma, zstd
from fedsim.wire.codecs.base import Codec, Part, Spec, from_bytes, raw_bytes
from fedsim.wire.codecs.user_codec import users_codec

__all__ = [
    "CODECS",
    "Codec",
    "CodecFamily",
    "Part",
    "Spec",
    "codec",
    "from_bytes",
    "pack_or_dense",
    "raw_bytes",
    "unpack_checked",
]


@dataclass(frozen=True)
class CodecFamily:
    """A row of the table: one codec, or several that differ only in their parameter and flags."""

    name: str
    description: str
    make: Callable[..., Codec]
    fraction: bool = False
    step: str = ""
    """The letter of the parameter, if it is a step (a positive number)."""
    adaptive: bool = False
    """True if the step may also be P% or auto."""
    bits: tuple[int, int] | None = None
    """The fewest and the most bits, if the parameter is a whole number of bits."""
    flags: tuple[str, ...] = ()
    """The flags that may follow the parameter, as +FLAG."""

    @property
    def form(self) -> Form:
        """The syntax of the codec's name."""
        flags = f", and behind it {' or '.join('+' + flag for flag in self.flags)}" if self.flags else ""
        if self.step:
            what = f"the step {self.step}, a positive number, such as {self.name}:0.25"
            if self.adaptive:
                what += f", or P%, P at most 100, or {sigma.AUTO}"
            return Form(self.name, (self.step,), help=what + flags)
        if self.bits:
            what = f"b bits, a whole number from {self.bits[0]} to {self.bits[1]}, such as {self.name}:4"
            return Form(self.name, ("b",), help=what)
        if not self.fraction:
            return Form(self.name)
        return Form(self.name, ("p",), help=f"the fraction to keep, 0 < p <= 1, such as {self.name}:0.1")


LARGEST_STEP = 16.0
"""The largest step of sigma and ratio; much smaller steps already destroy a posterior."""
_KEEPS = "per layer the largest fraction p and the mean of the rest"
_SIGNS = "precision and curvature only"

CODECS: Mapping[str, CodecFamily] = {
    f.name: f
    for f in (
        CodecFamily(
            "dense", "every value as it is (float32: 4 bytes each), bit for bit", float_formats.dense
        ),
        CodecFamily(
            "bf16",
            "bfloat16, 2 bytes a value, relative error at most 0.4 %",
            lambda: float_formats.half("bf16", torch.bfloat16),
        ),
        CodecFamily(
            "f16",
            "IEEE half, 2 bytes a value, overflows above 65504",
            lambda: float_formats.half("f16", torch.float16),
        ),
        CodecFamily(
            "log8",
            f"one byte a value, 256 logarithmic levels per layer, relative error at most 4.2 %; {_SIGNS}",
            log8.log8,
        ),
        CodecFamily(
            "csr",
            f"{_KEEPS}, in compressed sparse rows as in the Gaussian-product paper; {_SIGNS}",
            csr.csr,
            fraction=True,
        ),
        CodecFamily(
            "bitmap",
            f"the numbers of csr, as a bitmap and shuffled float32 under zstd; {_SIGNS}",
            bitmap.bitmap,
            fraction=True,
        ),
        CodecFamily(
            "best",
            f"the numbers of csr, but bfloat16, as a bitmap and shuffled values under zstd; {_SIGNS}",
            bitmap.best,
            fraction=True,
        ),
        CodecFamily(
            "topk",
            "per layer the fraction p of largest magnitude, the rest 0, as a bitmap and shuffled float32 "
            "under zstd; delta and gradient only",
            bitmap.topk,
            fraction=True,
        ),
        CodecFamily("zstd", "lossless: byte shuffle and zstd", zstd.zstd),
        CodecFamily(
            "delta+zstd",
            "lossless: distance from the same field of the broadcast, byte shuffle and zstd; "
            "upwards only (up.field)",
            zstd.delta_zstd,
        ),
        CodecFamily(
            "qsgd",
            "unbiased, b bits a value: random rounding in buckets of 512, entropy-coded; upwards of the "
            "distance from the broadcast; mean, delta and gradient only",
            qsgd.qsgd,
            bits=(qsgd.FEWEST, qsgd.MOST),
        ),
        CodecFamily(
            "sigma",
            "steps of c standard deviations from the broadcast, entropy-coded; needs a precision or "
            "curvature in the broadcast or the message; mean only; P%: the step with which P % of the "
            "integers are not 0; auto: an error of a tenth of the message's change; +random: rounds at "
            "random, unbiased; +dither: adds and subtracts noise; +last, +own (downwards): from the last "
            "broadcast, or the last one that the client got",
            sigma.sigma,
            step="c",
            adaptive=True,
            flags=("dither", "random", "last", "own"),
        ),
        CodecFamily(
            "ratio",
            "the logarithm of the ratio to the broadcast in steps of e, entropy-coded; rounds uploads at "
            "random, unbiased, and broadcasts to the nearest level, with a relative error of at most "
            f"exp(e / 2) - 1; +random or +nearest: both; +last, +own: as sigma; {_SIGNS}",
            sigma.ratio,
            step="e",
            flags=("random", "nearest", "last", "own"),
        ),
    )
}


def codec(name: str) -> Codec:
    """Return the codec of a name such as 'bf16' or 'csr:0.1', or of FILE.py:NAME.

    Raises:
        UsageError: If the codec is unknown, its parameter is invalid, or a user's file is wrong.
    """
    return users_codec(name) or _codec(name)


@cache
def _codec(name: str) -> Codec:
    family_name, arguments = parse(name, "codec", {f.name: f.form for f in CODECS.values()})
    family = CODECS[family_name]
    if family.bits:
        b = whole(arguments[0])
        if not family.bits[0] <= b <= family.bits[1]:
            raise family.form.misuse("codec", name)
        return family.make(b)
    if not family.fraction and not family.step:
        return family.make()
    amount, *flags = arguments[0].split("+") if family.flags else arguments
    options = _options(family, flags)
    most = LARGEST_STEP if family.step else 1
    if options is not None and family.adaptive and amount == sigma.AUTO:
        return sigma.sigma(1.0, sigma.AUTO, **options)
    if options is not None and family.adaptive and amount.endswith(sigma.PERCENT):
        options, amount, most = {**options, "unit": sigma.PERCENT}, amount.removesuffix(sigma.PERCENT), 100
    p = number(amount)
    if options is None or not 0 < p <= most:
        raise family.form.misuse("codec", name)
    return family.make(p, **options)


def _options(family: CodecFamily, flags: Sequence[str]) -> dict[str, Any] | None:
    """Return the flags as keyword arguments of the family; None if they are unknown or exclude each other."""
    exclusive = ({"dither", "random"}, {"nearest", "random"}, {"last", "own"})
    if not {*flags} <= {*family.flags} or any(pair <= {*flags} for pair in exclusive):
        return None
    return dict.fromkeys(flags, True)


def pack_or_dense(
    selected: Codec, x: Tensor, spec: Spec, ref: Tensor | None = None
) -> tuple[str, tuple[Part, ...]]:
    """Return the name of a codec and its parts: 'dense' if `selected` is larger or cannot represent x."""
    parts = selected.pack(x, spec, ref)
    if parts is not None and sum(part.nbytes for _, part in parts) <= spec.dense_bytes:
        return selected.name, parts
    dense = codec("dense")
    plainly = dense.pack(x, spec)
    assert plainly is not None
    return dense.name, plainly


def check_parts(name: str, parts: Sequence[tuple[str, int]], spec: Spec, owner: str) -> None:
    """Check the layer and the size in bytes of every part against the bounds of the codec for this spec."""
    expected = codec(name).bounds(spec)
    if len(parts) != len(expected):
        raise WireError(f"{owner}: {len(parts)} frames where codec {name!r} sends {len(expected)}")
    for (sent, nbytes), (layer, least, most) in zip(parts, expected, strict=True):
        if sent != layer:
            raise WireError(f"{owner}: a part of {sent!r} where codec {name!r} sends {layer!r}")
        if not least <= nbytes <= most:
            size = f"{most}" if least == most else f"{least} to {most}"
            raise WireError(f"{owner}: {nbytes} bytes of {layer} where the layout demands {size}")


def unpack_checked(
    name: str, parts: tuple[Part, ...], spec: Spec, owner: str, ref: Tensor | None = None
) -> Tensor:
    """Check the parts with check_parts, then unpack them."""
    check_parts(name, [(layer, part.nbytes) for layer, part in parts], spec, owner)
    try:
        return codec(name).unpack(tuple(part for _, part in parts), spec, ref)
    except WireError as e:
        raise WireError(f"{owner}: {e}") from None
