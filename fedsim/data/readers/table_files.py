"""Reader of a user's table in one file: FILE.csv, .tsv (also .gz), .parquet or .npz.

    FILE[,label=COLUMN,input=COLUMN,category=COLUMN,client=COLUMN,classes=C,test=FILE,missing=drop,na=TEXT]

The keys have the same meaning as for hf: (fedsim.data.readers.hub). Without `input`, all columns but label
and client are features. `test` names a file with the same columns in the folder of FILE. Without `test`,
every fifth row of each class, in file order, is a test row (every fifth row of all if targets are numbers to
predict). This split does not depend on the run's seed.

In a csv file, an empty cell or a cell with a text of `na` has no value; every other text is a value. A row
that has no value in a used column is an error. With missing=drop, it is left out before test rows are chosen.

The arrays of an npz file are its columns. An array with several values per row, (n, ...), must be the only
input. A uint8 array stays uint8 ("scaled" inputs are divided by 255); others become float32. Arrays with the
names that Keras uses, x_train, y_train, x_test and y_test, are read as training and test data.
"""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data.arrays import Array, Arrays, bundle, rounded
from fedsim.data.readers import tables
from fedsim.data.readers.digits import TEST_EVERY, every_nth_of_class
from fedsim.errors import DataError, UsageError
from fedsim.extras import needed
from fedsim.specs import Form, whole
from fedsim.user_files import no_file, opened_text, other_separator

KEYS = ("label", "input", "category", "client", "classes", "test", "missing", "na")
TEXTS = (".csv", ".tsv")
NO_VALUE = "; a text that stands for no value is na=TEXT"
DROP = "; missing=drop leaves such rows out"
FORM = Form("FILE.csv,label=COLUMN[,KEY=VALUE,...]", help=f"where KEY is one of {', '.join(KEYS)}")
LABELS = ("label", "labels")
KERAS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class TableFile:
    """The parts of a spec; `classes` is 0 if the spec does not give it.

    categories: columns whose values are names. drop: True to leave out rows with a missing value. na: texts
    that mean a missing value.
    """

    path: Path
    test: Path | None
    label: str
    client: str
    inputs: tuple[str, ...]
    categories: tuple[str, ...]
    classes: int
    drop: bool
    na: tuple[str, ...]

    @staticmethod
    def parse(spec: str, root: Path | None) -> TableFile:
        """Parse a spec. root: the data folder, for relative files that are not in the working directory."""
        name, _, rest = spec.partition(",")
        values, repeated = tables.options(rest, spec, FORM, KEYS)
        path = Path(name).expanduser()
        path = path if root is None or path.exists() else root / path
        test = path.parent / Path(values["test"]).expanduser() if "test" in values else None
        for file in filter(None, (path, test)):
            if wrong := no_file(file):
                where = (
                    "" if file == test else "; relative files lie in the working directory or in --data-dir"
                )
                raise DataError(f"--dataset {path.name}: {file} {wrong}{where}")
        classes, missing = whole(values.get("classes", "0")), values.get("missing", "refuse")
        if classes < 0:
            raise FORM.misuse("data set", spec)
        if missing not in ("refuse", "drop"):
            raise UsageError(
                f"--dataset {path.name}: missing={missing}: write missing=drop or missing=refuse"
            )
        if repeated["na"] and not set(TEXTS) & set(path.suffixes):
            raise UsageError(f"--dataset {path.name}: na= is for csv and tsv files; others have empty cells")
        return TableFile(
            path,
            test,
            values.get("label", ""),
            values.get("client", ""),
            repeated["input"],
            repeated["category"],
            classes,
            missing == "drop",
            repeated["na"],
        )

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
        """Read the arrays, and `facts`: number of classes, scale of the inputs, number of dropped rows."""
        parts = [part for path in self.files() for part in self._parts(path)]
        names, keras = parts[0].names, len(parts) == 2 and self.test is None
        label = self.label or next((name for name in ("y",) if keras), "")
        label = label or next((name for name in LABELS if name in names), "")
        columns = [("label", label), ("client", self.client or label), *(("input", n) for n in self.inputs)]
        columns += [("category", name) for name in self.categories]
        for key, column in columns:
            if column not in names:
                raise tables.unknown_column(self.path.name, key, column, names)
        features = tuple(dict.fromkeys((*self.inputs, *self.categories))) if self.inputs else ()
        features = features or tuple(n for n in names if n not in (label, self.client))
        if lacking := [n for n in (label, *features) if n not in parts[-1].names]:
            raise DataError(f"{self.owner}: {parts[-1].table.title} has no column {', '.join(lacking)}")
        if unused := [name for name in self.categories if name == label or name not in features]:
            raise UsageError(f"{self.owner}: category={unused[0]} is the label or the client, no feature")
        dropped = 0
        if self.drop:
            used = (label, *features, *([self.client] if self.client else ()))
            complete = [part.complete(used) for part in parts]
            dropped = sum(len(part.table.frame) for part in parts) - sum(len(p.table.frame) for p in complete)
            parts = complete
        targets, classes = tables.targets([part.table for part in parts], label, self.classes)
        inputs, white, labels = self._inputs(parts, features)
        named = [part.table for part in parts if self.client in part.table.frame]
        centres, *tested = tables.clients(named, self.client) if self.client else [None]
        if len(parts) == 1:
            groups = targets[0] if targets[0].ndim == 1 else np.zeros(len(targets[0]))
            test = every_nth_of_class(groups, TEST_EVERY)
            if not test.any():
                raise DataError(
                    f"{self.owner}: of every class each {TEST_EVERY}th row is a test row, and no class has "
                    "as many; name a file of test rows: test=FILE"
                )
            inputs, targets = ([rows[0][~test], rows[0][test]] for rows in (inputs, targets))
            if centres is not None:
                kept, rows = np.unique(centres[~test], return_inverse=True)
                number = np.full(int(centres.max()) + 1, -1)
                number[kept] = np.arange(len(kept))
                centres, tested = rows, [number[centres[test]]]
        arrays = bundle(inputs[0], targets[0], inputs[1], targets[1], centres, targets[0].dtype.type)
        more: Arrays = {"features": np.array(labels)} if labels else {}
        if tested:
            more["test_centres"] = np.asarray(tested[0])
        return {**arrays, **more, "facts": np.array([classes, white, dropped])}

    def _inputs(
        self, parts: Sequence[_Part], names: Sequence[str]
    ) -> tuple[list[Array], float, tuple[str, ...]]:
        """Return the inputs of every part, their scale (255 for uint8, else 1), and feature names, if any."""
        if not any(name in parts[0].arrays for name in names):
            inputs, labels = tables.features(
                [part.table for part in parts], names, bool(self.inputs), self.categories, NO_VALUE
            )
            return inputs, 1.0, labels
        if len(names) > 1:
            raise DataError(
                f"{self.owner} has the arrays {', '.join(names)}: say which is the input, input=NAME"
            )
        arrays = [part.arrays[names[0]] for part in parts]
        if all(array.dtype == np.uint8 for array in arrays):
            return arrays, 255.0, ()
        for array in arrays:
            if array.dtype.kind not in "biuf" or (array.dtype.kind in "iu" and rounded(array).any()):
                raise DataError(
                    f"{self.owner}: {names[0]} has {array.dtype}, not all of which float32 holds; convert it"
                )
        return [array.astype(np.float32) for array in arrays], 1.0, ()

    def _parts(self, path: Path) -> list[_Part]:
        """Read a file as one part, or as two if it has Keras's arrays and the user does not name a label."""
        import pandas

        owner = self.owner
        try:
            if path.suffix == ".npz":
                return _of_arrays(path, owner, bool(self.label))
            if path.suffix == ".parquet":
                needed("pyarrow", f"the parquet file {path.name}", "parquet")
                frame = pandas.read_parquet(path)
                frame = frame.reset_index(drop=not any(frame.index.names)).rename(columns=str)
                return [_Part(tables.Table(owner, path.name, frame, _row(path), DROP))]
            return [_Part(self._csv(path))]
        except (OSError, EOFError, ValueError, csv.Error, zlib.error, zipfile.BadZipFile) as e:
            text = " ".join(str(e).split())[:300]
            raise DataError(f"{owner}: {path.name} cannot be read: {text}") from None

    def _csv(self, path: Path) -> tables.Table:
        import pandas

        owner = self.owner
        separator = "\t" if ".tsv" in path.suffixes else ","
        with opened_text(path) as file:
            rows = csv.reader(file, delimiter=separator)
            heads, cells = next(rows, []), next(rows, [])
        wrong = other_separator(",".join(heads)) if separator == "," else ""
        twice = next((name for name in heads if heads.count(name) > 1), None)
        if twice is not None:
            wrong = f"its first line has the name {twice!r} twice"
        elif all(name.strip().lstrip("-").replace(".", "", 1).isdigit() for name in heads):
            wrong = "its first line must have the names of the columns"
        elif len(cells) > len(heads):  # pandas would use the first cells as an index
            wrong = f"line {rows.line_num} has {len(cells)} cells, and the first line {len(heads)} names"
        if wrong:
            raise DataError(f"{owner}: {wrong}")
        with opened_text(path) as file:
            frame = pandas.read_csv(
                file,
                sep=separator,
                keep_default_na=False,
                na_values=["", *self.na],
                low_memory=False,
                # integers stay integers in a column with missing values
                **({"dtype_backend": "numpy_nullable"} if self.drop else {}),
            )
        return tables.Table(
            owner, path.name, frame, lambda row: f"line {_line(path, separator, row)} of {path.name}", DROP
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of a file: columns, and arrays with several values per row."""

    table: tables.Table
    arrays: Mapping[str, Array] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.table.frame.columns, *self.arrays)

    def complete(self, names: Sequence[str]) -> _Part:
        """Return the rows that have a value in all columns `names`.

        Raises:
            DataError: If there are no such rows.
        """
        table, missing = self.table, np.zeros(len(self.table.frame), dtype=bool)
        for name in names:
            if name in table.frame.columns:
                missing |= tables.without_value(table, name)
            elif (array := self.arrays.get(name)) is not None and array.dtype.kind == "f":
                missing |= np.isnan(array.reshape(len(array), -1)).any(axis=1)
        if missing.all():
            raise DataError(f"{table.owner}: every row of {table.title} lacks a value (missing=drop)")
        kept, place = np.flatnonzero(~missing), table.place
        frame = table.frame[~missing].reset_index(drop=True)
        table = replace(table, frame=frame, place=lambda row: place(int(kept[row])))
        return _Part(table, {name: array[kept] for name, array in self.arrays.items()})


# ---- files


def _row(path: Path) -> Callable[[int], str]:
    return lambda row: f"{path.name}, row {row} (counted from 0)"


def _line(path: Path, separator: str, row: int) -> int:
    """Return the line of the file, from 1, on which a row of the table ends; blank lines are no rows."""
    with opened_text(path) as file:
        rows = csv.reader(file, delimiter=separator)
        filled = (rows.line_num for cells in rows if cells)
        return next(line for at, line in enumerate(filled, start=-1) if at == row)


def _of_arrays(path: Path, owner: str, labelled: bool) -> list[_Part]:
    import pandas

    if not zipfile.is_zipfile(path):
        raise DataError(f"{owner}: {path.name} is no file that numpy.savez wrote")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if not labelled and all(name in arrays for name in KERAS):
        groups = [{"x": arrays[f"x_{title}"], "y": arrays[f"y_{title}"]} for title in ("train", "test")]
    else:
        groups = [arrays]
    parts = []
    for group in groups:
        lengths = {name: len(array) if array.ndim else 0 for name, array in group.items()}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"{owner}: its arrays have different numbers of rows: {listed}")
        native = {n: a.astype(a.dtype.newbyteorder("="), copy=False) for n, a in group.items()}
        columns: dict[str, Any] = {n: a.reshape(len(a)) for n, a in native.items() if a.size == len(a)}
        wide = {n: a for n, a in native.items() if n not in columns}
        parts.append(_Part(tables.Table(owner, path.name, pandas.DataFrame(columns), _row(path), DROP), wide))
    return parts
