"""Bars of bytes by field: a field has the same colour and the same position on every page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launch.results.figures import COLOURS, TWO_COLUMNS, Figure, plain

FIELDS = (
    *("mean", "precision", "gradient", "curvature", "shift", "control", "momentum"),
    *("train_loss", "delta", "logits", "inputs", "weights", "owners", "info"),
)
"""The fields of the built-in algorithms, in order; other fields follow, sorted by name."""
LAST = {"header": "#676e75", "framing": "#23272b", "other": "#cfd1d0"}
"""Parts that are not fields, and their grey colours; they come last."""
HUES = 7
"""The number of field colours; further fields reuse these colours in paler shades."""


def ordered(names: Iterable[str]) -> list[str]:
    """Return names such as 'mean', 'precision indices' and 'header' in the order of FIELDS."""

    def place(name: str) -> tuple[int, int, bool, str]:
        field = name.partition(" ")[0]
        if name in LAST:
            return 2, list(LAST).index(name), False, ""
        group, at = (0, FIELDS.index(field)) if field in FIELDS else (1, 0)
        return group, at, name.endswith("indices"), name

    return sorted(names, key=place)


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return matplotlib's options for each name's bars, in order; parts like indices are hatched."""
    names = ordered(names)
    fields = list(dict.fromkeys(name.partition(" ")[0] for name in names if name not in LAST))
    places = {f: n for n, f in enumerate((*FIELDS, *(f for f in fields if f not in FIELDS)))}
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        field, _, layer = name.partition(" ")
        n = places.get(field, 0)
        colour, alpha = LAST.get(name, COLOURS[n % HUES]), 1 - 0.4 * (n // HUES % 3)
        hatch = "" if layer in ("", "values") or name in LAST else "////"
        result[name] = {"color": colour, "alpha": alpha, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
    return result


def bars(rows: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    """Draw a bar of megabytes per row, all on one scale; no figure without bytes."""
    names = {name for parts in rows.values() for name, n in parts.items() if n}
    if not names:
        return []

    def draw(drawing: Any) -> None:
        axes = drawing.subplots()
        left = dict.fromkeys(rows, 0.0)
        for name, options in styles(names).items():
            widths = [1e-6 * parts.get(name, 0) for parts in rows.values()]
            axes.barh(range(len(rows)), widths, 0.7, list(left.values()), label=name, **options)
            left = {row: x + width for (row, x), width in zip(left.items(), widths, strict=True)}
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel("megabytes")
        plain(axes)
        drawing.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)

    height = 1.0 + 0.25 * len(rows) + 0.2 * (len(names) // 4)
    return [Figure("bytes by field", draw, None, (TWO_COLUMNS, height))]
