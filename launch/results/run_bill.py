"""The bytes of one run by field, layer and codec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas

from launch.results import html
from launch.results.field_bars import ordered, stack
from launch.results.groups import ComparedRun
from launch.results.statistics import sides
from launch.results.tables import NONE
from launch.runs.folder import RunFolder


def bytes_by_field(rows: pandas.DataFrame) -> Iterator[str]:
    """A bar per direction. rows: those of kind algorithm."""
    by = sides(rows, ["field", "layer"])
    for side, title in (("down", "Down"), ("up", "Up")):
        yield stack(title, {" ".join(filter(None, key)): int(n) for key, n in by[side].items() if n})


def bill(rows: pandas.DataFrame) -> Iterator[str]:
    """One line per field, layer and codec, with what the values would be without a codec."""
    keys = ["field", "layer", "codec"]
    by = sides(rows, keys)
    by["dense"] = rows.groupby(keys)["dense_bytes"].sum()
    places = {name: n for n, name in enumerate(ordered({_part(*key[:2]) for key in by.index}))}
    lines, compressed = [], False
    for (field, layer, codec), row in sorted(by.iterrows(), key=lambda item: places[_part(*item[0][:2])]):
        dense = f"{row['dense']:,}" if layer == "values" else NONE
        compressed = compressed or codec not in ("", "dense")
        cells = (f"{n:,}" for n in (row["down"], row["up"], row["down"] + row["up"]))
        lines.append([field or NONE, layer, codec or NONE, *cells, dense])
    down, up = int(by["down"].sum()), int(by["up"].sum())
    other = int(by[by.index.get_level_values("field") == ""][["down", "up"]].sum().sum())
    plain = int(by["dense"].sum()) + other
    lines.append(["total", "", "", f"{down:,}", f"{up:,}", f"{down + up:,}", f"{plain:,}"])
    heads = ["field", "layer", "codec", "bytes down", "bytes up", "bytes", "dense would be"]
    yield html.table(heads, lines, 3)
    if compressed and down + up:
        yield html.soft(
            f"Dense would be the values as they are, with today's headers and framing: "
            f"{plain / (down + up):.2f} times as much."
        )


def hops(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the bytes of each hop of a run with edge servers; nothing for another one."""
    spent = summary.get("bytes") or {}
    if "edge" not in spent:
        return
    lines = []
    for name, kind in (("clients and edge servers", "algorithm"), ("edge servers and server", "edge")):
        both = [sum(sum(of.values()) for of in spent[kind].get(side, {}).values()) for side in ("down", "up")]
        lines.append([name, *(f"{n:,}" for n in (*both, sum(both)))])
    yield html.table(["between", "bytes down", "bytes up", "bytes"], lines)
    yield html.soft("The bill above and the sums of this page are of the hop of the clients.")


def _part(field: str, layer: str) -> str:
    return " ".join(filter(None, (field, layer)))


def units(run: RunFolder) -> str:
    """Per client and round, in units of P, and once per client."""
    own = ComparedRun(run)

    def both(once: bool) -> str:
        return ", ".join(f"{own.units(side, once):.3f} P {side}" for side in ("down", "up"))

    once = any(own.units(side, once=True) for side in ("down", "up"))
    return html.soft(f"Per client and round: {both(False)}." + (f" Once per client: {both(True)}." * once))
