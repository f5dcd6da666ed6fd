"""fedsim devices generate: the devices of clients, drawn from log-normal distributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedsim.client_devices import computer, parse_value
from fedsim.errors import UsageError, unknown
from fedsim.seeds import RandomStream
from fedsim.specs import number
from launch.commands.device_files import cell, write_csv

WIDEST = 10
"""The largest SIGMA: two of three clients are then within a factor of 22,000."""
SOURCES: Mapping[str, Mapping[str, str]] = {"lte": {"up": "6mbit", "down": "13mbit"}}
"""Published medians by name.

References:
    lte: Huang et al. 2012, A Close Examination of Performance and Power Characteristics of 4G LTE Networks,
    abstract: medians of 13 Mbps down and 6 Mbps up, https://doi.org/10.1145/2307636.2307658
"""


def generate(
    out: Path,
    *,
    clients: int,
    seed: int,
    source: str | None,
    spread: float,
    noise: float | None,
    **columns: str | None,
) -> None:
    """Write the file.

    Args:
        out: Its path.
        clients: How many clients.
        seed: Of the draws.
        source: A name of SOURCES, whose columns hold where `columns` has none.
        spread: SIGMA of the columns that say none.
        noise: The column noise, the same for all clients.
        **columns: MEDIAN[,SIGMA] by column.

    Raises:
        UsageError: If a value is wrong, or there is no column.
        DiskError: If the file cannot be written.
    """
    if source is not None and source not in SOURCES:
        raise unknown("source of --from", source, SOURCES)
    texts = {**(SOURCES[source] if source else {}), **{k: text for k, text in columns.items() if text}}
    if not texts:
        raise UsageError("devices generate: name a column, such as --up 6mbit,0.8, or --from lte")
    if noise is not None and "compute" not in texts:
        raise UsageError("devices generate: --noise is that of --compute")
    drawn = [list(_cells(column, text, spread, clients, seed)) for column, text in texts.items()]
    if noise is not None:
        drawn.append([f"{noise:g}"] * clients)
    heads = ("client", *texts, *(() if noise is None else ("noise",)))
    write_csv(out, heads, zip(range(clients), *drawn, strict=True))


def _cells(column: str, text: str, spread: float, clients: int, seed: int) -> Iterator[str]:
    """The column's cells, client after client."""
    where = f"--{column.replace('_', '-')}"
    median, comma, after = text.partition(",")
    sigma = number(after) if comma else spread
    if not 0 <= sigma <= WIDEST:
        raise UsageError(f"{where} {text}: write MEDIAN,SIGMA, with a SIGMA from 0 to {WIDEST}, such as 0.8")
    middle = computer(median, where).seconds if column == "compute" else parse_value(column, median, where)
    z = RandomStream(seed, "devices").numpy(column).standard_normal(clients)
    return (cell(column, value) for value in (middle * np.exp(sigma * z)).tolist())
