"""A user's own split: a function (targets, clients, seed), or a mapping from clients to rows.

    FILE.py:NAME     the function or the mapping NAME
    rows:FILE.json   {"CLIENT": [ROW, ...], ...}
    rows:FILE.npz    one array of rows for every client, under the client's name

Rows are indices of training rows, counted from 0, in the order in which the client sees them. If the names of
all clients are whole numbers, they must be 0 to K-1; otherwise clients are numbered by name in sorted order.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim import partition_specs, plugins
from fedsim.errors import DataError, FedsimError, UsageError
from fedsim.specs import whole
from fedsim.user_files import no_file, read_text

OPTION = "--partition"

Rows = npt.NDArray[np.int64]


def users_split(
    spec: str, targets: npt.NDArray[Any], clients: int, seed: int, fraction: float
) -> tuple[Rows, ...]:
    """Return the rows of every client, (n,) int64, as given by FILE.py:NAME or rows:FILE.

    Raises:
        UsageError: If NAME is not a split, the clients do not match, or two calls of a function differ.
        DataError: If a file cannot be read, or its rows do not fit the data.
    """
    owner = f"{OPTION} {plugins.short(spec)}"
    if fraction < 1:
        raise UsageError(f"{owner} divides the rows itself; fraction must be 1")
    if partition_specs.is_file(spec):
        return _of_mapping(
            _read(partition_specs.file_of(spec), owner), clients, len(targets), owner, DataError
        )
    split = plugins.load(spec, OPTION)
    if isinstance(split, Mapping):
        return _of_mapping(split, clients, len(targets), owner, UsageError)
    if not callable(split):
        raise UsageError(
            f"{owner} is a {type(split).__name__}; name a function (targets, clients, seed), or a mapping of "
            "clients to rows"
        )
    first, second = (_called(split, spec, targets, clients, seed, owner) for _ in range(2))
    if len(first) != clients:
        raise UsageError(f"{owner} returns rows of {len(first)} clients; there are {clients}")
    for k, rows in enumerate(first):
        _check(rows, f"client {k}", len(targets), owner, UsageError)
    if len(first) != len(second) or not all(map(np.array_equal, first, second)):
        raise UsageError(
            f"{owner} returned another split when it was called again; draw from "
            "numpy.random.default_rng(seed)"
        )
    return tuple(rows.astype(np.int64) for rows in first)


def _called(
    split: Any, spec: str, targets: npt.NDArray[Any], clients: int, seed: int, owner: str
) -> list[npt.NDArray[Any]]:
    """Call a user's function and return the rows of every client."""
    readable = targets.view()
    readable.setflags(write=False)
    with plugins.user_code_errors(spec, OPTION, f"calling it for {clients} clients"):
        parts = list(split(readable, clients, seed))
        if masked := [k for k, rows in enumerate(parts) if np.ma.is_masked(rows)]:
            raise UsageError(f"{owner}: client {masked[0]} has masked rows; return the others alone")
        return [np.asarray(rows) for rows in parts]


def _check(rows: npt.NDArray[Any], client: str, examples: int, owner: str, error: type[FedsimError]) -> None:
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size:
        raise error(
            f"{owner}: {client} needs at least one row, as a row of whole numbers; it has an array of "
            f"shape {rows.shape} and dtype {rows.dtype}"
        )
    if rows.min() < 0 or rows.max() >= examples:
        wrong = rows[(rows < 0) | (rows >= examples)][0]
        raise error(f"{owner}: {client} has rows outside 0 .. {examples - 1}, such as {wrong}")
    each, counts = np.unique(rows, return_counts=True)
    if (twice := each[counts > 1]).size:
        raise error(f"{owner}: {client} has a row twice: {twice[0]}")


# ---- clients and their rows


def _of_mapping(
    mapping: Mapping[Any, Any], clients: int, examples: int, owner: str, error: type[FedsimError]
) -> tuple[Rows, ...]:
    """Return the rows of every client in the order of client numbers; refuse a row with two clients."""
    names = _in_order([str(name) for name in mapping], owner, error)
    if len(names) != clients:
        raise UsageError(
            f"{owner} has rows of {len(names):,} clients, and --clients is {clients:,}: write --clients "
            f"{len(names)}"
        )
    values = {str(name): rows for name, rows in mapping.items()}
    split, client_of = [], np.full(examples, -1, dtype=np.int64)
    for k, name in enumerate(names):
        if np.ma.is_masked(values[name]):
            raise error(f"{owner}: client {name} has masked rows; leave them out")
        try:
            rows = np.asarray(values[name])
        except (ValueError, OverflowError):
            raise error(f"{owner}: client {name} needs its rows as one list of whole numbers") from None
        _check(rows, f"client {name}", examples, owner, error)
        if (taken := client_of[rows] >= 0).any():
            row = int(rows[taken.argmax()])
            raise error(
                f"{owner}: row {row} has two clients, {names[client_of[row]]} and {name}; only a function "
                "(FILE.py:NAME) may give a row to several"
            )
        client_of[rows] = k
        split.append(rows.astype(np.int64))
    return tuple(split)


def _in_order(names: Sequence[str], owner: str, error: type[FedsimError]) -> list[str]:
    """Sort the names of clients; names that are all whole numbers, 0 to K-1, are sorted by value."""
    if not names or len(set(names)) < len(names):
        raise error(f"{owner} has no clients" if not names else f"{owner} has a client twice")
    numbers = [whole(name) for name in names]
    if min(numbers) < 0:
        return sorted(names)
    missing = sorted(set(range(len(numbers))) - set(numbers))
    if missing:
        raise error(
            f"{owner} has no client {missing[0]}: its clients are whole numbers up to {max(numbers)}, so "
            f"they must be 0 to {len(numbers) - 1}"
        )
    return sorted(names, key=whole)


def _read(path: Path, owner: str) -> Mapping[str, Any]:
    if wrong := no_file(path):
        raise DataError(f"{owner}: {path} {wrong}")
    if path.suffix not in (".json", ".npz"):
        raise UsageError(f"{owner}: rows are read from FILE.json or FILE.npz")
    try:
        if path.suffix == ".npz":
            if not zipfile.is_zipfile(path):
                raise DataError(f"{owner} is no file that numpy.savez wrote")
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        read = json.loads(read_text(path), object_pairs_hook=lambda pairs: _once(pairs, owner))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, zipfile.BadZipFile) as e:
        raise DataError(f"{owner} cannot be read: {' '.join(str(e).split())[:300]}") from None
    if not isinstance(read, dict):
        raise DataError(f'{owner} must have clients and their rows: {{"0": [0, 5, 7], "1": [2, 3], ...}}')
    return read


def _once(pairs: Sequence[tuple[str, Any]], owner: str) -> dict[str, Any]:
    """Convert the pairs of a JSON object to a dict; refuse a repeated name."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise DataError(f"{owner}: client {name} is given twice")
        result[name] = value
    return result
