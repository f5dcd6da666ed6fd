"""Partitions by name: `partition("two_dirichlet:1,0.5", ...)` divides the training rows among clients.

The modifier +least:N may follow the name of a split: the smallest number of rows of a client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim import plugins
from fedsim.data import splits
from fedsim.data.own_partitions import users_split
from fedsim.errors import DataError, UsageError
from fedsim.partition_specs import PREFIX, PartitionSpec, is_file
from fedsim.specs import Form, number, parse

_WITHOUT_CLASSES = ("iid", "natural")

_CREDIT_CLIENTS = {name: len(table) for name, table in splits.CREDIT_TABLES.items()}


@dataclass(frozen=True)
class PartitionInfo:
    """One line of `fedsim list partitions`.

    arguments     arguments after the name and a colon, in the notation of error messages
    defaults      defaults of the last arguments; an argument without a default must be given
    """

    name: str
    description: str
    arguments: tuple[str, ...] = ()
    defaults: tuple[float, ...] = ()

    @property
    def form(self) -> Form:
        """The syntax of the partition's name."""
        return Form(self.name, self.arguments, len(self.defaults))

    @property
    def usage(self) -> str:
        """The partition with all its arguments."""
        return self.form.usage


_ALL = (
    PartitionInfo("iid", "all rows shuffled, equal sizes"),
    PartitionInfo(
        "two_dirichlet",
        "the papers' heterogeneous split: sizes ~ Dir(1), classes of each client ~ Dir(0.5); "
        "two_dirichlet:1e15,1e15 is their homogeneous one",
        ("SIZE_ALPHA", "CLASS_ALPHA"),
        (1.0, 0.5),
    ),
    PartitionInfo(
        "two_classes",
        "two classes per client, 300 rows of each (MNIST with 100 clients)",
        ("ROWS_PER_CLASS",),
        (300,),
    ),
    PartitionInfo("dirichlet", "every class divided over clients ~ Dir(ALPHA)", ("ALPHA",)),
    PartitionInfo(
        "natural",
        "by the data set's own clients (flamby_heart: 4 hospitals); with fewer --clients, the first of them",
    ),
    PartitionInfo(
        PREFIX.rstrip(":"),
        'as FILE.json or FILE.npz says: {"CLIENT": [ROW, ...], ...}, training rows counted from 0',
        ("FILE",),
    ),
    PartitionInfo("credit_het", "uci_credit, 10 clients, 6 % or 67 % positive, 36 or 67 rows"),
    PartitionInfo("credit_hom", "uci_credit, 10 clients alike, 51 or 52 rows"),
    PartitionInfo("credit_two", "uci_credit, 2 clients alike, 260 rows"),
)

PARTITIONS: Mapping[str, PartitionInfo] = MappingProxyType({info.name: info for info in _ALL})

MODIFIERS = {
    "...+least:N": "behind any of them: every client has N rows or more; natural leaves out other clients, "
    "two_dirichlet and dirichlet draw again",
}

TRIES = 100
"""Largest number of draws to find a split in which every client has at least N rows (+least:N)."""

_FORMS = {name: info.form for name, info in PARTITIONS.items()}


def partition(
    spec: str,
    *,
    targets: npt.NDArray[Any],
    classes: int,
    clients: int,
    seed: int,
    fraction: float = 1.0,
    centres: npt.NDArray[np.int64] | None = None,
) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the training-row indices (int64) of every client, in the order in which the client sees them.

    spec       NAME or NAME:ARGUMENTS of PARTITIONS, or FILE.py:NAME; +least:N may follow
    targets    (n,) labels 0..classes-1 of all training rows; targets that are not classes are (n, ...),
               and only `iid` and `natural` can divide them
    fraction   share of the training data that is used, in (0, 1]
    centres    (n,) natural client of every row, for `natural`

    The result depends only on the arguments. Every client has rows. Clients share no rows, except in
    `two_classes` when a class runs out, and in the split of a user's function.

    Raises:
        UsageError: If the spec or another argument does not fit.
        DataError: If a client would get no rows.
    """
    known = PartitionSpec.parse(spec)
    if is_file(known.split) or plugins.is_spec(known.split):
        return _checked(spec, users_split(known.split, targets, clients, seed, fraction), known.least, seed)
    info, arguments = _parse(known.split)
    _check(info, targets, classes, clients, seed, fraction)
    if clients > len(targets) and info.name != "two_classes":  # its clients may share rows
        raise DataError(
            f"--clients {clients}: {clients:,} clients cannot divide {len(targets):,} training examples: use "
            "fewer clients"
        )
    if known.least * clients > len(targets) and info.name != "two_classes":
        raise DataError(
            f"partition {spec!r}: {clients:,} clients with {known.least:,} rows each need more than the "
            f"{len(targets):,} training examples"
        )
    rng = np.random.RandomState(seed)
    if info.name == "natural":
        centres = _large_centres(_centres(centres, len(targets), clients), clients, fraction, known.least)
        return _checked(spec, splits.natural(rng, centres, clients, fraction), known.least, seed)
    again = known.least > 1 and info.name in ("two_dirichlet", "dirichlet")
    for _ in range(TRIES if again else 1):
        split = _drawn(rng, info, arguments, targets, classes, clients, fraction)
        if min(map(len, split)) >= known.least:
            return split
    return _checked(spec, split, known.least, seed, f", in the last of {TRIES} draws" if again else "")


def _drawn(
    rng: np.random.RandomState,
    info: PartitionInfo,
    arguments: tuple[float, ...],
    targets: npt.NDArray[Any],
    classes: int,
    clients: int,
    fraction: float,
) -> tuple[npt.NDArray[np.int64], ...]:
    name = info.name
    if name == "iid":
        return splits.iid(rng, len(targets), clients, fraction)
    if name == "two_dirichlet":
        return splits.two_dirichlet(rng, targets, classes, clients, fraction, *arguments)
    if name == "dirichlet":
        return splits.dirichlet(rng, targets, classes, clients, fraction, *arguments)
    if name == "two_classes":
        return splits.two_classes(rng, targets, classes, clients, _rows(info, arguments[0]))
    return splits.by_table(rng, targets, splits.CREDIT_TABLES[name])


def _checked(
    spec: str, split: tuple[npt.NDArray[np.int64], ...], least: int, seed: int, drawn: str = ""
) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the split after checking that every client has enough rows. drawn: more text for the error."""
    for k, rows in enumerate(split):
        if len(rows) == 0:
            raise DataError(
                f"partition {plugins.short(spec)!r} with seed {seed} leaves client {k} of {len(split)} "
                "(counted from 0) without training examples; use fewer clients, another seed, more of the "
                "data (fraction), or another partition such as 'iid'"
            )
        if len(rows) < least:
            raise DataError(
                f"partition {plugins.short(spec)!r} with seed {seed} leaves client {k} of {len(split)} "
                f"(counted from 0) with {len(rows):,} of at least {least:,} rows{drawn}; use fewer clients, "
                "another seed, or a smaller number"
            )
    return split


def _parse(spec: str) -> tuple[PartitionInfo, tuple[float, ...]]:
    """Parse a spec such as `NAME:1,0.5` into a partition and all its arguments, positive and finite."""
    name, texts = parse(spec, "partition", _FORMS)
    info = PARTITIONS[name]
    values = tuple(number(text) for text in texts)
    for argument, text, value in zip(info.arguments, texts, values, strict=False):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"partition {spec!r}: {argument} must be a positive number, not {text!r}")
    missing = len(info.arguments) - len(values)
    return info, (*values, *info.defaults[len(info.defaults) - missing :])


def _check(
    info: PartitionInfo, targets: npt.NDArray[Any], classes: int, clients: int, seed: int, fraction: float
) -> None:
    if clients < 1:
        raise UsageError(f"there must be at least 1 client, not {clients}")
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed {seed}: must be a whole number from 0 to {2**32 - 1}")
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction must be above 0 and at most 1, not {fraction}")
    if targets.ndim == 0 or len(targets) == 0:
        raise UsageError(f"targets must be a row of labels, not an array of shape {targets.shape}")
    if targets.ndim > 1 and info.name not in _WITHOUT_CLASSES:
        raise UsageError(
            f"partition {info.name!r} divides examples by their class, and targets of this data set are not "
            "classes; use 'iid', or 'natural' where the data set has clients of its own"
        )
    if targets.ndim == 1 and (targets.min() < 0 or targets.max() >= classes):
        raise UsageError(f"a label lies outside 0 .. {classes - 1}")
    if fraction < 1 and (info.name == "two_classes" or info.name in _CREDIT_CLIENTS):
        raise UsageError(f"partition {info.name!r} fixes its sizes; fraction must be 1")
    if info.name == "two_classes" and classes < 2:
        raise UsageError("partition 'two_classes' needs at least 2 classes")
    if info.name in _CREDIT_CLIENTS:
        if classes != 2:
            raise UsageError(
                f"partition {info.name!r} is for 'uci_credit' (2 classes), not {classes} classes"
            )
        if clients != _CREDIT_CLIENTS[info.name]:
            raise UsageError(
                f"partition {info.name!r} is for {_CREDIT_CLIENTS[info.name]} clients, not {clients}"
            )


def _rows(info: PartitionInfo, value: float) -> int:
    if value != int(value):
        raise UsageError(f"{info.usage}: {info.arguments[-1]} must be a whole number, not {value:g}")
    return int(value)


def _centres(centres: npt.NDArray[np.int64] | None, examples: int, clients: int) -> npt.NDArray[np.int64]:
    if centres is None:
        raise UsageError(
            "partition 'natural' needs a data set with centres of its own, such as 'flamby_heart'"
        )
    if centres.shape != (examples,):
        raise UsageError(f"{len(centres)} centres do not fit {examples} targets")
    count = len(np.unique(centres))
    if centres.min() < 0 or int(centres.max()) + 1 != count:
        raise UsageError(f"centres must be numbered 0 .. {count - 1} without gaps")
    if clients > count:
        raise UsageError(
            f"partition 'natural' has one client per centre, and there are {count}: at most {count} clients, "
            f"not {clients}"
        )
    return np.asarray(centres, dtype=np.int64)


def _large_centres(
    centres: npt.NDArray[np.int64], clients: int, fraction: float, least: int
) -> npt.NDArray[np.int64]:
    """Number the centres with at least `least` used rows from 0, and merge all others into a last centre."""
    kept = np.rint(fraction * np.bincount(centres)) >= least
    if least == 1 or kept.all():
        return centres
    if clients > kept.sum():
        raise UsageError(
            f"partition 'natural': {kept.sum()} of {len(kept)} centres have at least {least:,} rows, so "
            f"there are at most {kept.sum()} clients, not {clients}"
        )
    return np.where(kept, np.cumsum(kept) - 1, kept.sum())[centres]
