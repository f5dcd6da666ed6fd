"""Writes files of devices and of participation, a line per client or per client and round."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from launch.terminal import output_file

UNITS = {"up": (1.0, "bit"), "down": (1.0, "bit")} | dict.fromkeys(("rtt", "jitter", "compute"), (1e3, "ms"))
"""The factor and the unit in which a column is written; a column that is not here has none."""
DIGITS = 4
"""Significant digits: enough for a device, and few different texts for a reader."""


def cell(column: str, value: float) -> str:
    """A value in bits per second, seconds or joules, as fedsim.client_devices reads it."""
    factor, unit = UNITS.get(column, (1.0, ""))
    number = np.format_float_positional(
        value * factor, precision=DIGITS, unique=False, fractional=False, trim="-"
    )
    return f"{number}{unit}"


def write_csv(out: Path, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a file whose cells have no commas.

    Raises:
        UsageError: If the path is a folder.
        DiskError: If it cannot be written.
    """
    with output_file(out) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as file:
        file.write(",".join(heads) + "\n")
        file.writelines(",".join(map(str, row)) + "\n" for row in rows)
