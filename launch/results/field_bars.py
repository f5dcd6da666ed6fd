"""Bars of bytes by field: a field has the same colour and the same position on every page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

FIELDS = (
    *("mean", "precision", "gradient", "curvature", "shift", "control", "momentum"),
    *("train_loss", "delta", "logits", "inputs", "weights", "owners", "info"),
)
"""The fields of the built-in algorithms, in order; other fields follow, sorted by name."""
LAST = {"header": "var(--soft)", "framing": "var(--ink)", "other": "var(--line)"}
"""Parts that are not fields, and their grey colours; they come last."""
HUES = 7
"""The number of field colours in report.css; further fields reuse these colours in paler shades."""


def ordered(names: Iterable[str]) -> list[str]:
    """Return names such as 'mean', 'precision indices' and 'header' in the order of FIELDS."""

    def place(name: str) -> tuple[int, int, str]:
        field = name.partition(" ")[0]
        if name in LAST:
            return 2, list(LAST).index(name), ""
        return (0, FIELDS.index(field), name) if field in FIELDS else (1, 0, name)

    return sorted(names, key=lambda name: (*place(name)[:2], name.endswith("indices"), place(name)[2]))


def stack(title: str, parts: Mapping[str, int]) -> str:
    """Draw one bar of parts, with a legend."""
    total = sum(parts.values())
    if not total:
        return ""
    names = {name: f"{name} {parts[name]:,} ({parts[name] / total:.1%})" for name in ordered(parts)}
    bar, key = _bar(parts, total, _styles(parts)), _key(names, _styles(parts))
    return f"<p><b>{escape(title)}</b> {total:,} bytes</p>{bar}{key}"


def bars(rows: Mapping[str, Mapping[str, float]], totals: Mapping[str, str]) -> str:
    """Draw a bar per row, all on one scale, with one legend. totals: the text after each row's name."""
    most = max((sum(parts.values()) for parts in rows.values()), default=0)
    if not most:
        return ""
    styles = _styles({name for parts in rows.values() for name in parts})
    created = (
        f"<span>{escape(row)} <span>{escape(totals[row])}</span></span>{_bar(parts, most, styles)}"
        for row, parts in rows.items()
    )
    return f'{_key({name: name for name in styles}, styles)}<div class="bars">{"".join(created)}</div>'


def _styles(names: Iterable[str]) -> dict[str, str]:
    """Return the CSS of each name's colour, in order. Indices have stripes in the colour of their field."""
    names = ordered(names)
    fields = list(dict.fromkeys(name.partition(" ")[0] for name in names if name not in LAST))
    own = [field for field in fields if field not in FIELDS]
    places = {field: n for n, field in enumerate((*FIELDS, *own))}
    styles = {}
    for name in names:
        if name in LAST:
            styles[name] = f"background: {LAST[name]}"
            continue
        field, _, layer = name.partition(" ")
        n = places[field]
        colour = f"var(--c{n % HUES})"
        if layer not in ("", "values"):
            stripes = f"{colour} 0 3px, var(--paper) 3px 5px"
            colour = f"repeating-linear-gradient(135deg, {stripes})"
        styles[name] = f"background: {colour}; opacity: {1 - 0.4 * (n // HUES % 3):.1f}"
    return styles


def _bar(parts: Mapping[str, float], whole: float, styles: Mapping[str, str]) -> str:
    created = (
        f'<i style="width: {100 * parts[name] / whole:.3f}%; {style}" '
        f'title="{escape(name)} {parts[name]:,.0f} bytes"></i>'
        for name, style in styles.items()
        if parts.get(name)
    )
    return f'<div class="bar">{"".join(created)}</div>'


def _key(names: Mapping[str, str], styles: Mapping[str, str]) -> str:
    created = (
        f'<span class="key"><i style="{styles[name]}"></i>{escape(text)}</span>'
        for name, text in names.items()
    )
    return f"<p>{' '.join(created)}</p>"
