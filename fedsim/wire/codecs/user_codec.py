"""A user's own codec, FILE.py:NAME: a fedsim.Codec, or a function without arguments that returns one.

The codec is tested before a run. Its parts must have sizes within its bounds, and must unpack to the original
tensor, or to a finite tensor if the codec is lossy. On the wire, its name is STEM:NAME@DIGEST, with the first
digits of the file's sha256, so two versions of a file are two codecs. A name in the header of a message never
causes a file to be loaded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedsim import plugins
from fedsim.errors import FedsimError, UsageError, WireError
from fedsim.learning.params import Layout, Slice
from fedsim.wire.codecs.base import ONE_SIGN, Codec, Part, Spec, Unpacker

OPTION = "--codec"
LONGEST_NAME = 64
"""The largest length of a codec's name in the header of a message (fedsim.wire.header)."""
DIGITS = 8
"""The number of digits of a file's sha256 in the name of its codec."""
_loaded: dict[str, Codec] = {}
"""The loaded codecs by their names on the wire."""


def users_codec(name: str) -> Codec | None:
    """Return the codec of FILE.py:NAME, or of the wire name of a loaded codec; None for any other name.

    Raises:
        UsageError: If the object is not a codec, or if the codec fails its test.
    """
    if not plugins.is_spec(name):
        return _loaded.get(name)
    result = plugins.load(name, OPTION)
    (digest,) = plugins.sources([name]).values()
    short = f"{plugins.short(name)}@{digest[:DIGITS]}"
    if short not in _loaded:
        created = _created(name, result, short)
        _try(created, name)
        _loaded[short] = created
    return _loaded[short]


def _created(spec: str, result: object, short: str) -> Codec:
    if callable(result) and not isinstance(result, Codec):
        with plugins.user_code_errors(spec, OPTION, "calling it"):
            result = result()
    if not isinstance(result, Codec):
        raise UsageError(
            f"{OPTION} {short} must be a fedsim.Codec, or a function without arguments that returns one; it "
            f"is a {type(result).__name__}"
        )
    if len(short) > LONGEST_NAME:
        raise UsageError(f"{OPTION} {short}: a codec's name has at most {LONGEST_NAME} characters")
    if result.kinds is not None and not result.why:
        raise UsageError(f"{OPTION} {short}: a codec with kinds says in `why` what it is for")
    return replace(result, name=short, unpacker=_strict(result.unpacker, short))


def _strict(unpack: Unpacker, short: str) -> Unpacker:
    """Wrap an unpacker for untrusted bytes: check the tensor, and turn any exception into a WireError."""

    def checked(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
        try:
            x = unpack(parts, spec, ref)
        except FedsimError:
            raise
        except Exception as e:
            raise WireError(f"codec {short!r} cannot unpack this: {type(e).__name__}: {e}") from e
        if not isinstance(x, Tensor) or tuple(x.shape) != spec.shape or x.dtype != spec.dtype:
            what = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise WireError(f"codec {short!r} unpacks {what} where {spec.shape} {spec.dtype} is due")
        return x

    return checked


def _try(created: Codec, spec: str) -> None:
    """Test round trips of tensors of several sizes, layers and magnitudes, including zeros."""
    generator = torch.Generator().manual_seed(0)
    layers = Layout((Slice("a", (60,), 0, 60), Slice("b", (4, 10), 60, 40)))
    for count, layout in ((1, None), (7, None), (100, layers), (4096, None)):
        values = torch.randn(count, generator=generator)
        samples = (values, torch.zeros(count), 1e-20 * values, 1e20 * values)
        for sample in samples:
            x = sample.abs() if created.kinds is not None and created.kinds <= ONE_SIGN else sample
            ref = x + 0.01 * torch.randn(count, generator=generator) if created.delta else None
            _round_trip(created, x, Spec.of((count,), torch.float32, layout), ref, spec)


def _round_trip(created: Codec, x: Tensor, label: Spec, ref: Tensor | None, spec: str) -> None:
    before = x.clone()
    with plugins.user_code_errors(spec, OPTION, f"packing {label.count} numbers"):
        parts, again = created.pack(x, label, ref), created.pack(x, label, ref)
    if not torch.equal(x, before):
        raise _broken(created, label, "its packer changes the tensor")
    if parts is None:  # the codec cannot represent these values; they would be sent dense
        return
    with plugins.user_code_errors(spec, OPTION, f"reading what it packs of {label.count} numbers"):
        if again is None or _bytes(parts) != _bytes(again):
            raise _broken(created, label, "it packs other bytes when it is called again")
        expected = created.bounds(label)
        sizes = [(layer, data.nbytes) for layer, data in parts]
        fits = len(sizes) == len(expected) and all(
            layer == bound.layer and bound.least <= nbytes <= bound.most
            for (layer, nbytes), bound in zip(sizes, expected, strict=False)
        )
    if not fits:
        what = f"it packs the parts {sizes} where its bounds say {[*map(tuple, expected)]}"
        raise _broken(created, label, what)
    try:
        back = created.unpack(tuple(memoryview(bytes(data)) for _, data in parts), label, ref)
    except WireError as e:
        raise UsageError(f"{OPTION} {created.name}: {e}") from e
    if not created.lossy and not torch.equal(back, x):
        what = "what it unpacks is not what was packed, and it does not say lossy=True"
        raise _broken(created, label, what)
    if created.lossy and not torch.isfinite(back).all():
        raise _broken(created, label, "it unpacks a number that is not finite")


def _bytes(parts: tuple[Part, ...]) -> list[tuple[str, bytes]]:
    return [(layer, bytes(data)) for layer, data in parts]


def _broken(created: Codec, label: Spec, what: str) -> UsageError:
    return UsageError(f"{OPTION} {created.name} does not keep its promise: of {label.count} numbers {what}")
