"""Codecs that send every value as it is, or as a 16-bit float."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.wire.codecs.base import Codec, Part, Spec, fixed, from_bytes, raw_bytes


def _dense(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...]:
    return (("values", raw_bytes(x)),)


def _undense(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
    return from_bytes(parts[0], spec.shape, spec.dtype)


def dense() -> Codec:
    return Codec("dense", _dense, _undense, lambda spec: (fixed("values", spec.dense_bytes),))


def half(name: str, kind: torch.dtype) -> Codec:
    """Return a codec of 16-bit floats, rounded to nearest, ties to even."""

    def pack(x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...]:
        return (("values", raw_bytes(x.to(kind))),)

    def unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
        return from_bytes(parts[0], spec.shape, kind).to(spec.dtype)

    bounds = lambda spec: (fixed("values", 2 * spec.count),)  # noqa: E731
    bias = torch.finfo(kind).eps / 2
    return Codec(name, pack, unpack, bounds, lossy=True, bias=bias)
