"""Reader of data sets of the `datasets` package from a local folder; nothing is downloaded.

    hf:FOLDER,label=COLUMN,input=COLUMN,client=COLUMN,tokenizer=FOLDER,length=T,classes=C

FOLDER was written by save_to_disk, or has parquet, csv, json or image files that load_dataset can read. A
relative FOLDER is in the data folder. The splits are train, and test or validation.

    input        column of inputs; may be repeated for columns of features. Default: the only image column,
                 else input_ids, else (with a tokenizer) the only text, else all but label and client
        image    (channels, height, width), all of one size, scaled to 0 .. 1 (fedsim.data.readers.images)
        text     ids from the tokenizer in tokenizer=FOLDER (tokenizer.json), cut to `length` (default 128)
        list     integers are ids; floats are features
        numbers  columns of numbers or of names, as features (fedsim.data.readers.tables.features)
    category     column of features whose values, of any kind, are names; may be repeated
    label        column of targets (default: label, labels)
        class    integers or names: categorical (names as the train split numbers them, or sorted)
        list     one class per position, -1 for none: token_classes
        number   floats, or any numbers with classes=1: gaussian
        next     label=next: the next id at every position, token_classes over the vocabulary
    client       column that identifies the client of each row; clients are centres (partition `natural`)

Classes of the splits are matched by name; a class that train does not have is an error
(fedsim.data.readers.tables).

Rows of ids are filled to `length` (default: that of the longest row) with the tokenizer's padding id (0
without a tokenizer), and their targets with -1.

Source: https://huggingface.co/docs/datasets (load_from_disk, load_dataset).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import hub_folders
from fedsim.data.arrays import EXACT, NO_TARGET, Array, Arrays, bundle
from fedsim.data.readers import tables
from fedsim.data.readers.images import pixels
from fedsim.errors import DataError, FedsimError, UsageError
from fedsim.extras import needed
from fedsim.specs import Form, whole
from fedsim.user_files import no_folder, refuse_utf_16

PREFIX = "hf:"
KEYS = ("label", "input", "category", "client", "tokenizer", "length", "classes")
FORM = Form("hf", ("FOLDER[,KEY=VALUE,...]",), help=f"where KEY is one of {', '.join(KEYS)}")
LENGTH = 128
TEXT_HINT = "; a text needs input=COLUMN,tokenizer=FOLDER"
TEXTS = (".csv", ".tsv", ".txt", ".json", ".jsonl")


@dataclass(frozen=True)
class HubDataset:
    """The parts of a spec; `length` and `classes` are 0 if the spec does not give them."""

    folder: Path
    label: str
    client: str
    inputs: tuple[str, ...]
    categories: tuple[str, ...]
    tokenizer: Path | None
    length: int
    classes: int

    @staticmethod
    def parse(text: str, root: Path | None) -> HubDataset:
        """Parse a spec. root: the data folder, for relative folders; None is the working directory."""
        name, _, rest = text.removeprefix(PREFIX).partition(",")
        values, repeated = tables.options(rest, text, FORM, KEYS)
        numbers = {key: whole(values.get(key, "0")) for key in ("length", "classes")}
        if not name or min(numbers.values()) < 0:
            raise FORM.misuse("data set", text)
        folder = _there(name, root, text)
        tokenizer = _there(values["tokenizer"], root, text) if "tokenizer" in values else None
        label, client = values.get("label", ""), values.get("client", "")
        inputs, categories = repeated["input"], repeated["category"]
        return HubDataset(folder, label, client, inputs, categories, tokenizer, **numbers)

    def files(self) -> tuple[Path, ...]:
        """Return all files that the data set is read from, in the same order on every machine."""
        folders = [self.folder, *([self.tokenizer] if self.tokenizer else [])]
        return tuple(path for folder in folders for path in hub_folders.files_inside(folder))

    def read(self) -> Arrays:
        """Read the arrays, and `facts`: number of classes and scale of the inputs."""
        for path in self.files():
            if path.suffix in TEXTS:
                refuse_utf_16(path)
        splits = self._splits()
        names = tuple(splits[0].column_names)
        client = self.client
        label = self.label or next((name for name in ("label", "labels") if name in names), "")
        if label == "next":
            label = ""
        elif label not in names:
            raise tables.unknown_column(self.folder.name, "label", label, names)
        if client and client not in names:
            raise tables.unknown_column(self.folder.name, "client", client, names)
        if label and label not in splits[1].column_names:
            raise DataError(f"{self.owner}: its test split has no column {label}")
        inputs, white, features = self._inputs(splits, [n for n in names if n not in (label, client)])
        if inputs[0].shape[1:] != inputs[1].shape[1:]:
            raise DataError(
                f"{self.owner}: train inputs are {inputs[0].shape[1:]} each, test inputs "
                f"{inputs[1].shape[1:]}"
            )
        if label:
            targets, classes = self._targets(splits, label, inputs[0].shape[1:])
        else:
            targets = [_next_ids(rows, self._padding) for rows in inputs]
            outputs = int(max(i.max() for i in inputs)) + 1
            classes = max(outputs, self.classes, len(self._words) if self.tokenizer else 0)
        centres, *tested = [None]
        if client:
            parts = [s for s in _titled(splits) if client in s[1].column_names]
            owned = [_table(self.owner, title, split, [client], client) for title, split in parts]
            centres, *tested = tables.clients(owned, client)
        arrays = bundle(inputs[0], targets[0], inputs[1], targets[1], centres, targets[0].dtype.type)
        features |= {"test_centres": tested[0]} if tested else {}
        return {**arrays, **features, "facts": np.array([classes, white])}

    @property
    def name(self) -> str:
        """The prefix of the data set's cache folder."""
        return f"hf-{self.folder.name}"

    @property
    def owner(self) -> str:
        """The prefix of messages about the data."""
        return f"data set hf:{self.folder.name}"

    @property
    def _padding(self) -> int:
        padding = self._words.pad_token_id if self.tokenizer else None
        return 0 if padding is None else int(padding)

    @property
    def _words(self) -> Any:
        transformers = needed("transformers", "a tokenizer")
        hub_folders.check_configurations(Path(str(self.tokenizer)), "a tokenizer")
        return transformers.AutoTokenizer.from_pretrained(
            self.tokenizer, local_files_only=True, trust_remote_code=False
        )

    def _splits(self) -> tuple[Any, Any]:
        datasets = needed("datasets", f"data set hf:{self.folder.name}")
        datasets.disable_progress_bars()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                parts = hub_folders.load(self.folder, scratch)
            except FedsimError:
                raise
            except Exception as e:
                cause = e.__cause__ or e
                text = " ".join(str(cause).split())[:300]
                raise DataError(
                    f"{self.folder} cannot be read as a data set: {type(cause).__name__}: {text}"
                ) from e
        test = next((parts[name] for name in ("test", "validation") if name in parts), None)
        if "train" not in parts or test is None:
            raise DataError(
                f"{self.folder} has the splits {', '.join(parts)}; it needs train, and test or validation. "
                "Make one: datasets.Dataset.train_test_split(seed=0).save_to_disk(FOLDER)"
            )
        return parts["train"], test

    def _inputs(self, splits: Sequence[Any], rest: Sequence[str]) -> tuple[list[Array], float, Arrays]:
        """Return the inputs of every split, their scale (1 except for images), and feature names, if any."""
        train, names = splits[0], self.inputs
        if not names and not self.categories:
            names = self._default_input(splits[0], rest)
        for name in (*names, *self.categories):
            if name not in train.column_names:
                raise tables.unknown_column(self.folder.name, "input", name, train.column_names)
            if name not in splits[1].column_names:
                raise DataError(f"{self.owner}: its test split has no column {name}")
        if names and self.categories:
            names = tuple(dict.fromkeys((*names, *self.categories)))
        elif len(names) == 1 and type(train.features[names[0]]).__name__ == "Image":
            return *_images(splits, names[0], self.owner), {}
        elif len(names) == 1 and not _is_number(train.features[names[0]]):
            return [self._ids(title, split, names[0]) for title, split in _titled(splits)], 1.0, {}
        if self.label == "next":
            raise DataError(f"{self.owner}: say which column the ids are: input=COLUMN of {', '.join(rest)}")
        columns = names or rest
        if columns and all(type(train.features[n]).__name__.startswith("Array") for n in columns):
            stacked = [
                np.stack([np.asarray(s[n], dtype=np.float32) for n in columns], axis=1) for s in splits
            ]
            return stacked, 1.0, {}
        missing = [n for n in columns if n not in splits[1].column_names]
        if missing:
            raise DataError(f"{self.owner}: its test split has no column {', '.join(missing)}")
        for name in columns:
            _same_classes(splits, name, self.owner)
        parts = [_table(self.owner, title, split, columns) for title, split in _titled(splits)]
        inputs, labels = tables.features(parts, columns, bool(names), self.categories, TEXT_HINT)
        return inputs, 1.0, {"features": np.array(labels)}

    def _default_input(self, split: Any, names: Sequence[str]) -> tuple[str, ...]:
        images = [n for n in names if type(split.features[n]).__name__ == "Image"]
        texts = [n for n in names if str(getattr(split.features[n], "dtype", "")).endswith("string")]
        if len(images) == 1:
            return tuple(images)
        if "input_ids" in names:
            return ("input_ids",)
        return tuple(texts) if len(texts) == 1 and (self.tokenizer or texts == list(names)) else ()

    def _ids(self, title: str, split: Any, column: str) -> Array:
        """Convert a column of texts or lists to ids, int32 (n, T), or features, float32 (n, I)."""
        rows = list(split[column])
        if missing := [i for i, row in enumerate(rows) if row is None]:
            raise DataError(f"{self.owner}: {_place(title)(missing[0])}, column {column} has no value")
        if rows and isinstance(rows[0], str):
            if self.tokenizer is None:
                raise UsageError(
                    f"{self.owner}: column {column} is text; say tokenizer=FOLDER (with tokenizer.json)"
                )
            rows = self._words(rows, truncation=True, max_length=self.length or LENGTH)["input_ids"]
        return _lists(rows, self.length, self._padding, f"{self.owner}: column {column}")

    def _targets(self, splits: Sequence[Any], label: str, shape: tuple[int, ...]) -> tuple[list[Array], int]:
        """Return the targets of every split, and the number of outputs that they need."""
        if isinstance(splits[0][0][label], list):
            rows, outputs = _classes_by_place(splits, label, shape[0], self.owner)
            return rows, max(outputs, self.classes)
        parts = [_table(self.owner, title, split, [label], label) for title, split in _titled(splits)]
        return tables.targets(parts, label, self.classes)


def _there(name: str, root: Path | None, text: str) -> Path:
    path = Path(name).expanduser()
    path = path if path.is_absolute() or root is None else root / path
    if wrong := no_folder(path):
        what = f"there is no folder {path}" if wrong == "does not exist" else f"{path} {wrong}"
        raise DataError(
            f"data set {text!r}: {what}. A run downloads nothing: fetch the data first "
            "(datasets.load_dataset(NAME).save_to_disk(FOLDER)); relative folders lie in --data-dir"
        )
    return path


# ---- columns of a split as arrays


def _titled(splits: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the splits for training and testing with their names."""
    yield from zip(("train", "test"), splits, strict=True)


def _place(title: str) -> Callable[[int], str]:
    """Return a function that names a row of a split in messages."""
    return lambda row: f"row {row} of {title} (counted from 0)"


def _table(owner: str, title: str, split: Any, columns: Sequence[str], label: str = "") -> tables.Table:
    """Return some columns of a split as a table; classes of the column `label` are given by name."""
    import pandas

    frame = split.select_columns(list(columns)).to_pandas()
    for name in columns:
        feature = split.features[name]
        if type(feature).__name__ == "Json":  # pandas would give its values one type
            frame[name] = pandas.Series(list(split[name]), dtype=object)
        if name == label and type(feature).__name__ == "ClassLabel":
            codes = frame[name].fillna(-1).astype(int)
            codes = codes.where(codes.between(0, len(feature.names) - 1), -1)
            frame[name] = pandas.Categorical.from_codes(codes, categories=feature.names)
    return tables.Table(owner, title, frame, _place(title))


def _same_classes(splits: Sequence[Any], name: str, owner: str) -> None:
    """Refuse a feature column of classes if the splits number the names of the classes differently."""
    names = [getattr(split.features[name], "names", None) for split in splits]
    if names[0] != names[1]:
        raise DataError(
            f"{owner}: column {name} is numbered in another way in each split: "
            f"{tables.listed(names[0] or ())} in train, {tables.listed(names[1] or ())} in test"
        )


def _images(splits: Sequence[Any], column: str, owner: str) -> tuple[list[Array], float]:
    """Convert a column of images to inputs of every split; also return the value of white."""
    every = (
        (f"the image of {_place(title)(row)}", partial(split[column].__getitem__, row))
        for title, split in _titled(splits)
        for row in range(len(split))
    )
    stacked, white = pixels(every, owner)
    return [stacked[: len(splits[0])], stacked[len(splits[0]) :]], white


def _lists(rows: Sequence[Any], length: int, padding: int, what: str) -> Array:
    """Convert rows of ids to int32 (n, T), or rows of features to float32 (n, I)."""
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
    filled = _padded(values, longest, padding)
    if filled.max(initial=0) > EXACT:
        raise DataError(f"{what}: its ids reach {filled.max()}; they must be at most {EXACT}")
    return filled.astype(np.int32)


def _padded(values: Sequence[Array], length: int, padding: int) -> Array:
    """Return rows (n, length) int64, truncated or filled with `padding`."""
    filled = np.full((len(values), length), padding, dtype=np.int64)
    for row, value in zip(filled, values, strict=True):
        row[: min(len(value), length)] = value[:length]
    return filled


def _next_ids(ids: Array, padding: int) -> Array:
    """Return the id after every position; -1 at the end and where this id is padding."""
    shifted = np.full(ids.shape, NO_TARGET, dtype=np.int64)
    shifted[:, :-1] = np.where(ids[:, 1:] == padding, NO_TARGET, ids[:, 1:])
    return shifted


def _classes_by_place(splits: Sequence[Any], label: str, length: int, owner: str) -> tuple[list[Array], int]:
    """Convert lists of classes to targets (n, length), -1 for none; also return the number of classes."""
    rows = []
    names: list[Any] = [getattr(getattr(s.features[label], "feature", None), "names", None) for s in splits]
    for (title, split), own in zip(_titled(splits), names, strict=True):
        values = [np.asarray(row) for row in split[label]]
        if not all(value.ndim == 1 and (value.dtype.kind in "iub" or not value.size) for value in values):
            raise DataError(f"{owner}: column {label} of {title} has rows that are no lists of whole numbers")
        filled = _padded(values, length, NO_TARGET)
        if own != names[0]:
            there, known = list(own or ()), list(names[0] or ())
            occurring = {there[i] for i in np.unique(filled[filled >= 0])} if there and known else {""}
            if not occurring <= set(known):
                raise DataError(
                    f"{owner}: column {label} of {title} has the classes {tables.listed(there)}; "
                    f"those of train are {tables.listed(known)}"
                )
            number = [known.index(name) if name in known else NO_TARGET for name in there]
            filled = np.where(filled >= 0, np.array(number)[filled], filled)
        rows.append(filled)
    return rows, max(len(names[0] or ()), *(int(r.max()) + 1 for r in rows))


def _is_number(feature: Any) -> bool:
    """Return whether a column has numbers, one per row or in arrays."""
    return str(getattr(feature, "dtype", "")).startswith(("int", "float", "uint", "bool"))
