"""The arrays of a data set: dtypes and shapes, checks, and digest.

    likelihood    inputs (n, *shape)    targets
    categorical   float32, uint8, int32 (n,) int64, 0..C-1
    bernoulli     float32 or uint8      (n, C) uint8, 0 or 1
    token_classes int32 or int64 ids    (n, *shape) int64, -1..C-1 (-1: none)
    gaussian      float32 or uint8      (n, C) float32

The likelihoods are those of fedsim/learning/likelihoods.py. A reader of one file format makes the arrays, and
load_dataset checks them before they become a Dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fedsim.errors import DataError

Array = npt.NDArray[Any]

Arrays = dict[str, Array]
"""Mapping of train_inputs, train_targets, test_inputs, test_targets and, if there are any, centres.

It is a plain mapping because each entry becomes one file of the cache.
"""

EXACT = 1 << 24
"""The number up to which float32 represents all whole numbers."""

NO_TARGET = -1
"""The target of a place of a sequence that has none, and so no loss."""

REQUIRED = ("train_inputs", "train_targets", "test_inputs", "test_targets")


def bundle(
    train_inputs: Array,
    train_targets: Array,
    test_inputs: Array,
    test_targets: Array,
    centres: Array | None = None,
    targets: type[np.generic] = np.int64,
) -> Arrays:
    """Make arrays contiguous: inputs (n, *shape) as given, targets as dtype `targets`, centres (n,) int64."""
    arrays = {
        "train_inputs": np.ascontiguousarray(train_inputs),
        "train_targets": np.ascontiguousarray(train_targets, dtype=targets),
        "test_inputs": np.ascontiguousarray(test_inputs),
        "test_targets": np.ascontiguousarray(test_targets, dtype=targets),
    }
    if centres is not None:
        arrays["centres"] = np.ascontiguousarray(centres, dtype=np.int64)
    return arrays


# ---- checks


@dataclass(frozen=True)
class ArrayRules:
    """Allowed dtypes of one likelihood, and the smallest possible number of classes (outputs)."""

    inputs: tuple[str, ...]
    targets: str
    least: int


_NUMBERS = ("float32", "uint8")

ARRAY_RULES: Mapping[str, ArrayRules] = MappingProxyType(
    {
        "categorical": ArrayRules((*_NUMBERS, "int32"), "int64", 2),
        "bernoulli": ArrayRules(_NUMBERS, "uint8", 1),
        "token_classes": ArrayRules(("int32", "int64"), "int64", 2),
        "gaussian": ArrayRules(_NUMBERS, "float32", 1),
    }
)


def checked(
    owner: str, shape: tuple[int, ...], classes: int, arrays: Arrays, hint: str, likelihood: str
) -> Arrays:
    """Check that `arrays` fit each other, one input's shape, the classes and the likelihood; return them."""
    for part in ("train", "test"):
        inputs, targets = arrays[f"{part}_inputs"], arrays[f"{part}_targets"]
        if len(inputs) == len(targets) == 0:
            why = "trained" if part == "train" else "evaluated"
            raise DataError(f"{owner}: there are no {part} examples; a run is {why} on at least one")
        if inputs.shape[1:] != shape:
            raise DataError(
                f"{owner}: the {part} inputs have shape {inputs.shape[1:]} each, not {shape}; {hint}"
            )
        if len(inputs) != len(targets):
            raise DataError(
                f"{owner}: {len(inputs)} {part} inputs but {len(targets)} labels; they do not belong together"
            )
        row = {"categorical": (), "token_classes": shape}.get(likelihood, (classes,))
        if targets.shape[1:] != row:
            raise DataError(
                f"{owner}: the {part} targets have shape {targets.shape[1:]} each; {likelihood} targets of "
                f"this data set have {row}"
            )
        _check_numbers(f"{owner}: {part}_targets", targets)
        if likelihood != "gaussian":
            _check_labels(f"{owner}: {part} labels", targets, classes, likelihood)
        _check_numbers(f"{owner}: {part}_inputs", inputs)
        if inputs.dtype.kind == "i" and rounded(inputs).any():
            raise DataError(
                f"{owner}: {part} inputs reach {_reach(inputs)}; a network takes float32, which holds whole "
                "numbers up to 16,777,216 (2**24)"
            )
    return arrays


def rounded(values: Array) -> npt.NDArray[np.bool_]:
    """Return a mask, with the shape of `values`, of the whole numbers that float32 would round."""
    result = (values > EXACT) | (values < -EXACT)
    wide = values[result]
    # Python compares an int with a float exactly.
    result[result] = wide.astype(np.float32).astype(np.float64).astype(object) != wide.astype(object)
    return result


def _check_numbers(what: str, values: Array) -> None:
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        at, place = _first(~finite)
        raise DataError(
            f"{what}: {place} is {values[at]}, no finite number (the first of {(~finite).sum():,})"
        )


def _first(selected: npt.NDArray[np.bool_]) -> tuple[tuple[int, ...], str]:
    """Return the index of the first selected entry, and a text: 'row 5, column 2 (counted from 0)'."""
    row, *rest = at = tuple(map(int, np.unravel_index(int(selected.argmax()), selected.shape)))
    place = f", column {rest[0]}" if len(rest) == 1 else f", place {tuple(rest)}" if rest else ""
    return at, f"row {row}{place} (counted from 0)"


def _check_labels(what: str, targets: Array, classes: int, likelihood: str) -> None:
    lowest = NO_TARGET if likelihood == "token_classes" else 0
    highest = 1 if likelihood == "bernoulli" else classes - 1
    if targets.min() < lowest or targets.max() > highest:
        raise DataError(f"{what} reach {_reach(targets)}, not {lowest} to {highest}")


def _reach(values: Array) -> str:
    return f"from {values.min()} to {values.max()}"


def check_array(owner: str, name: str, array: object, likelihood: str) -> None:
    """Refuse a user's array unless it is a numpy array of the right dtype and number of dimensions."""
    rules = ARRAY_RULES[likelihood]
    inputs, centres = name.endswith("inputs"), name.endswith("centres")
    dtypes = rules.inputs if inputs else ("int64",) if centres else (rules.targets,)
    if not isinstance(array, np.ndarray):
        methods = (m for m in ("to_numpy", "toarray", "numpy") if callable(getattr(array, m, None)))
        instead = next((f"; convert it with .{m}()" for m in methods), "")
        raise DataError(f"{owner}: {name} must be a numpy array, not a {type(array).__name__}{instead}")
    if isinstance(array, np.ma.MaskedArray) and (mask := np.asarray(np.ma.getmaskarray(array))).any():
        raise DataError(
            f"{owner}: {name} is a masked array: {_first(mask)[1]} has no value (the first of "
            f"{mask.sum():,}). Leave these rows out, or fill them"
        )
    if array.dtype.name not in dtypes or not array.dtype.isnative:
        raise DataError(
            f"{owner}: {name} must be {' or '.join(dtypes)}, not {array.dtype}; convert it with "
            f".astype(numpy.{dtypes[0]})"
        )
    one_number = centres or (likelihood == "categorical" and not inputs)
    fits = array.ndim == 1 if one_number else array.ndim >= 2
    if not fits:
        needed = "(examples,)" if one_number else "(examples, ...)"
        raise DataError(f"{owner}: {name} must have the shape {needed}, not {array.shape}")


# ---- the digest

_ROWS = 4096
"""Number of rows hashed at a time."""


def data_digest(
    train: tuple[Array, Array],
    test: tuple[Array, ...],
    clients: Sequence[npt.NDArray[np.int64]],
) -> str:
    """Hash all data of an experiment (xxh3_128, 32 hexadecimal digits): shapes, dtypes and values.

    train: inputs and targets. test: inputs, targets and, if clients have test rows of their own, the client
    of every test row. clients: training rows of every client, in the client's order.
    Equal digests mean the same data in the same split.
    """
    hashed = xxhash.xxh3_128()
    for k, rows in enumerate(clients):
        for values in train:
            hashed.update(f"client {k} {values.dtype.str} {values.shape[1:]} {len(rows)}".encode())
            for at in range(0, len(rows), _ROWS):
                hashed.update(values[rows[at : at + _ROWS]].tobytes())
    for values in test:
        hashed.update(f"test {values.dtype.str} {values.shape}".encode())
        for at in range(0, len(values), _ROWS):
            hashed.update(values[at : at + _ROWS].tobytes())
    return hashed.hexdigest()
