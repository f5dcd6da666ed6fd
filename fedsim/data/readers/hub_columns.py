"""Columns of a split of the `datasets` package as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedsim.data import vocabulary
from fedsim.data.arrays import EXACT, Array
from fedsim.data.readers import images as pictures, tables
from fedsim.errors import DataError


def titled(splits: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The splits for training and testing with their names."""
    yield from zip(("train", "test"), splits, strict=True)


def place(title: str) -> Callable[[int], str]:
    """The name of a split's rows in messages."""
    return lambda row: f"row {row} of {title} (counted from 0)"


def table(owner: str, title: str, split: Any, columns: Sequence[str], label: str = "") -> tables.Table:
    """Some columns of a split; the label's classes have their names."""
    import pandas

    frame = split.select_columns(list(columns)).to_pandas()
    for name in columns:
        feature = split.features[name]
        if type(feature).__name__ == "Json":  # whose values pandas would make alike
            frame[name] = pandas.Series(list(split[name]), dtype=object)
        if name == label and type(feature).__name__ == "ClassLabel":
            codes = frame[name].fillna(-1).astype(int)
            codes = codes.where(codes.between(0, len(feature.names) - 1), -1)
            frame[name] = pandas.Categorical.from_codes(codes, categories=feature.names)
    return tables.Table(owner, title, frame, place(title))


def same_classes(splits: Sequence[Any], name: str, owner: str) -> None:
    """Refuse classes as features whose numbers stand for other names in the other split."""
    names = [getattr(split.features[name], "names", None) for split in splits]
    if names[0] != names[1]:
        raise DataError(
            f"{owner}: column {name} is numbered in another way in each split: "
            f"{tables.listed(names[0] or ())} in train, {tables.listed(names[1] or ())} in test"
        )


def images(splits: Sequence[Any], column: str, owner: str) -> tuple[list[Array], float]:
    """A column of images as inputs of every split, and the number that stands for white."""
    every = (
        (f"the image of {place(title)(row)}", partial(split[column].__getitem__, row))
        for title, split in titled(splits)
        for row in range(len(split))
    )
    stacked, white = pictures.pixels(every, owner)
    return [stacked[: len(splits[0])], stacked[len(splits[0]) :]], white


def lists(rows: Sequence[Any], length: int, padding: int, what: str) -> Array:
    """Rows of ids as int32 (n, T), or of features as float32 (n, I)."""
    try:
        values = [np.asarray(row) for row in rows]
    except ValueError:
        values = []
    kinds = {value.dtype.kind for value in values if value.size}
    if not values or any(value.ndim != 1 for value in values) or not kinds <= set("iuf"):
        raise DataError(f"{what}: its rows are neither lists of numbers, nor text, nor images")
    longest = length or max(len(value) for value in values)
    if "f" in kinds:
        if any(len(value) != longest for value in values):
            raise DataError(f"{what}: its rows of features differ in length")
        return np.stack(values).astype(np.float32)
    filled = padded(values, longest, padding)
    if filled.max(initial=0) > EXACT:
        raise DataError(f"{what}: its ids reach {filled.max()}; they must be at most {EXACT}")
    return filled.astype(np.int32)


def padded(values: Sequence[Array], length: int, padding: int) -> Array:
    """Rows (n, length) int64, cut or filled with `padding`."""
    filled = np.full((len(values), length), padding, dtype=np.int64)
    for row, value in zip(filled, values, strict=True):
        row[: min(len(value), length)] = value[:length]
    return filled


def next_ids(ids: Array, padding: int) -> Array:
    """The id behind every place; -1 at the end and where it is padding."""
    shifted = np.full(ids.shape, vocabulary.NO_TARGET, dtype=np.int64)
    shifted[:, :-1] = np.where(ids[:, 1:] == padding, vocabulary.NO_TARGET, ids[:, 1:])
    return shifted


def classes_by_place(splits: Sequence[Any], label: str, length: int, owner: str) -> tuple[list[Array], int]:
    """Targets (n, length) of lists of classes, -1 for none, and the number of classes."""
    rows = []
    names: list[Any] = [getattr(getattr(s.features[label], "feature", None), "names", None) for s in splits]
    for (title, split), own in zip(titled(splits), names, strict=True):
        values = [np.asarray(row) for row in split[label]]
        if not all(value.ndim == 1 and (value.dtype.kind in "iub" or not value.size) for value in values):
            raise DataError(f"{owner}: column {label} of {title} has rows that are no lists of whole numbers")
        filled = padded(values, length, vocabulary.NO_TARGET)
        if own != names[0]:
            there, known = list(own or ()), list(names[0] or ())
            occurring = {there[i] for i in np.unique(filled[filled >= 0])} if there and known else {""}
            if not occurring <= set(known):
                raise DataError(
                    f"{owner}: column {label} of {title} has the classes {tables.listed(there)}; "
                    f"those of train are {tables.listed(known)}"
                )
            number = [known.index(name) if name in known else vocabulary.NO_TARGET for name in there]
            filled = np.where(filled >= 0, np.array(number)[filled], filled)
        rows.append(filled)
    return rows, max(len(names[0] or ()), *(int(r.max()) + 1 for r in rows))


def is_number(feature: Any) -> bool:
    """Return whether a column of the package has numbers, one a row or in arrays."""
    return str(getattr(feature, "dtype", "")).startswith(("int", "float", "uint", "bool"))
