"""The splits by name: `partition("two_dirichlet:1,0.5", ...)` divides the training rows among clients."""

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
from fedsim.errors import DataError, UsageError
from fedsim.specs import Form, number, parse

OPTION = "--partition"
_WITHOUT_CLASSES = ("iid", "natural")

_CREDIT_CLIENTS = {name: len(table) for name, table in splits.CREDIT_TABLES.items()}


@dataclass(frozen=True)
class PartitionInfo:
    """One line of `fedsim list partitions`.

    arguments     what may follow the name after a colon, in the notation of an error message
    defaults      the values of arguments left out; an argument without one must be given
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
        "by the data set's own clients (flamby_heart: 4 hospitals, emnist62: 3400 writers, ...); with "
        "fewer --clients, the first of them",
    ),
    PartitionInfo(
        "pachinko",
        "cifar100, two-step LDA: 100 rows per client, coarse classes ~ Dir(0.1), fine ones ~ Dir(10)",
        ("COARSE_ALPHA", "FINE_ALPHA", "ROWS"),
        (0.1, 10.0, 100.0),
    ),
    PartitionInfo("credit_het", "uci_credit, 10 clients, 6 % or 67 % positive, 36 or 67 rows"),
    PartitionInfo("credit_hom", "uci_credit, 10 clients alike, 51 or 52 rows"),
    PartitionInfo("credit_two", "uci_credit, 2 clients alike, 260 rows"),
)

PARTITIONS: Mapping[str, PartitionInfo] = MappingProxyType({info.name: info for info in _ALL})

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
    """Training-row indices (int64) of every client, in the order the client sees them.

    spec       NAME or NAME:ARGUMENTS of PARTITIONS
    targets    (n,) labels 0..classes-1 of all training rows; targets that are not classes are (n, ...),
               and only `iid` and `natural` can divide them
    fraction   how much of the training data is used at all, in (0, 1]
    centres    (n,) natural client of every row, for `natural`

    A pure function of its arguments. No client is empty; no two clients share a row, except in
    `two_classes` when a class runs out.

    Raises:
        UsageError: If the spec or another argument does not fit.
        DataError: If a client would get no rows.
    """
    if plugins.is_spec(spec):
        return _users_partition(spec, targets, clients, seed, fraction)
    info, arguments = _parse(spec)
    _check(info, targets, classes, clients, seed, fraction)
    if info.name == "pachinko":
        _check_cifar100(targets, classes, clients, _rows(info, arguments[-1]))
    if clients > len(targets) and info.name != "two_classes":  # whose clients may share rows
        raise DataError(
            f"--clients {clients}: {clients:,} clients cannot divide {len(targets):,} training examples: use "
            "fewer clients"
        )
    rng = np.random.RandomState(seed)
    name = info.name
    if name == "iid":
        split = splits.iid(rng, len(targets), clients, fraction)
    elif name == "two_dirichlet":
        split = splits.two_dirichlet(rng, targets, classes, clients, fraction, *arguments)
    elif name == "dirichlet":
        split = splits.dirichlet(rng, targets, classes, clients, fraction, *arguments)
    elif name == "two_classes":
        split = splits.two_classes(rng, targets, classes, clients, _rows(info, arguments[0]))
    elif name == "natural":
        split = splits.natural(rng, _centres(centres, len(targets), clients), clients, fraction)
    elif name == "pachinko":
        coarse_alpha, fine_alpha, points = arguments
        split = splits.pachinko(rng, targets, clients, coarse_alpha, fine_alpha, _rows(info, points))
    else:
        split = splits.by_table(rng, targets, splits.CREDIT_TABLES[name])
    for k, rows in enumerate(split):
        if len(rows) == 0:
            raise DataError(
                f"partition {spec!r} with seed {seed} leaves client {k} of {clients} (counted from "
                f"0) without training examples; use fewer clients, another seed, more of the data "
                "(fraction), or another partition such as 'iid'"
            )
    return split


def _parse(spec: str) -> tuple[PartitionInfo, tuple[float, ...]]:
    """The partition of a spec `NAME:1,0.5` and all its arguments, positive and finite."""
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
    if fraction < 1 and (info.name in ("two_classes", "pachinko") or info.name in _CREDIT_CLIENTS):
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


def _check_cifar100(targets: npt.NDArray[Any], classes: int, clients: int, points: int) -> None:
    if classes != len(splits.CIFAR100_COARSE):
        raise UsageError(f"partition 'pachinko' is for 'cifar100' (100 fine classes), not {classes} classes")
    if clients * points > len(targets):
        raise UsageError(
            f"partition 'pachinko' gives {clients} clients {points} rows each, and there are "
            f"{len(targets)}; use fewer clients or rows (pachinko:0.1,10,ROWS)"
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


# ---- a user's own split


def _users_partition(
    spec: str, targets: npt.NDArray[Any], clients: int, seed: int, fraction: float
) -> tuple[npt.NDArray[np.int64], ...]:
    """The rows of every client by FILE.py:NAME, a function (targets, clients, seed) that returns them."""
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
