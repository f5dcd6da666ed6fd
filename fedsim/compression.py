"""Compression by one word, --compress: codecs for all fields of an algorithm's messages.

    none         every value as it is
    lossless     the same bits of the result, 1.1 to 1.4 times fewer bytes
    few-bits     at most 4 bits a parameter each way where a message has a precision; no measurable loss
    fewest-bits  about one bit a parameter each way; a measured loss of at most half a point of accuracy

A word is expanded to codecs by direction and kind of field. --codec overrides one field. The manifest has the
expansion, so a resumed run, or one from its manifest, has the same codecs in every later version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from fedsim.algorithm import Exchange
from fedsim.wire.codecs import Codec, codec
from fedsim.wire.schema import FieldKind, all_fields

LEVELS: Mapping[str, tuple[str, str, str]] = {
    "none": ("every value as it is", "32 a value", "none"),
    "lossless": ("zstd, and delta+zstd in uploads", "23 to 29 a value", "none: the same bits"),
    "few-bits": (
        "means sigma:auto+dither, precisions ratio:0.25, increments and gradients qsgd:4",
        "1.5 to 4 a parameter",
        "none that five seeds show (docs/compression.md)",
    ),
    "fewest-bits": (
        "means sigma:5%+random up and sigma:10% down, precisions ratio:2",
        "1.0 up and 1.3 down a parameter",
        "accuracy 0.3 points, no NLL (docs/results/few_bits.md)",
    ),
}
"""The words, each with what it does, its bits, and its measured loss."""

STEP = {"few-bits": "sigma:auto+dither", "fewest-bits": "sigma:10%"}
RATIO = {"few-bits": "ratio:0.25", "fewest-bits": "ratio:2"}
LEAST, WIDEST = 5.0, 10.0
"""P of sigma:P%+random in fewest-bits; a dual step that needs more than WIDEST gets the codec of few-bits."""


def expanded(
    level: str,
    exchanges: Iterable[Exchange],
    unfit: Callable[[Codec, str, str, FieldKind], str],
    *,
    damping: float,
    reference: str,
) -> dict[str, str]:
    """Return the codecs of a word, by direction.field.

    Args:
        level: A key of LEVELS.
        exchanges: All exchanges of the run.
        unfit: Returns why a codec cannot encode a field; '' if it can (Messages.unfit).
        damping: rho of the dual step in a round; 1 if steps are not damped. Steps after random rounding
            converge if rho (1 + omega) < 2, with 1 + omega = 2 / (pi p) for p = P / 100.
        reference: '+own', '+last' or '', the earlier broadcast to which broadcasts refer.
    """
    if level == "none":
        return {}
    mean, share = STEP["few-bits"], LEAST
    if damping < 1:
        share = max(LEAST, math.ceil(1000 * damping / math.pi) / 10)
    if level == "fewest-bits" and share <= WIDEST:
        mean = f"sigma:{share:g}%+random"
    lossless = ("delta+zstd", "zstd")
    codecs: dict[str, tuple[str, ...]] = dict.fromkeys(("up", "down"), lossless)
    if level != "lossless":
        step, ratio = f"{STEP[level]}{reference}", f"{RATIO[level]}{reference}"
        codecs = {"up": (mean, RATIO[level], "qsgd:4", *lossless), "down": (step, ratio, *lossless)}
    result = {}
    for e in exchanges:
        for side, candidates in codecs.items():
            for field in all_fields(getattr(e, side)):
                if field.kind.dims == ("P",):
                    fits = [c for c in candidates if not unfit(codec(c), side, field.name, field.kind)]
                    result[f"{side}.{field.name}"] = fits[0]
    return result
