"""Convert images to arrays, depending on their mode
(https://pillow.readthedocs.io/en/stable/handbook/concepts.html#modes).

L, RGB          8 bits per channel, unchanged
1               black and white: 0 and 255
P               palette, converted to RGB; with transparency, it is treated as PA
LA, RGBA, PA    the alpha channel is removed if it is opaque everywhere, otherwise the image is an error
I;16            16-bit grey in any byte order, also mode I of a PNG file, as float32
others          an error: the range of values is not known (other I, F), or not RGB (CMYK, LAB, ...)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fedsim.data.arrays import Array
from fedsim.errors import DataError

_GREY_16 = ("I;16", "I;16B", "I;16L", "I;16N")
_SEVERAL = ("MPO",)
"""Formats with several pictures, such as camera files with a preview. Only the first picture is read."""


def pixels(images: Iterable[tuple[str, Callable[[], Any]]], owner: str) -> tuple[Array, float]:
    """Convert images to inputs (n, channels, height, width), uint8 or float32; also return the value
    of white.

    images: pairs of a name for error messages and a function that opens the image (as a PIL.Image.Image).
    """
    rows: list[Array] = []
    kinds: Counter[str] = Counter()
    first: dict[str, str] = {}
    for place, opened in images:
        try:
            image = opened()
            frames = getattr(image, "n_frames", 1)
        except Exception as e:
            text = " ".join(str(e).split())[:200]
            raise DataError(f"{owner}: {place} cannot be read: {type(e).__name__}: {text}") from e
        if image is None:
            raise DataError(f"{owner}: {place} is missing")
        if frames > 1 and image.format not in _SEVERAL:
            raise DataError(f"{owner}: {place} has {frames} frames; an example is one picture")
        row = _channels_last(image, f"{owner}: {place}")
        height, width, channels = row.shape
        bits = 8 * row.dtype.itemsize
        kind = f"{width}x{height} with {channels} channel{'s' * (channels > 1)} of {bits} bits"
        kinds[kind] += 1
        first.setdefault(kind, place)
        rows.append(row)
    if len(kinds) > 1:
        listed = ", ".join(
            f"{count:,} of {kind} (such as {first[kind]})" for kind, count in kinds.most_common(4)
        )
        raise DataError(
            f"{owner}: its images have several sizes or modes: {listed}; resize and convert them first"
        )
    stacked = np.stack(rows).transpose(0, 3, 1, 2)
    if stacked.dtype == np.uint8:
        return stacked, 255.0
    return stacked.astype(np.float32), 65535.0


def _channels_last(image: Any, where: str) -> Array:
    """Convert an image to an array (height, width, channels), uint8 or uint16."""
    mode = str(image.mode)
    # 16-bit grey; older versions of Pillow open such a PNG with mode I.
    if mode in _GREY_16 or (mode == "I" and image.format == "PNG"):
        return np.asarray(image).astype(np.uint16)[:, :, None]
    if mode == "1":
        image = image.convert("L")
    elif mode == "P" and "transparency" not in image.info:
        image = image.convert("RGB")
    elif mode in ("P", "PA", "LA", "RGBA"):
        image = image if mode == "LA" else image.convert("RGBA")
        if image.getchannel("A").getextrema()[0] < 255:
            raise DataError(
                f"{where} is transparent in parts (mode {mode}): put it on a background first "
                "(PIL.Image.alpha_composite)"
            )
        image = image.convert(image.mode[:-1])
    elif mode not in ("L", "RGB"):
        raise DataError(
            f"{where} has the mode {mode}, which is not supported. Convert it first: colours with "
            "image.convert('RGB'), I and F to 8 or 16 bits with a known range"
        )
    array = np.asarray(image)
    return array[:, :, None] if array.ndim == 2 else array
