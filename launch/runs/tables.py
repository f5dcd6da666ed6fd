"""A run's metrics.jsonl and ledger.csv as tables. pandas is imported only to make a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.errors import DataError
from fedsim.wire.ledger_rows import COLUMNS, TREE_COLUMNS

if TYPE_CHECKING:
    import pandas

TEXT = ("kind", "direction", "message", "field", "layer", "codec", "hop")
SUMS = {
    "MB": ("bytes_down", "bytes_up"),
    "MB up": ("bytes_up",),
    "MB down": ("bytes_down",),
    "MB edge up": ("edge_bytes_up",),
    "MB edge down": ("edge_bytes_down",),
    "simulated": ("simulated_seconds",),
    "J": ("joules",),
}
"""Names of cumulative sums, and the keys of metrics.jsonl whose values each sum adds."""


def metrics_frame(lines: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Return a table with one row per evaluated round; MB_down, MB_up and MB are cumulative."""
    import pandas

    frame = pandas.DataFrame(list(lines))
    for side in ("down", "up"):
        frame[f"MB_{side}"] = frame[f"bytes_{side}"].cumsum() / 1e6 if len(frame) else []
    frame["MB"] = frame["MB_down"] + frame["MB_up"]
    return frame


def ledger_frame(path: Path, written: bytes, last: int | None, sums: Any) -> pandas.DataFrame:
    """Return the rows of a ledger.csv up to round `last` (None: all rows).

    `written` is the file's content. `sums` is the entry "bytes" of summary.json; if it is a dictionary,
    the rows must add up to it. Raise DataError if the file is damaged, or the sums differ.
    """
    import numpy
    import pandas

    whole = BytesIO(written[: written.rfind(b"\n") + 1])
    types = {name: "str" if name in TEXT else "int64" for name in TREE_COLUMNS}
    try:
        with numpy.errstate(invalid="raise"):
            frame = pandas.read_csv(whole, dtype=types, keep_default_na=False)
    except (ValueError, ArithmeticError) as e:
        raise DataError(f"{path} is damaged: {' '.join(str(e).split())}") from None
    if tuple(frame.columns) not in (COLUMNS, TREE_COLUMNS):
        raise DataError(f"{path} has the columns {', '.join(frame.columns)}; {', '.join(COLUMNS)} are due")
    if not frame.direction.isin(("down", "up")).all():
        raise DataError(f"{path} is damaged: a direction is neither down nor up")
    if last is not None:
        frame = frame[frame["round"] <= last]
    if other := differing_sum(frame, sums):
        raise DataError(f"{path} and summary.json do not belong together: {other}")
    return frame


def differing_sum(ledger: pandas.DataFrame, summed: Any) -> str:
    """Describe the first sum of a ledger that differs from `bytes` in summary.json; '' if none does."""
    if not isinstance(summed, dict):
        return ""
    in_summary: dict[Any, Any] = {}
    try:
        for kind, sides in summed.items():
            for side, named in sides.items():
                in_summary |= {
                    (kind, side, name, layer): n for name, of in named.items() for layer, n in of.items()
                }
    except AttributeError:
        return "its `bytes` are no sums by kind, direction, field and layer"
    in_ledger = ledger.groupby(["kind", "direction", "field", "layer"])["bytes"].sum().to_dict()
    for key in sorted(in_summary.keys() | in_ledger.keys()):
        if in_summary.get(key, 0) != in_ledger.get(key, 0):
            what = ", ".join(part for part in key if part)
            return (
                f"{what} has {in_ledger.get(key, 0):,} bytes, and the summary says {in_summary.get(key, 0)}"
            )
    return ""


def every_round(rounds: Sequence[int]) -> bool:
    """Return True if no round is missing, so that a sum over the evaluated rounds is complete."""
    return list(rounds) == list(range(len(rounds)))


def metrics_table(lines: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a table with a row per evaluated round (the index) and a column per number of metrics.jsonl,
    with NaN for a missing one, and per sum of SUMS and LIMITS so far. Lists are left out."""
    import numpy
    import pandas

    rows = [{k: x for k, x in line.items() if x is None or isinstance(x, int | float)} for line in lines]
    table = pandas.DataFrame(rows, pandas.Index([line["round"] for line in lines], name="round"), dtype=float)
    for name, keys in SUMS.items():
        spent = sum(table[key].fillna(0.0).to_numpy() if key in table else 0.0 for key in keys)
        scale = 1e-6 if name.startswith("MB") else 1.0
        table[name] = scale * numpy.cumsum(spent + numpy.zeros(len(table)))
    for name, limit in LIMITS.items():
        table[name] = 1e-6 * numpy.cumsum([limit(line) if line["round"] else 0.0 for line in lines])
    return table


def timed(table: pandas.DataFrame, name: str) -> bool:
    """Return whether a sum of seconds or joules is complete: each round from 1 has a value."""
    (key,) = SUMS[name]
    return key in table and bool(table[key][table.index > 0].notna().all()) and every_round(list(table.index))


def part_of(field: str, layer: str) -> str:
    """Return the name of a part of the bytes: mean, precision indices, header."""
    return layer if not field else field if layer == "values" else f"{field} {layer}"


def parts_of(traffic: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Return the bytes of one kind, as summary.json has them by direction, field and layer, by direction and
    part."""
    result: dict[str, Counter[str]] = {"down": Counter(), "up": Counter()}
    for side, named in traffic.items():
        for name, layers in named.items():
            for layer, n in layers.items():
                result[side][part_of(name, layer)] += n
    return result


def sides(rows: pandas.DataFrame, keys: list[str]) -> pandas.DataFrame:
    """Return the bytes of a ledger by `keys`, one column per direction."""
    table = rows.pivot_table(index=keys, columns="direction", values="bytes", aggfunc="sum", fill_value=0)
    return table.reindex(columns=["down", "up"], fill_value=0).astype("int64")


# ---- the limits of coding (docs/compression.md#lower-limits-of-the-size)
#
# A round measures one upload and its broadcast (fedsim.wire.limits). All bytes of a direction are scaled by
# the measured ratio, including headers and fields without a codec. A direction without coded fields, for
# example a first broadcast, counts in full.


def _entropy(line: Mapping[str, Any]) -> float:
    """Return the bytes, both directions, that a round would cost at the entropy of its fields."""
    total = 0.0
    for side in ("down", "up"):
        fields = (line.get("limits") or {}).get(side, {}).values()
        sent = sum(field["bits"] for field in fields)
        total += line[f"bytes_{side}"] * (sum(field["entropy"] for field in fields) / sent if sent else 1.0)
    return total


def _divergence(line: Mapping[str, Any]) -> float:
    """Return the bytes that a round's uploads would cost at the KL divergence of the measured upload. Every
    field has one value per parameter, so the sum of their bits per value is in bits per parameter."""
    limits = line.get("limits") or {}
    sent = sum(field["bits"] for field in limits.get("up", {}).values())
    return float(limits["kl"] / sent * line["bytes_up"]) if sent and "kl" in limits else math.nan


LIMITS = {"MB entropy": _entropy, "MB KL": _divergence}
"""Functions that return the bytes of one round: both directions at the zeroth-order entropy of their
integers; uploads at KL(q_k || q_g), the cost of a sample of the client's posterior. The sums are those of
every round."""
