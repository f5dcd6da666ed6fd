"""Reader of a user's table in one file: FILE.csv or .tsv (also .gz), or .parquet, read by pandas.

    FILE[,label=COLUMN,client=COLUMN,test=FILE,input=COLUMN,classes=C,missing=drop,na=TEXT]

docs/datasets.md has the rules. Whatever is not clear is an error that names its place and the remedy.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.data.arrays import Array, Arrays, bundle, rounded
from fedsim.data.readers.digits import TEST_EVERY, every_nth_of_class
from fedsim.errors import FEW, DataError, UsageError, unknown
from fedsim.extras import needed
from fedsim.removed import removed
from fedsim.specs import Form, key_values, number, whole
from fedsim.user_files import no_file, opened_text, other_separator

KEYS = ("label", "client", "test", "input", "classes", "missing", "na")
REPEATABLE = ("input", "na")
FORM = Form("FILE.csv,label=COLUMN[,KEY=VALUE,...]", help=f"where KEY is one of {', '.join(KEYS)}")
MOST_VALUES = 100
"""Largest number of values in a column of text that is a feature for each of them."""

NO_CLIENT = "(no client)"

_PREPARE = "Prepare the file, name the columns that are features (input=COLUMN), or write FILE.py:NAME"
_WHOLE = re.compile("-?[0-9]{1,18}")
_NUMBER_IN_TEXT = re.compile(r"(?<!\w)\d")
"""Matches texts such as 1,234, 5%, EUR 5 and dates, but not stage2."""
_CODE = re.compile("-?0[0-9]+")
"""A code such as the zip code 01234, which is no number: it would lose its zeros."""


@dataclass(frozen=True)
class TableFile:
    """The parts of a spec; `classes` is 0 if the spec does not give it. drop: True for missing=drop."""

    path: Path
    test: Path | None
    label: str
    client: str
    inputs: tuple[str, ...]
    classes: int
    drop: bool
    na: tuple[str, ...]

    @staticmethod
    def parse(spec: str, root: Path | None) -> TableFile:
        """Parse a spec. root: the data folder, for relative files that are not in the working directory."""
        name, _, rest = spec.partition(",")
        pairs = key_values(rest, f"data set {spec!r}", REPEATABLE)
        for key, _ in pairs:
            if gone := removed("data set", f"{key}="):
                raise UsageError(f"data set {spec!r}: {gone}")
            if key not in KEYS:
                raise unknown(f"key of data set {spec!r}:", key, KEYS)
        values = dict(pairs)
        classes, missing = whole(values.get("classes", "0")), values.get("missing", "refuse")
        if not all(values.values()) or classes < 0 or missing not in ("refuse", "drop"):
            raise FORM.misuse("data set", spec)
        path = Path(name).expanduser()
        path = path if root is None or path.exists() else root / path
        test = path.parent / Path(values["test"]).expanduser() if "test" in values else None
        for file in filter(None, (path, test)):
            if wrong := no_file(file):
                where = "" if file == test else "; relative files lie in the working directory or --data-dir"
                raise DataError(f"--dataset {path.name}: {file} {wrong}{where}")
        inputs, na = (tuple(value for key, value in pairs if key == several) for several in REPEATABLE)
        if na and _is_parquet(path):
            raise UsageError(f"--dataset {path.name}: na= is for csv and tsv files; others have empty cells")
        label, client = values.get("label", "label"), values.get("client", "")
        return TableFile(path, test, label, client, inputs, classes, missing == "drop", na)

    @property
    def owner(self) -> str:
        """The prefix of messages about the data."""
        return f"--dataset {self.path.name}"

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def name(self) -> str:
        """The prefix of the data set's cache folder."""
        return f"file-{self.path.name}"

    def files(self) -> tuple[Path, ...]:
        """Return all files that the data set is read from."""
        return (self.path, self.test) if self.test else (self.path,)

    def read(self) -> Arrays:
        """Read the arrays, `features`, and `facts`: number of classes, number of rows left out."""
        import pandas

        frames = [self._frame(path) for path in self.files()]
        features = self._features(frames)
        used = [self.label, *features, *filter(None, [self.client])]
        # a file of test rows may lack the column of clients; then its rows belong to none
        parts = [frame.reindex(columns=used, fill_value=NO_CLIENT) for frame in frames]
        rows = pandas.concat(parts, keys=range(len(parts)))
        table = _Table(self, rows).complete()
        targets, classes = table.targets(self.label, self.classes)
        inputs, names = table.features(features)
        test = ~table.first
        if self.test is None:
            test = every_nth_of_class(targets if targets.ndim == 1 else np.zeros(len(targets)), TEST_EVERY)
        if not test.any():
            raise DataError(
                f"{self.owner}: of every class each {TEST_EVERY}th row is a test row, and no class has as "
                "many; name a file of test rows: test=FILE"
            )
        divided = (inputs[~test], targets[~test], inputs[test], targets[test])
        arrays = bundle(*divided, targets=targets.dtype.type)
        if self.client:
            arrays |= table.centres(self.client, test)
        facts = np.array([classes, len(rows) - len(table.rows)])
        return arrays | {"features": np.array(names), "facts": facts}

    def _features(self, frames: Sequence[Any]) -> tuple[str, ...]:
        """Return the columns of features, after checking that all columns exist."""
        names = tuple(frames[0].columns)
        columns = [("label", self.label), ("client", self.client), *(("input", name) for name in self.inputs)]
        for key, column in columns:
            if column and column not in names:
                several = "" if len(names) <= MOST_VALUES else f"the {len(names):,} columns of the file"
                raise unknown(f"column of {self.path.name} ({key}=):", column, names, command=several)
        features = self.inputs or tuple(name for name in names if name not in (self.label, self.client))
        if not features or {self.label, self.client} & set(features):
            raise UsageError(f"{self.owner}: features are columns beside the label and the client")
        if lacking := [name for name in (self.label, *features) if name not in frames[-1]]:
            raise DataError(f"{self.owner}: {self.files()[-1].name} has no column {_listed(lacking)}")
        return features

    def _frame(self, path: Path) -> Any:
        """Read a file as a pandas frame."""
        import pandas

        try:
            if not _is_parquet(path):
                return self._csv(path)
            needed("pyarrow", f"the parquet file {path.name}", "parquet")
            frame = pandas.read_parquet(path)
            return frame.reset_index(drop=not any(frame.index.names)).rename(columns=str)
        except (OSError, EOFError, ValueError, csv.Error, zlib.error) as e:
            text = " ".join(str(e).split())[:300]
            raise DataError(f"{self.owner}: {path.name} cannot be read: {text}") from None

    def _csv(self, path: Path) -> Any:
        """Read a csv or tsv file; the label and the client stay text."""
        import pandas

        separator = _separator(path)
        with opened_text(path) as file:
            lines = csv.reader(file, delimiter=separator)
            heads, cells = next(lines, []), next(lines, [])
        wrong = other_separator(",".join(heads)) if separator == "," else ""
        name, times = Counter(heads).most_common(1)[0] if heads else ("", 0)
        if all(name.strip().lstrip("-").replace(".", "", 1).isdigit() for name in heads):
            wrong = "its first line must have the names of the columns"
        elif not heads[-1].strip():
            wrong = f"its first line ends with {separator!r}, and no name follows; remove it from all lines"
        elif not all(name.strip() for name in heads):
            wrong = "a column has no name (pandas writes row numbers so, without to_csv(index=False))"
        elif times > 1:
            wrong = f"its first line has the name {name!r} twice"
        elif len(cells) > len(heads):  # pandas would use the first cells as an index
            wrong = f"line {lines.line_num} has {len(cells)} cells, and the first line {len(heads)} names"
        if wrong:
            raise DataError(f"{self.owner}: {wrong}")
        texts = {name for name in (self.label, self.client) if name in heads}
        with opened_text(path) as file:
            if any(map(re.compile(rf'(^|[{separator}"]){_CODE.pattern}([{separator}"\r]|$)').search, file)):
                file.seek(0)
                rows = csv.reader(file, delimiter=separator)
                texts |= {
                    name
                    for row in rows
                    for name, cell in zip(heads, row, strict=False)
                    if _CODE.fullmatch(cell)
                }
        with opened_text(path) as file:
            return pandas.read_csv(
                file,
                sep=separator,
                dtype=dict.fromkeys(texts, str),
                keep_default_na=False,
                na_values=["", *self.na],
                low_memory=False,
                # integers stay integers in a column with missing values
                **({"dtype_backend": "numpy_nullable"} if self.drop else {}),
            )


@dataclass(frozen=True, eq=False)
class _Table:
    """All rows as a pandas frame, whose index has the numbers of the file and of the file's row, from 0."""

    file: TableFile
    rows: Any

    @property
    def first(self) -> npt.NDArray[np.bool_]:
        """A mask, (n,), of the rows of the first file, whose names are the known ones."""
        return np.asarray(self.rows.index.get_level_values(0) == 0)

    def complete(self) -> _Table:
        """Return the table without rows that lack a value; without missing=drop, refuse such rows."""
        missing = self.rows.isna()
        for name in self.rows.columns:
            if not self._numeric(name):
                missing[name] |= self._text(name).str.strip() == ""
        lacking = missing.any()
        if lacking.any() and not self.file.drop:
            error = self._wrong(lacking.idxmax(), missing[lacking.idxmax()], "has no value")
            raise DataError(f"{error}; missing=drop leaves such rows out")
        rows = self.rows[~missing.any(axis=1)]
        if rows.index.get_level_values(0).nunique() < len(self.file.files()):
            raise DataError(f"{self.file.owner}: every row of a file lacks a value (missing=drop)")
        return _Table(self.file, rows)

    def features(self, names: Sequence[str]) -> tuple[Array, list[str]]:
        """Convert columns to inputs, (n, features) float32, and return the names of the features.

        A column of numbers is one feature; one of text is a feature of 0 and 1 for each of its values.
        """
        labels: list[str] = []
        blocks = []
        for name in names:
            if self._numeric(name):
                labels.append(name)
                blocks.append(self._numbers(name)[:, None])
            else:
                self._check_values(name)
                codes, values = self._coded(name)
                labels += [f"{name}={value}" for value in values]
                blocks.append(np.eye(len(values), dtype=np.float32)[codes])
        return np.concatenate(blocks, axis=1), labels

    def targets(self, name: str, classes: int) -> tuple[Array, int]:
        """Return the targets of all rows and the number of outputs; classes=1: numbers to predict."""
        if classes == 1:
            return self._numbers(name)[:, None], 1
        codes, names = self._coded(name)
        owner, count = f"{self.file.owner}: column {name}", len(names)
        if classes not in (0, count):
            raise DataError(f"{owner}: classes={classes}, but it has {count:,}: {_listed(names)}")
        numbers = not any(map(isnan, map(number, names))) and not all(map(_WHOLE.fullmatch, names))
        if not classes and (numbers or count > max(self.first.sum() // 2, 2)):
            raise DataError(
                f"{owner} has {count:,} values in {self.first.sum():,} rows, such as {names[-1]!r}: say "
                f"classes=1 if they are numbers to predict, or classes={count} if they are names of classes"
            )
        return codes, count

    def centres(self, name: str, test: npt.NDArray[np.bool_]) -> Arrays:
        """Return `centres` and `test_centres`, the clients of training and of test rows; -1 is none."""
        codes, names = self._coded(name, others=True)
        meant = {_meaning(known): known for known in names}
        for other in sorted(set(self._text(name)[codes < 0])):
            if known := meant.get(_meaning(other)):
                raise DataError(
                    f"{self.file.owner}: column {name} has {known!r} in {self.file.path.name} and "
                    f"{other!r} in {self.file.files()[-1].name}; write them alike if they are one client"
                )
        trained, centres = np.unique(codes[~test], return_inverse=True)
        client = np.full(len(names) + 1, -1)  # the last entry is for index -1
        client[trained] = np.arange(len(trained))
        return {"centres": centres, "test_centres": client[codes[test]]}

    def _numeric(self, name: str) -> bool:
        """Return whether a column has numbers, or true and false."""
        from pandas.api.types import is_numeric_dtype

        return bool(is_numeric_dtype(self.rows[name].dtype))

    def _text(self, name: str) -> Any:
        return self.rows[name].astype(object).map(str)

    def _wrong(self, name: str, rows: Any, what: str) -> DataError:
        """Return the error for the marked rows of a column."""
        marked = np.asarray(rows, dtype=bool)
        file, row = self.rows.index[marked.argmax()]
        path = self.file.files()[file]
        place = f"row {row} of {path.name} (counted from 0)"
        if not _is_parquet(path):
            place = f"line {_line(path, row)} of {path.name}"
        return DataError(f"{self.file.owner}: {place}, column {name} {what} (the first of {marked.sum():,})")

    def _numbers(self, name: str) -> Array:
        """Convert a column of numbers to float32, (n,)."""
        import pandas

        series = self.rows[name]
        if not self._numeric(name):
            series = pandas.to_numeric(self._text(name), errors="coerce")
            if (wrong := series.isna()).any():
                raise self._wrong(name, wrong, f"is {self.rows[name][wrong].iloc[0]!r}, which is no number")
        exact = {"i": np.int64, "u": np.uint64}.get(series.dtype.kind, np.float64)
        values = series.to_numpy(dtype=exact)
        with np.errstate(over="ignore"):
            result = np.asarray(values.astype(np.float32))
        wrong = rounded(values) if values.dtype.kind in "iu" else ~np.isfinite(result)
        if wrong.any():
            what = f"is {values[wrong.argmax()]}, which float32 does not hold; an id is no feature"
            raise self._wrong(name, wrong, what)
        return result

    def _check_values(self, name: str) -> None:
        """Refuse a column of text that has numbers in another notation, or too many values for features."""
        import pandas

        text = self._text(name)
        if text.str.contains(_NUMBER_IN_TEXT).any():
            wrong = pandas.to_numeric(text, errors="coerce").isna()
            if not wrong.any():  # codes, whole numbers of more than 64 bits, numbers that parquet has as text
                codes = text.str.fullmatch(_CODE)
                wrong = codes if codes.any() else text.str.len() == text.str.len().max()
            what = f"is {self.rows[name][wrong].iloc[0]!r}, no plain number such as 1234.5"
            raise DataError(f"{self._wrong(name, wrong, what)}; na=TEXT is a missing value. {_PREPARE}")
        text = text[self.first]
        if text.nunique() > min(MOST_VALUES, max(len(text) // 2, 2)):
            raise DataError(
                f"{self.file.owner}: column {name} is text of {text.nunique():,} values in {len(text):,} "
                f"rows, such as {text.iloc[0]!r}; each would be a feature. {_PREPARE}"
            )

    def _coded(self, name: str, others: bool = False) -> tuple[Array, list[str]]:
        """Number the names in a column, (n,), and return the names, which are those of the first file.

        Names are in sorted order, or by value if all are plain whole numbers. others: the other file may have
        more names, numbered -1.
        """
        text = self._text(name)
        names = sorted(set(text[self.first]))
        names = sorted(names, key=int) if all(map(_WHOLE.fullmatch, names)) else names
        if spaced := [known for known, times in Counter(map(str.strip, names)).items() if times > 1]:
            raise DataError(f"{self.file.owner}: column {name} has {spaced[0]!r} with and without spaces")
        numbers = {known: i for i, known in enumerate(names)}
        codes = np.array([numbers.get(value, -1) for value in text], dtype=np.int64)
        if not others and (new := codes < 0).any():
            what = f"is {text[new].iloc[0]!r}, which {self.file.path.name} has not: {_listed(names)}"
            raise self._wrong(name, new, what)
        return codes, names


def _meaning(name: str) -> str | float:
    """Return what may be meant by a name: its value if it is a number, else the name without spaces."""
    value = number(name)
    return name.strip() if isnan(value) else value


def _listed(names: Sequence[str]) -> str:
    """List the first FEW names as text."""
    more = f", ... ({len(names):,} in all)" if len(names) > FEW else ""
    return ", ".join(map(repr, names[:FEW])) + more


# ---- files


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _separator(path: Path) -> str:
    return "\t" if path.name.lower().endswith((".tsv", ".tsv.gz")) else ","


def _line(path: Path, row: int) -> int:
    """Return the line of the file, from 1, on which a row of the table ends; blank lines are no rows."""
    with opened_text(path) as file:
        rows = csv.reader(file, delimiter=_separator(path))
        filled = (rows.line_num for cells in rows if cells)
        return next(line for at, line in enumerate(filled, start=-1) if at == row)
