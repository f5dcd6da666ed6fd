"""A user's own split, FILE.py:NAME: a function (targets, clients, seed) that returns every client's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim import plugins
from fedsim.errors import UsageError

OPTION = "--partition"


def users_partition(
    spec: str, targets: npt.NDArray[Any], clients: int, seed: int, fraction: float
) -> tuple[npt.NDArray[np.int64], ...]:
    """Training-row indices of every client, as the user's function divides them.

    Raises:
        UsageError: if the function fails, or if what it returns is no split.
    """
    split, owner = plugins.load(spec, OPTION), f"{OPTION} {plugins.short(spec)}"
    if not callable(split):
        raise UsageError(f"{owner} is a {type(split).__name__}; name a function (targets, clients, seed)")
    if fraction < 1:
        raise UsageError(f"{owner} divides the rows itself; fraction must be 1")
    results = []
    for _ in range(2):
        readable = targets.view()
        readable.setflags(write=False)
        with plugins.user_code_errors(spec, OPTION, f"calling it for {clients} clients"):
            parts = list(split(readable, clients, seed))
            if masked := [k for k, rows in enumerate(parts) if np.ma.is_masked(rows)]:
                raise UsageError(f"{owner}: client {masked[0]} has masked rows; return the others alone")
            results.append([np.asarray(rows) for rows in parts])
    first, second = results
    if len(first) != clients:
        raise UsageError(f"{owner} returns rows of {len(first)} clients; there are {clients}")
    for k, rows in enumerate(first):
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or not rows.size:
            raise UsageError(
                f"{owner}: client {k} needs at least one row, as a row of whole numbers; it has an array of "
                f"shape {rows.shape} and dtype {rows.dtype}"
            )
        if rows.min() < 0 or rows.max() >= len(targets):
            raise UsageError(f"{owner}: client {k} has rows outside 0 .. {len(targets) - 1}")
        if len(np.unique(rows)) < len(rows):
            raise UsageError(f"{owner}: client {k} has a row twice")
    if len(first) != len(second) or not all(map(np.array_equal, first, second)):
        raise UsageError(
            f"{owner} returned another split when it was called again; draw from "
            "numpy.random.default_rng(seed)"
        )
    return tuple(rows.astype(np.int64) for rows in first)
