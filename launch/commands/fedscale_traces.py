"""fedsim devices capacity, availability: FedScale's two traces of devices, as this project's files.

FedScale keeps them as pickled dicts, which are not read here; a JSON export of them is. Their keys are
clients, in the order of the file:

    client_device_capacity   {"computation": milliseconds per inference, "communication": kbit per second}
    client_behave_trace      {"active": [s, ...], "inactive": [s, ...], "finish_time": s, "duration", "model"}

Source: Lai et al. 2022, FedScale, https://arxiv.org/abs/2105.11367, and its documentation of both formats in
https://github.com/SymbioticLab/FedScale. Differs: whether a client is there depends on the time alone, not on
the times that were asked for before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from fedsim.client_devices import parse_time
from fedsim.errors import DataError, UsageError
from fedsim.seeds import RandomStream
from fedsim.user_files import read_text
from launch.commands.device_files import cell, write_csv

KBIT = 1000.0
"""Bits."""


def capacity(file: Path, out: Path, *, clients: int | None, passes: float) -> None:
    """Write the file of devices; passes: how many inferences the training on one example takes.

    Raises:
        UsageError: If the export cannot be read.
        DataError: If it has another form.
        DiskError: If the file cannot be written.
    """
    entries = _entries(file)
    cells = [_device(file, name, entry, passes) for name, entry in entries.items()]
    many = len(cells) if clients is None else clients
    rows = ((k, *cells[k % len(cells)]) for k in range(many))
    write_csv(out, ("client", "compute", "up", "down"), rows)


def _device(file: Path, name: str, entry: Mapping[str, Any], passes: float) -> tuple[str, str, str]:
    """The cells compute, up and down."""
    latency, rate = (_positive(file, name, entry, key) for key in ("computation", "communication"))
    both = cell("up", rate * KBIT)
    return cell("compute", passes * latency / 1e3), both, both


def availability(
    file: Path,
    out: Path,
    *,
    clients: int | None,
    rounds: int,
    every: str,
    per_round: int | None,
    seed: int,
) -> None:
    """Write the trace of participation.

    Args:
        file: The export.
        out: The trace.
        clients: How many clients; by default, as many as the export has.
        rounds: How many rounds.
        every: The time from round to round; round 1 is at time 0.
        per_round: How many of those who are there take part, at most; by default, all of them.
        seed: Of their draw.

    Raises:
        UsageError: If an argument is wrong or the export cannot be read.
        DataError: If it has another form, or nobody is ever there.
        DiskError: If the file cannot be written.
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
    """When a client is there: from active[i] to inactive[i], again and again after finish_time."""

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
    """The export's entries by client, at least one."""
    try:
        with file.open("rb") as start:
            no_json = start.read(1) == b"\x80"  # as a pickle begins
        content = None if no_json else json.loads(read_text(file))
    except OSError as e:
        raise UsageError(f"{file}: {e.strerror}") from None
    except ValueError:
        no_json = True
    if no_json:
        raise DataError(
            f"{file} is no JSON. FedScale's own file is a pickle, which is not read: export it first "
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
    raise DataError(f"{file}, client {name}: {key} is {value!r}, and no number above 0")


def _times(file: Path, name: str, entry: Mapping[str, Any], key: str) -> list[float]:
    values = entry.get(key)
    if isinstance(values, list) and all(_is_number(value) for value in values):
        return [float(value) for value in values]
    raise DataError(f"{file}, client {name}: {key} is no list of seconds")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
