"""Compression by one word, --compress: codecs for all fields of an algorithm's messages (LEVELS).

A word is expanded to codecs by direction and kind of field. --codec overrides one field. The manifest has the
expansion, so a resumed run, or one from its manifest, has the same codecs in every later version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from fedsim.algorithm import Exchange
from fedsim.wire.codecs import Codec, codec
from fedsim.wire.schema import FieldKind, all_fields


class Level(NamedTuple):
    """What a word does, its bits for a mean and its precision, and its measured loss."""

    codecs: str
    bits: str
    loss: str


LEVELS: Mapping[str, Level] = {
    "none": Level("every value as it is", "64", "none"),
    "lossless": Level("zstd; in uploads delta+zstd", "48", "none, the same bits"),
    "few-bits": Level(
        "means sigma:auto+dither, precisions ratio:0.25; without a precision qsgd:4 up, zstd down",
        "about 4",
        "none that five seeds show",
    ),
    "fewest-bits": Level(
        "means sigma:5%+random up, sigma:10% down, precisions ratio:2; as few-bits with fewer than seven "
        "clients a round or with duals that are not damped",
        "1.0 up, 1.3 down",
        "0.3 points of accuracy, no NLL",
    ),
}
"""The words of --compress. Sources of bits and loss: docs/compression.md#by-one-word."""
LOSSLESS = ("delta+zstd", "zstd")

MEAN = {
    "few-bits": ("sigma:auto+dither", "sigma:auto+dither"),
    "fewest-bits": ("sigma:5%+random", "sigma:10%"),
}
"""The codecs of a mean whose message has a precision, up and down."""
RATIO = {"few-bits": "ratio:0.25", "fewest-bits": "ratio:2"}


def converges(damping: float) -> bool:
    """Return whether dual steps with this damping converge under fewest-bits: rho (1 + omega) < 2.

    1 + omega = 2 / (pi p) with p = 0.05, so rho = 1 / |S| needs seven clients a round. Source:
    docs/decisions/027-few-bits.md."""
    return damping * 2 / (math.pi * 0.05) < 2


def expanded(
    level: str,
    exchanges: Iterable[Exchange],
    unfit: Callable[[Codec, str, str, FieldKind], str],
    reference: str,
) -> dict[str, str]:
    """Return the codecs of a word, by direction.field.

    Args:
        level: A key of LEVELS.
        exchanges: All exchanges of the run.
        unfit: Returns why a codec cannot encode a field; '' if it can (Messages.unfit).
        reference: '+own', '+last' or '', the earlier broadcast to which broadcasts refer.
    """
    lossy: dict[str, tuple[str, ...]] = {"up": (), "down": ()}
    if level in MEAN:
        (up, down), ratio = MEAN[level], RATIO[level]
        lossy = {"up": (up, ratio, "qsgd:4"), "down": (down + reference, ratio + reference)}
    result = {}
    for e in exchanges:
        for side, codecs in lossy.items():
            for field in all_fields(getattr(e, side)):
                names = (*codecs, *LOSSLESS) if field.kind.dims == ("P",) else LOSSLESS
                fits = [c for c in names if not unfit(codec(c), side, field.name, field.kind)]
                if field.kind.dims:
                    result[f"{side}.{field.name}"] = fits[0]
    return result
