"""What arrays of a data set must look like, so that everything behind them may rely on it.

    likelihood    inputs (n, *shape)    targets
    categorical   float32 or uint8      (n,) int64, 0..C-1
    bernoulli     float32 or uint8      (n, C) uint8, 0 or 1
    tokens        int32 or int64 ids    (n, *shape) int64, -1..C-1 (fedsim/data/vocabulary.py)
    gaussian      float32 or uint8      (n, C) float32

The likelihoods are those of fedsim/learning/likelihoods.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fedsim.data import vocabulary
from fedsim.data.arrays import Array, Arrays
from fedsim.errors import DataError


@dataclass(frozen=True)
class ArrayRules:
    """Dtypes, and the smallest number of classes (outputs) that makes sense."""

    inputs: tuple[str, ...]
    targets: str
    least: int


_NUMBERS = ("float32", "uint8")

KINDS: Mapping[str, ArrayRules] = MappingProxyType(
    {
        "categorical": ArrayRules(_NUMBERS, "int64", 2),
        "bernoulli": ArrayRules(_NUMBERS, "uint8", 1),
        "tokens": ArrayRules(("int32", "int64"), "int64", vocabulary.SPECIALS + 1),
        "gaussian": ArrayRules(_NUMBERS, "float32", 1),
    }
)


def checked(
    owner: str, shape: tuple[int, ...], classes: int, arrays: Arrays, hint: str, likelihood: str
) -> Arrays:
    """The same arrays, if they fit each other, the shape of one input, the classes and the likelihood.

    Dtypes are as the table above says.

    Raises:
        DataError: beginning with `owner`.
    """
    for part in ("train", "test"):
        inputs, targets = arrays[f"{part}_inputs"], arrays[f"{part}_targets"]
        if inputs.shape[1:] != shape:
            raise DataError(
                f"{owner}: the {part} inputs have shape {inputs.shape[1:]} each, not {shape}; {hint}"
            )
        if len(inputs) != len(targets) or len(targets) == 0:
            raise DataError(
                f"{owner}: {len(inputs)} {part} inputs but {len(targets)} labels; they do not belong together"
            )
        row = {"categorical": (), "tokens": shape}.get(likelihood, (classes,))
        if targets.shape[1:] != row:
            raise DataError(
                f"{owner}: the {part} targets have shape {targets.shape[1:]} each; {likelihood} targets of "
                f"this data set have {row}"
            )
        if likelihood == "gaussian":
            if not np.isfinite(targets).all():
                raise DataError(f"{owner}: a {part} target is not a finite number")
        else:
            _check_labels(f"{owner}: {part} labels", targets, classes, likelihood)
        if likelihood == "tokens" and (inputs.min() < 0 or inputs.max() >= classes):
            raise DataError(f"{owner}: {part} inputs reach {_reach(inputs)}, not 0 to {classes - 1}")
        if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
            raise DataError(f"{owner}: a {part} input is not a finite number")
    return arrays


def _check_labels(what: str, targets: Array, classes: int, likelihood: str) -> None:
    lowest = vocabulary.NO_TARGET if likelihood == "tokens" else 0
    highest = 1 if likelihood == "bernoulli" else classes - 1
    if targets.min() < lowest or targets.max() > highest:
        raise DataError(f"{what} reach {_reach(targets)}, not {lowest} to {highest}")


def _reach(values: Array) -> str:
    return f"from {values.min()} to {values.max()}"


def check_kind(owner: str, name: str, array: object, likelihood: str) -> None:
    """Of a user's array, that it is a numpy array of the right dtype and number of dimensions."""
    kind = KINDS[likelihood]
    inputs, centres = name.endswith("inputs"), name == "centres"
    kinds = kind.inputs if inputs else ("int64",) if centres else (kind.targets,)
    if not isinstance(array, np.ndarray):
        raise DataError(f"{owner}: {name} must be a numpy array, not a {type(array).__name__}")
    if array.dtype.name not in kinds or not array.dtype.isnative:
        raise DataError(
            f"{owner}: {name} must be {' or '.join(kinds)}, not {array.dtype}; convert it with "
            f".astype(numpy.{kinds[0]})"
        )
    if inputs:
        fits, needed = array.ndim >= 2, "(examples, ...)"
    elif centres or likelihood == "categorical":
        fits, needed = array.ndim == 1, "(examples,)"
    else:
        fits, needed = array.ndim >= 2, "(examples, ...)"
    if not fits:
        raise DataError(f"{owner}: {name} must have the shape {needed}, not {array.shape}")
