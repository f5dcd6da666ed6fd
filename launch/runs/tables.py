"""A run's metrics.jsonl and ledger.csv as tables and curves. pandas is imported only to make a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.errors import DataError, UsageError
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


@dataclass(frozen=True)
class Curve:
    """A run's metrics.jsonl: one mapping per evaluated round, in ascending order."""

    lines: tuple[dict[str, Any], ...]

    def rounds(self) -> list[int]:
        return [line["round"] for line in self.lines]

    def has(self, name: str) -> bool:
        """Return True if metric(name) has a value; simulated and J need one in every round from 1."""
        if name not in ("simulated", "J"):
            return name in SUMS or any(line.get(name) is not None for line in self.lines)
        (key,) = SUMS[name]
        timed = all(key in line for line in self.lines if line["round"])
        return timed and every_round(self.rounds())

    def metric(self, name: str) -> list[float]:
        """Return one value per evaluated round, cumulative for SUMS, and NaN for a missing one."""
        if name in SUMS:
            scale, total, out = 1e-6 if name.startswith("MB") else 1.0, 0.0, []
            for line in self.lines:
                total += sum(line.get(key) or 0 for key in SUMS[name])
                out.append(total * scale)
            return out
        values = [line.get(name) for line in self.lines]
        if all(v is None for v in values) and not any(name in line for line in self.lines):
            known = sorted({key for line in self.lines for key in line})
            raise UsageError(f"no metric {name!r} in this run (it has {', '.join(known)})")
        if any(isinstance(v, list) for v in values):
            raise UsageError(f"{name!r} is no number: it is a list in every line of metrics.jsonl")
        return [math.nan if v is None else float(v) for v in values]
