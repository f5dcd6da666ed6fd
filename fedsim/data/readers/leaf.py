"""Reader of data sets in LEAF's JSON format, with test rows of every user.

    leaf:FOLDER[,shape=CxHxW,classes=C]

FOLDER has the parts train and test. Each is a folder of JSON files, or one file (train.json, test.json):

    {"users": ["bob", ...], "num_samples": [124, ...],
     "user_data": {"bob": {"x": [INPUT, ...], "y": [LABEL, ...]}, ...}}

An input is a list of numbers, or a nested list. All inputs have one shape; `shape` reshapes them. Labels are
names or numbers (fedsim.data.readers.tables.targets). Users with training rows become centres, numbered by
name in sorted order (as strings: '10' is before '2'). A test row has the centre of its user. Other keys, such
as hierarchies, are not read.

Source: LEAF, Caldas et al. 2018, arXiv:1812.01097; the format as in data/utils/split_data.py and
models/utils/model_utils.py of https://github.com/TalwalkarLab/leaf.

Differs: LEAF also reads text (Shakespeare, Reddit, Sentiment140) and images given by file name (CelebA); here
these are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedsim.data.arrays import Array, Arrays, bundle, rounded
from fedsim.data.readers import tables
from fedsim.errors import DataError
from fedsim.specs import Form, whole
from fedsim.user_files import no_file, no_folder

PREFIX = "leaf:"
KEYS = ("shape", "classes")
FORM = Form("leaf", ("FOLDER[,KEY=VALUE,...]",), help=f"where KEY is one of {', '.join(KEYS)}")
PARTS = ("train", "test")
_BOM = b"\xef\xbb\xbf"


class _Rows(msgspec.Struct):
    x: list[Any]
    y: list[Any]


class _File(msgspec.Struct):
    users: list[str]
    num_samples: list[int]
    user_data: dict[str, _Rows]


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of a part: inputs (n, *shape), labels as the column y, and the user of each row."""

    inputs: Array
    labels: tables.Table
    users: list[str]


@dataclass(frozen=True)
class LeafDataset:
    """The parts of a spec; `shape` is empty and `classes` 0 if the spec does not give them."""

    folder: Path
    parts: tuple[tuple[Path, ...], ...]
    shape: tuple[int, ...]
    classes: int

    @staticmethod
    def parse(text: str, root: Path | None) -> LeafDataset:
        """Parse a spec. root: the data folder, for relative folders; None is the working directory."""
        name, _, rest = text.removeprefix(PREFIX).partition(",")
        values, _ = tables.options(rest, text, FORM, KEYS)
        classes = whole(values.get("classes", "0"))
        shape = tuple(whole(side) for side in values["shape"].split("x")) if "shape" in values else ()
        if not name or classes < 0 or min(shape, default=1) < 1:
            raise FORM.misuse("data set", text)
        folder = Path(name).expanduser()
        folder = folder if folder.is_absolute() or root is None else root / folder
        if wrong := no_folder(folder):
            raise DataError(f"data set {text!r}: {folder} {wrong}; relative folders lie in --data-dir")
        return LeafDataset(folder, tuple(_files(folder, part, text) for part in PARTS), shape, classes)

    @property
    def owner(self) -> str:
        """The prefix of messages about the data."""
        return f"data set {PREFIX}{self.folder.name}"

    @property
    def name(self) -> str:
        """The prefix of the data set's cache folder."""
        return f"leaf-{self.folder.name}"

    def files(self) -> tuple[Path, ...]:
        """Return all files that the data set is read from."""
        return tuple(path for part in self.parts for path in part)

    def read(self) -> Arrays:
        """Read the arrays, `test_centres`, and `facts`: number of classes and scale of the inputs."""
        train, test = (self._part(title, paths) for title, paths in zip(PARTS, self.parts, strict=True))
        targets, classes = tables.targets([train.labels, test.labels], "y", self.classes)
        names = np.unique(train.users)
        number = {name: k for k, name in enumerate(names.tolist())}
        centres, tested = (
            np.array([number.get(user, -1) for user in part.users], dtype=np.int64) for part in (train, test)
        )
        arrays = bundle(train.inputs, targets[0], test.inputs, targets[1], centres, targets[0].dtype.type)
        return {**arrays, "test_centres": tested, "facts": np.array([classes, 1.0])}

    def _part(self, title: str, paths: Sequence[Path]) -> _Part:
        """Read the rows of a part, ordered by user."""
        import pandas

        users = self._users(title, paths)
        names = [name for name in sorted(users) if len(users[name].y)]
        if not names:
            raise DataError(f"{self.owner}: no user has {title} rows")
        blocks = [self._inputs(title, name, users[name].x) for name in names]
        shape = self.shape or blocks[0].shape[1:]
        inputs = [
            self._shaped(block, shape, f"{name} of {title}")
            for name, block in zip(names, blocks, strict=True)
        ]
        rows = [(name, row) for name in names for row in range(len(users[name].y))]
        values = pandas.Series([users[name].y[row] for name, row in rows], dtype=object).infer_objects()
        frame = pandas.DataFrame({"y": values})

        def place(at: int) -> str:
            return "row {1} of user {0} (counted from 0)".format(*rows[at])

        labels = tables.Table(self.owner, title, frame, place)
        return _Part(np.concatenate(inputs), labels, [name for name, _ in rows])

    def _users(self, title: str, paths: Sequence[Path]) -> dict[str, _Rows]:
        """Read the rows of every user of a part."""
        result: dict[str, _Rows] = {}
        for path in paths:
            try:
                read = msgspec.json.decode(path.read_bytes().removeprefix(_BOM), type=_File)
            except (OSError, ValueError, RecursionError) as e:
                raise DataError(f"{self.owner}: {path} is no file of LEAF: {e}") from None
            if len(read.users) != len(read.num_samples):
                raise DataError(
                    f"{self.owner}: {path} has {len(read.users)} users, and num_samples of "
                    f"{len(read.num_samples)}"
                )
            for user, count in zip(read.users, read.num_samples, strict=True):
                rows = read.user_data.pop(user, None)
                if user in result or rows is None:
                    what = "is given twice" if user in result else "has no user_data"
                    raise DataError(f"{self.owner}: user {user} {what} ({path})")
                if not len(rows.x) == len(rows.y) == count:
                    raise DataError(
                        f"{self.owner}: user {user} of {title} has {len(rows.x)} x, {len(rows.y)} y and "
                        f"num_samples {count} ({path})"
                    )
                result[user] = rows
            if others := [user for user, rows in read.user_data.items() if rows.x or rows.y]:
                raise DataError(f"{self.owner}: {path} has user_data of {others[0]}, who is not in its users")
        return result

    def _inputs(self, title: str, user: str, x: Sequence[Any]) -> Array:
        """Convert a user's inputs to float32, (n, ...)."""
        try:
            array = np.asarray(x)
        except (ValueError, OverflowError):
            array = np.array(None)
        if array.dtype.kind in "iu" and rounded(array).any():
            raise DataError(f"{self.owner}: user {user} of {title} has whole numbers that float32 rounds")
        if array.ndim >= 2 and array.dtype.kind in "biuf" and array.size:
            return array.astype(np.float32)
        kinds = {type(value).__name__ for value in x}
        what = "text" if kinds == {"str"} else "no lists of numbers of one shape"
        raise DataError(
            f"{self.owner}: x of user {user} of {title} is {what}; an input is a list of numbers. Other data "
            "come through FILE.py:NAME"
        )

    def _shaped(self, array: Array, shape: tuple[int, ...], user: str) -> Array:
        """Reshape a user's inputs if the spec gives a shape; check their shape."""
        if self.shape and array[0].size == np.prod(shape):
            return array.reshape(len(array), *shape)
        if array.shape[1:] != shape:
            raise DataError(f"{self.owner}: x of user {user} has the shape {array.shape[1:]}, not {shape}")
        return array


def _files(folder: Path, part: str, text: str) -> tuple[Path, ...]:
    """Return the JSON files of a part, sorted by name."""
    single, several = folder / f"{part}.json", folder / part
    paths = sorted(several.glob("*.json")) if several.is_dir() else [single]
    for path in paths:
        if wrong := no_file(path):
            raise DataError(
                f"data set {text!r}: {path} {wrong}; it needs the folders train and test, or train.json and "
                "test.json (LEAF: preprocess.sh -t sample)"
            )
    if not paths:
        raise DataError(f"data set {text!r}: {several} has no files .json")
    return tuple(paths)
