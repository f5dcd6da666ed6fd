"""The page around the pictures: one HTML file that loads nothing, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from fedsim.errors import DiskError
from launch.sweep.figures import COLOURS

_DARK = ("#56b4e9", "#ff8a50", "#2fc79a", "#e29cc5", "#f0b73f", "#8fd0f5", "#d06aa6", "#dddddd")
_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #23272b; --soft: #676e75; --line: #dfe1e0; $light }
@media (prefers-color-scheme: dark) {
:root { --paper: #16191c; --ink: #dfe2e4; --soft: #98a0a7; --line: #343a3f; $dark } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.2rem; max-width: 68rem; background: var(--paper); color: var(--ink);
font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem }
p { margin: .3rem 0 } .soft, figcaption, th { color: var(--soft) } .bad { color: var(--c1); font-weight: 600 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .8rem;
margin: 1.2rem 0 }
.tiles div { border-top: 2px solid var(--line); padding-top: .3rem }
.tiles b { display: block; font-size: 1.25rem; font-weight: 600 } .tiles span { color: var(--soft) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); gap: 1rem }
figure { margin: 0 } svg { width: 100%; height: auto }
svg text { font-family: system-ui, sans-serif !important }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
td, th { text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--line);
vertical-align: top; overflow-wrap: anywhere; font-variant-numeric: tabular-nums }
th { font-weight: 500 } .wide td, .wide th { overflow-wrap: normal } td.n, th.n { text-align: right }
.bar { display: flex; height: 1.5rem; margin: .2rem 0 .4rem; border-radius: 3px; overflow: hidden }
.bar i { display: block } .key { display: inline-block; margin-right: 1rem; font-size: .85rem }
.key i { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .35rem }
.grid .took { fill: var(--c0) } .grid .lost { fill: var(--c1) } .grid .away { fill: var(--line) }
@media print { body { max-width: none; font-size: 11px } figure, table { break-inside: avoid }
* { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
</style></head><body>
$body
</body></html>
""")


def page(title: str, parts: Iterable[str]) -> str:
    def variables(colours: Sequence[str]) -> str:
        return " ".join(f"--c{n}: {c};" for n, c in enumerate(colours))

    light, dark = variables([c.lower() if c != "#000000" else "#444444" for c in COLOURS]), variables(_DARK)
    return _PAGE.substitute(title=escape(title), light=light, dark=dark, body="\n".join(filter(None, parts)))


def section(title: str, *parts: str) -> str:
    """'' if it would be empty."""
    body = "\n".join(filter(None, parts))
    return f"<h2>{escape(title)}</h2>\n{body}" if body else ""


def charts(*drawn: str) -> str:
    found = "".join(f"<figure>{svg}</figure>" for svg in drawn if svg)
    return f'<div class="charts">{found}</div>' if found else ""


def tiles(values: Mapping[str, str]) -> str:
    cells = (f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in values.items())
    return f'<div class="tiles">{"".join(cells)}</div>'


def pairs(values: Mapping[str, object]) -> str:
    """A table of names and values; nested names are joined with a point."""
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>" if rows else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        made = (
            f'<{tag} class="{"n" if n >= numbers_from else "t"}">{escape(c)}</{tag}>'
            for n, c in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table>{line("th", heads)}{body}</table></div>'


def stack(title: str, parts: Mapping[str, int]) -> str:
    """One bar of parts, with its key."""
    total = sum(parts.values())
    if not total:
        return ""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    colours = [
        f"background: var(--c{n % 8}); opacity: {1 - 0.35 * (n // 8 % 3)}" for n in range(len(ordered))
    ]
    bar = "".join(
        f'<i style="width: {100 * n / total:.3f}%; {c}" title="{escape(name)}"></i>'
        for (name, n), c in zip(ordered, colours, strict=True)
    )
    key = " ".join(
        f'<span class="key"><i style="{c}"></i>{escape(name)} {n:,} ({n / total:.1%})</span>'
        for (name, n), c in zip(ordered, colours, strict=True)
    )
    return f'<p><b>{escape(title)}</b> {total:,} bytes</p><div class="bar">{bar}</div><p>{key}</p>'


def save(path: Path, text: str) -> None:
    """Errors: DiskError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise DiskError(f"cannot write {path}: {e.strerror}") from None
