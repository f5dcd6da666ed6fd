"""Where the bytes of one run went: by field, layer and codec, and by client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas

from launch.display import on_the_clock
from launch.results import html
from launch.results.field_bars import ordered, stack
from launch.results.groups import ComparedRun
from launch.results.statistics import sides
from launch.results.tables import NONE
from launch.runs.reader import Run

SPENT = {
    "seconds, simulated": "client_seconds",
    "waits, s": "client_waits",
    "holds up, s": "client_holds",
    "J": "client_joules",
}
"""The lists of summary.json's `devices`, by the heads of their columns."""
MOST_CLIENTS = 60
"""Clients of the table; of more, those with the most and the fewest bytes."""


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


def _part(field: str, layer: str) -> str:
    return " ".join(filter(None, (field, layer)))


def units(run: Run) -> str:
    """Per client and round, in units of P, and once per client."""
    own = ComparedRun(run)

    def both(once: bool) -> str:
        return ", ".join(f"{own.units(side, once):.3f} P {side}" for side in ("down", "up"))

    once = any(own.units(side, once=True) for side in ("down", "up"))
    return html.soft(f"Per client and round: {both(False)}." + (f" Once per client: {both(True)}." * once))


def clients(
    rows: pandas.DataFrame, experiment: Mapping[str, Any], summary: Mapping[str, Any]
) -> Iterator[str]:
    """Of every client: its examples, the rounds in which it took part and in which its upload was folded,
    its bytes, and what it spends on the virtual clock, if there is one. An unfinished run's rounds are those
    of the ledger."""
    count = len(experiment.get("client_sizes") or ()) or int(experiment["clients"])
    by = sides(rows[rows.client >= 0], ["client"]).reindex(range(count), fill_value=0)
    sent = rows[(rows["round"] > 0) & (rows.direction == "down") & (rows.client >= 0)]
    counted = sent.groupby("client")["round"].nunique().reindex(range(count), fill_value=0)
    took_part = summary.get("took_part") or [int(n) for n in counted]
    folded, sizes = summary.get("folded") or [], experiment.get("client_sizes") or []
    shown = list(range(count))
    if count > MOST_CLIENTS:
        ranked = sorted(shown, key=lambda k: -int(by.loc[k].sum()))
        half = MOST_CLIENTS // 2
        shown = [*ranked[:half], *ranked[-half:]]
    devices = summary.get("devices") or {}
    spent = {title: devices[key] for title, key in SPENT.items() if key in devices}
    lines = [
        [
            *(str(k), _at(sizes, k), _at(took_part, k), _at(folded, k)),
            *(f"{by[side][k]:,}" for side in ("down", "up")),
            *(f"{values[k]:,.4g}" for values in spent.values()),
        ]
        for k in shown
    ]
    heads = ["client", "examples", "took part in rounds", "upload folded", "bytes down", "bytes up", *spent]
    total = by.sum(axis=1)
    yield html.soft(
        f"{count:,} clients; bytes of a client, both directions: {int(total.min()):,} to "
        f"{int(total.max()):,}, {total.mean():,.0f} on average."
    )
    if devices:
        yield html.soft(f"On the {on_the_clock(devices)}.{_waits(devices)}")
    cut = f", the {half} with the most and the {half} with the fewest bytes" if count > MOST_CLIENTS else ""
    yield html.folded(f"Table of clients{cut}", html.table(heads, lines, 0), opened=count <= 20)


def _waits(devices: Mapping[str, Any]) -> str:
    """Who waited for whom: how long clients that had answered waited, and for whom the most."""
    holds = devices.get("client_holds") or []
    if not holds and devices.get("client_waits_total"):
        return f" Uploads lay in the buffer for {devices['client_waits_total']:,.4g} s in all."
    if not any(holds):
        return ""
    most = max(range(len(holds)), key=lambda k: holds[k])
    return (
        f" Clients that had answered waited for {devices['client_waits_total']:,.4g} s in all. "
        f"For {devices['client_holds_total']:,.4g} s of the run one client alone was waited for, of which "
        f"for client {most} {holds[most]:,.4g} s."
    )


def _at(values: Sequence[int], k: int) -> str:
    return f"{values[k]:,}" if k < len(values) else NONE
