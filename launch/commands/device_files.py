"""Writers of fedsim devices: files of devices and of participation, from random draws or FedScale's traces.

FedScale keeps its traces as pickled dicts. This module reads a JSON export of the dicts, but no pickles. The
keys of a dict are clients, in the order of the file. The values are:

    client_device_capacity   {"computation": milliseconds per inference, "communication": kbit per second}
    client_behave_trace      {"active": [s, ...], "inactive": [s, ...], "finish_time": s, "duration", "model"}

Source: Lai et al. 2022, FedScale, https://arxiv.org/abs/2105.11367, and its documentation of both formats in
https://github.com/SymbioticLab/FedScale. Differs: the availability of a client at a time does not depend on
earlier queries.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from fedsim.client_devices import computer, parse_time, parse_value
from fedsim.errors import DataError, UsageError, unknown
from fedsim.seeds import RandomStream
from fedsim.specs import number
from fedsim.user_files import read_text
from launch.terminal import output_file

UNITS = {"up": (1.0, "bit"), "down": (1.0, "bit")} | dict.fromkeys(("rtt", "jitter", "compute"), (1e3, "ms"))
"""By column, the factor and the unit with which values are written; other columns have no unit."""
DIGITS = 4
"""Significant digits. With so few, many cells have the same text, which the reader parses only once."""


def cell(column: str, value: float) -> str:
    """Format a value in bits per second, seconds or joules as fedsim.client_devices reads it."""
    factor, unit = UNITS.get(column, (1.0, ""))
    number = np.format_float_positional(
        value * factor, precision=DIGITS, unique=False, fractional=False, trim="-"
    )
    return f"{number}{unit}"


def write_csv(out: Path, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a file whose cells have no commas."""
    with output_file(out) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as file:
        file.write(",".join(heads) + "\n")
        file.writelines(",".join(map(str, row)) + "\n" for row in rows)


# ---- drawn from distributions

WIDEST = 10
"""The largest SIGMA. With it, two thirds of the clients are within a factor of 22,000 of the median."""
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
    """Draw the devices and write their file.

    seed: the seed of the random draws. source: a name of SOURCES; its columns are used unless `columns`
    overrides them. spread: the SIGMA of columns that do not state one. noise: the value of the column noise,
    the same for all clients. columns: MEDIAN[,SIGMA] by column.
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
    """Return the column's cells, one per client."""
    where = f"--{column.replace('_', '-')}"
    median, comma, after = text.partition(",")
    sigma = number(after) if comma else spread
    if not 0 <= sigma <= WIDEST:
        raise UsageError(f"{where} {text}: write MEDIAN,SIGMA, with a SIGMA from 0 to {WIDEST}, such as 0.8")
    middle = computer(median, where).seconds if column == "compute" else parse_value(column, median, where)
    z = RandomStream(seed, "devices").numpy(column).standard_normal(clients)
    return (cell(column, value) for value in (middle * np.exp(sigma * z)).tolist())


# ---- read from FedScale's traces


def capacity(file: Path, out: Path, *, clients: int | None, passes: float) -> None:
    """Write the file of devices. passes: the cost of training on one example, in inferences."""
    entries = _entries(file)
    cells = [_device(file, name, entry, passes) for name, entry in entries.items()]
    many = len(cells) if clients is None else clients
    rows = ((k, *cells[k % len(cells)]) for k in range(many))
    write_csv(out, ("client", "compute", "up", "down"), rows)


def _device(file: Path, name: str, entry: Mapping[str, Any], passes: float) -> tuple[str, str, str]:
    latency, rate = (_positive(file, name, entry, key) for key in ("computation", "communication"))
    both = cell("up", rate * 1000.0)
    return cell("compute", passes * latency / 1e3), both, both


def availability(
    file: Path, out: Path, *, clients: int | None, rounds: int, every: str, per_round: int | None, seed: int
) -> None:
    """Write the trace of participation.

    clients: the number of clients; by default, that of the export. every: the time from round to round;
    round 1 is at time 0. per_round: the maximum number of clients in a round, drawn from the available ones;
    by default, all available clients take part.
    """
    step = parse_time(every, "--every")
    entries = [_Presence(file, name, entry) for name, entry in _entries(file).items()]
    many = len(entries) if clients is None else clients

    def taking_part(round: int) -> npt.NDArray[np.int64]:
        there = np.array([presence.at((round - 1) * step) for presence in entries])
        ids = np.flatnonzero(there[np.arange(many) % len(entries)])
        if per_round is None or len(ids) <= per_round:
            return ids
        draws = RandomStream(seed, "availability", round).numpy("uniform")
        return np.sort(draws.choice(ids, per_round, replace=False))

    rows = [(round, k) for round in range(1, rounds + 1) for k in taking_part(round).tolist()]
    if not rows:
        raise DataError(f"{file}: no client is there in any of the rounds 1 to {rounds}, every {every}")
    write_csv(out, ("round", "client"), rows)


class _Presence:
    """The availability of a client: from active[i] to inactive[i], repeated after finish_time."""

    def __init__(self, file: Path, name: str, entry: Mapping[str, Any]) -> None:
        self._finish = _positive(file, name, entry, "finish_time")
        begin, end = (_times(file, name, entry, key) for key in ("active", "inactive"))
        if len(begin) != len(end):
            raise DataError(
                f"{file}, client {name}: {len(begin)} times of active and {len(end)} of inactive; each "
                "active[i] needs its inactive[i]"
            )
        self._begin, self._end = np.array(begin), np.array(end)

    def at(self, seconds: float) -> bool:
        now = seconds % self._finish
        return bool(((self._begin <= now) & (now <= self._end)).any())


def _entries(file: Path) -> dict[str, Mapping[str, Any]]:
    """Read the entries of the export by client; raise DataError if there are none."""
    try:
        with file.open("rb") as start:
            no_json = start.read(1) == b"\x80"  # the first byte of a pickle
        content = None if no_json else json.loads(read_text(file))
    except OSError as e:
        raise UsageError(f"{file}: {e.strerror}") from None
    except ValueError:
        no_json = True
    if no_json:
        raise DataError(
            f"{file} is not JSON. FedScale's own file is a pickle, which is not read: export it first "
            "(docs/devices.md)"
        )
    if not isinstance(content, dict) or not content:
        raise DataError(f"{file} is no object with an entry per client")
    for name, entry in content.items():
        if not isinstance(entry, dict):
            raise DataError(f"{file}, client {name}: {entry!r} is no object")
    return content


def _positive(file: Path, name: str, entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    if _is_number(value) and 0 < value < math.inf:
        return float(value)
    raise DataError(f"{file}, client {name}: {key} is {value!r}; it must be a number above 0")


def _times(file: Path, name: str, entry: Mapping[str, Any], key: str) -> list[float]:
    values = entry.get(key)
    if isinstance(values, list) and all(_is_number(value) for value in values):
        return [float(value) for value in values]
    raise DataError(f"{file}, client {name}: {key} is no list of seconds")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
