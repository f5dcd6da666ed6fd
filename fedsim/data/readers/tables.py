"""Convert columns of tables to features, targets and clients; errors name the cell that does not fit.

A table is a pandas frame. Integers, floats and booleans are numbers; text is names. Names in a categorical
column are in the order of the categories. A column of numbers becomes one feature; a column of names becomes
one feature of 0 and 1 for each name (one-hot).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.data.arrays import Array, rounded
from fedsim.errors import DataError, UsageError, unknown
from fedsim.specs import Form, key_values
from fedsim.user_files import other_separator

FEW = 8
"""Largest number of names shown in a message."""
MANY = 1000
"""Largest number of categories of a feature. More classes than this and than rows require classes=."""
MOST_CATEGORIES = 100
"""Largest number of names in a text column that becomes a feature without being named by the user."""

REPEATABLE = ("input", "category", "na")
"""Keys that may be given several times."""

_WHOLE = ("integer", "boolean")
_NUMBERS = (*_WHOLE, "floating", "mixed-integer-float")
_NAMES = ("string", "categorical")
_WORDS = {
    **dict.fromkeys(_NUMBERS, "numbers"),
    **dict.fromkeys(_NAMES, "names"),
    **dict.fromkeys(("datetime64", "datetime", "date", "time", "period"), "times"),
    **dict.fromkeys(("timedelta64", "timedelta"), "durations"),
    "complex": "complex numbers",
    "decimal": "decimal numbers",
    "empty": "no values",
}
"""Words in messages for the kinds of pandas.api.types.infer_dtype."""

_ROW_NUMBERS = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Names that pandas gives to a column of row numbers."""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of one part of a data set.

    owner: prefix of messages. title: name of the part. frame: a pandas frame with rows numbered from 0.
    place: function that returns the name of a row. hint: advice on a missing value, for the error.
    """

    owner: str
    title: str
    frame: Any
    place: Callable[[int], str]
    hint: str = ""

    def column(self, name: str) -> Any:
        """Return a column; categories that are not text are replaced by their values."""
        series = self.frame[name]
        values = getattr(series.dtype, "categories", None)
        if values is None or all(isinstance(value, str) for value in values):
            return series
        return series.astype(values.dtype)

    def as_text(self, name: str) -> Table:
        """Return the table with a column as text; 1 and 1.0 become '1'."""
        series = _complete(self, name)
        if _kind(series) in _NAMES:
            return self
        whole = series.map(lambda v: str(int(v)) if isinstance(v, float) and v.is_integer() else str(v))
        return replace(self, frame=self.frame.assign(**{name: whole}))

    def wrong(self, name: str, rows: Any, what: str) -> DataError:
        """Return the error for the marked rows of a column."""
        rows = np.asarray(rows, dtype=bool)
        place = f"{self.owner}: {self.place(int(rows.argmax()))}, column {name}"
        return DataError(f"{place} {what} (the first of {rows.sum():,})")


# ---- options in a data set's text


def options(
    text: str, spec: str, form: Form, keys: Sequence[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Parse the KEY=VALUE,... of a data set; return the values, and all values of each key of REPEATABLE."""
    values: dict[str, str] = {}
    repeated: dict[str, tuple[str, ...]] = dict.fromkeys(REPEATABLE, ())
    for key, value in key_values(text, f"data set {spec!r}", repeatable=REPEATABLE):
        if key not in keys:
            raise unknown(f"key of data set {spec!r}:", key, keys)
        if not value:
            raise form.misuse("data set", spec)
        if key in REPEATABLE:
            repeated[key] += (value,)
        else:
            values[key] = value
    return values, repeated


def unknown_column(owner: str, key: str, column: str, names: Sequence[str]) -> UsageError:
    """Return the error for a column that does not exist."""
    if len(names) == 1 and (wrong := other_separator(names[0])):
        return UsageError(f"{owner}: {wrong}")
    if not column:
        return UsageError(f"{owner}: say {key}=COLUMN, one of {', '.join(names)}")
    return unknown(f"column of {owner} ({key}=):", column, names)


# ---- features


def _kind(series: Any) -> str:
    from pandas.api.types import infer_dtype

    return str(infer_dtype(series, skipna=True)).removesuffix("-na")


def features(
    tables: Sequence[Table],
    names: Sequence[str],
    selected: bool,
    categories: Collection[str] = (),
    hint: str = "",
) -> tuple[list[Array], tuple[str, ...]]:
    """Convert columns to inputs (n, features) float32 of every table; also return the names of the features.

    A column of numbers becomes a feature with the name of the column. A column of text becomes one feature
    'COLUMN=NAME' for each name in the first table: 1 if the row has this name, else 0.

    selected: True if the user named the columns. categories: columns whose values, of any kind, are names.
    hint: further advice in the error for columns that cannot be features.
    """
    refused = {name: _no_feature(tables, name, selected) for name in names if name not in categories}
    wrong = "; ".join(f"{name or '(no name)'} ({why})" for name, why in refused.items() if why)
    if wrong or not names:
        what = f"columns that are no features: {wrong}" if wrong else "it has no columns of inputs"
        raise DataError(
            f"{tables[0].owner}: {what}. Store them as numbers, leave them out of the data, or name the "
            f"columns that are features: input=A,input=B, or category=C for one whose values are names{hint}"
        )
    labels: list[str] = []
    blocks: list[list[Array]] = [[] for _ in tables]
    for name in names:
        if name not in categories and _kind(tables[0].column(name)) in _NUMBERS:
            labels.append(name)
            columns = [_numbers(table, name)[:, None] for table in tables]
        else:
            codes, known = _named([table.as_text(name) for table in tables], name, "values")
            if len(known) > MANY:
                raise DataError(
                    f"{tables[0].owner}: column {name} has {len(known):,} values, each of which would be a "
                    f"feature; there may be {MANY:,}"
                )
            labels += [f"{name}={value}" for value in known]
            columns = [np.eye(len(known), dtype=np.float32)[rows] for rows in codes]
        for block, column in zip(blocks, columns, strict=True):
            block.append(column)
    return [np.concatenate(block, axis=1) for block in blocks], tuple(labels)


def _no_feature(tables: Sequence[Table], name: str, selected: bool) -> str:
    """Return the reason why a column cannot be a feature; '' if it can."""
    if not selected and _ROW_NUMBERS.fullmatch(name):
        return "the row numbers that pandas writes, without to_csv(index=False)"
    kinds = [_kind(table.column(name)) for table in tables]
    if len({kind in _NAMES for kind in kinds}) > 1:
        return f"{_WORDS.get(kinds[0], 'other things')} in {tables[0].title}, not in {tables[-1].title}"
    if kinds[0] not in _NAMES:
        bad = (_WORDS.get(kind, "neither numbers nor names") for kind in kinds if kind not in _NUMBERS)
        return next(bad, "")
    why = (_misread(table, name) for table in tables)
    return next(filter(None, why), "") or ("" if selected else _no_categories(tables[0], name))


def _misread(table: Table, name: str) -> str:
    """Return the reason why a column of text was probably meant as numbers; '' if there is none."""
    import pandas

    series = table.column(name)
    text = series[series.notna()].astype(object)
    as_numbers = pandas.to_numeric(text, errors="coerce")
    wrong = text[as_numbers.isna()]
    if not len(wrong):
        return f"text, such as {text.iloc[0]!r}" if len(text) else "no values"
    if len(wrong) < len(text):
        return f"{wrong.iloc[0]!r} in {table.place(int(wrong.index[0]))} is no number"
    with_points = pandas.to_numeric(text.str.replace(",", "."), errors="coerce")
    return "" if with_points.isna().any() else f"text, such as {text.iloc[0]!r}"


def _no_categories(table: Table, name: str) -> str:
    """Return the reason why a column of text has too many names for a feature; '' if it does not."""
    text = table.column(name).dropna()
    count = text.nunique()
    if count <= min(MOST_CATEGORIES, max(len(text) // 2, 2)):
        return ""
    return f"text of {count:,} values in {len(text):,} rows, such as {text.iloc[0]!r}"


def _numbers(table: Table, name: str) -> npt.NDArray[np.float32]:
    """Return a column of numbers as float32, (n,)."""
    values = _exact(table, name)
    if values.dtype.kind in "iu" and (wide := rounded(values)).any():
        value = values[wide.argmax()]
        raise table.wrong(
            name,
            wide,
            f"is {value}, which float32 rounds; an id is no feature, and what may be rounded has a point",
        )
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if not (finite := np.isfinite(numbers)).all():
        raise table.wrong(name, ~finite, f"is {values[(~finite).argmax()]}, too large for float32")
    return numbers


def _exact(table: Table, name: str) -> Array:
    """Return a column of numbers: integers as int64 or uint64, booleans as int64, others as float64."""
    series = _complete(table, name)
    kind = _kind(series)
    if kind == "boolean":
        return np.asarray(series.to_numpy(dtype=bool), dtype=np.int64)
    unsigned = getattr(series.dtype, "kind", "") == "u"
    exact = np.float64 if kind not in _WHOLE else np.uint64 if unsigned else np.int64
    try:
        values = np.asarray(series.to_numpy(dtype=exact))
    except OverflowError:
        raise DataError(
            f"{table.owner}: column {name} of {table.title} has whole numbers of more than 64 bits"
        ) from None
    if not (finite := np.isfinite(values)).all():
        raise table.wrong(name, ~finite, f"is {values[(~finite).argmax()]}, no finite number")
    return values


def _complete(table: Table, name: str) -> Any:
    """Return a column after checking that no value is missing; a blank text counts as missing."""
    if (missing := without_value(table, name)).any():
        raise DataError(f"{table.wrong(name, missing, 'has no value')}{table.hint}")
    return table.column(name)


def without_value(table: Table, name: str) -> npt.NDArray[np.bool_]:
    """Return a mask, (n,), of the rows in which a column has no value or a blank text."""
    series = table.column(name)
    missing = series.isna()
    if _kind(series) in _NAMES:
        missing = missing | series.astype(object).map(lambda v: isinstance(v, str) and not v.strip())
    return np.asarray(missing.to_numpy(dtype=bool))


# ---- targets


def targets(tables: Sequence[Table], name: str, classes: int) -> tuple[list[Array], int]:
    """Return the targets of every table and the number of outputs that they need.

    The first table has the training data. Its names are numbered in the order of categories (categorical) or
    sorted. classes: number of classes; 0: inferred from the data; 1: the column has numbers to predict.
    """
    kinds = [_kind(_complete(table, name)) for table in tables]
    if all(kind in _NAMES for kind in kinds) and classes != 1:
        result, known = _named(tables, name, "classes")
        count = len(known)
    elif all(kind in _NUMBERS for kind in kinds):
        values = [_exact(table, name) for table in tables]
        if classes == 1 or _to_predict(values, classes, f"{tables[0].owner}: column {name}"):
            return [_numbers(table, name)[:, None] for table in tables], 1
        result = [value.astype(np.int64) for value in values]
        count = _check_classes(tables, name, result, classes)
    else:
        both = ", ".join(
            f"{_WORDS.get(kind, 'other things')} in {table.title}"
            for kind, table in zip(kinds, tables, strict=True)
        )
        raise DataError(
            f"{tables[0].owner}: column {name} has {both}; targets are names, or numbers, in all parts"
        )
    if classes and count > classes:
        raise DataError(f"{tables[0].owner}: classes={classes}, but column {name} has {count}")
    return result, max(count, classes)


def _named(tables: Sequence[Table], name: str, what: str) -> tuple[list[Array], list[str]]:
    """Return a column's names as numbers, (n,), for every table, and the names. what: word for errors."""
    first = tables[0].column(name)
    categories = getattr(first.dtype, "categories", None)
    names = sorted(set(first)) if categories is None else list(categories)
    _refuse_spaces(names, f"{tables[0].owner}: column {name}")
    number = {known: i for i, known in enumerate(names)}
    result = []
    for table in tables:
        values = table.column(name).astype(object)
        if new := sorted(set(values) - set(names)):
            raise DataError(
                f"{table.owner}: column {name} of {table.title} has {what} that {tables[0].title} has not: "
                f"{listed(new)}; those of {tables[0].title} are {listed(names)}"
            )
        result.append(np.array([number[value] for value in values], dtype=np.int64))
    return result, names


def _refuse_spaces(names: Iterable[str], what: str) -> None:
    """Refuse names that differ only by spaces around them."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.strip(), name)) != name:
            raise DataError(f"{what} has both {other!r} and {name!r}; spaces around a name make another one")


def _to_predict(values: Sequence[Array], classes: int, what: str) -> bool:
    """Return whether the values are numbers to predict rather than numbers of classes."""
    if all(value.dtype.kind in "iu" for value in values):
        return False
    every = np.unique(np.concatenate(values))
    whole = np.array_equal(every, np.rint(every))
    if classes:
        if not whole:
            raise DataError(f"{what} has {every[every != np.rint(every)][0]}, which is no number of a class")
        return False
    known = [np.arange(start, start + len(every)) for start in (0, 1)] + [np.array([-1, 1])]
    if len(every) > 1 and any(np.array_equal(every, numbers) for numbers in known):
        raise DataError(
            f"{what} has {listed(every.tolist())}: say classes={int(every.max()) + 1} if these are classes, "
            "or classes=1 if they are numbers to predict"
        )
    return True


def _check_classes(tables: Sequence[Table], name: str, values: Sequence[Array], classes: int) -> int:
    """Return the number of integer classes; without `classes`, refuse classes that the first table lacks."""
    for table, value in zip(tables, values, strict=True):
        if (low := value < 0).any():
            raise table.wrong(
                name, low, f"is {value[low.argmax()]}; classes are numbered from 0, or have names"
            )
    seen = [np.unique(value) for value in values]
    count = int(max(value.max() for value in seen)) + 1
    for table, value in zip(tables, seen, strict=True):
        if not classes and len(new := np.setdiff1d(value, seen[0])):
            raise DataError(
                f"{table.owner}: column {name} of {table.title} has classes that {tables[0].title} has not: "
                f"{listed(new.tolist())}; those of {tables[0].title} are {listed(seen[0].tolist())}. "
                f"If both are numbered alike, say how many classes there are: classes={count}"
            )
    if not classes and count > max(MANY, len(values[0])):
        raise DataError(
            f"{tables[0].owner}: column {name} has whole numbers up to {count - 1:,} in {len(values[0]):,} "
            f"rows: say classes=1 if they are numbers to predict, or classes={count} if these are classes"
        )
    return count


# ---- clients


def clients(tables: Sequence[Table], name: str) -> list[npt.NDArray[np.int64]]:
    """Number the clients of every table's rows, (n,), by the first table's sorted values; -1 for others."""
    values = [_client_names(table, name) for table in tables]
    names = np.unique(values[0])
    numbers = {value: k for k, value in enumerate(names.tolist())}
    return [np.array([numbers.get(v, -1) for v in rows.tolist()], dtype=np.int64) for rows in values]


def _client_names(table: Table, name: str) -> Array:
    """Return the value that identifies the client of every row, (n,)."""
    series = _complete(table, name)
    kind = _kind(series)
    if kind not in (*_WHOLE, "floating", *_NAMES, "datetime64", "date"):
        what = _WORDS.get(kind, "values of several or other types")
        raise DataError(
            f"{table.owner}: column {name} (client=) has {what}; a client is a text or a whole number"
        )
    values = series.astype(object).to_numpy(dtype=str) if kind in _NAMES else series.to_numpy()
    if kind in _NAMES:
        _refuse_spaces(np.unique(values).tolist(), f"{table.owner}: column {name} (client=)")
    return np.asarray(values)


def listed(names: Sequence[object]) -> str:
    """List the first FEW names as text."""
    more = f", ... ({len(names):,} in all)" if len(names) > FEW else ""
    return ", ".join(map(repr, names[:FEW])) + more
