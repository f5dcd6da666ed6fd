"""Data sets of the `datasets` package, from a local folder; nothing is downloaded.

    hf:FOLDER,label=COLUMN,input=COLUMN,client=COLUMN,tokenizer=FOLDER,length=T,classes=C

FOLDER is what save_to_disk wrote, or has parquet, csv, json or image files as load_dataset takes them; a
relative one lies in the data folder. Its splits are train, and test or validation.

    input        the column of inputs (default: the only image column, else input_ids, else the only text)
        image    uint8 (channels, height, width), all of one size, divided by 255 when scaled
        text     ids of the tokenizer in FOLDER (tokenizer.json), `length` places (default 128)
        list     of whole numbers: ids; of numbers with a point: features
        numeric  without an input column: all numeric columns but label and client, as features
    label        the column of targets (default: label, labels)
        class    whole numbers or names: categorical (names in sorted order)
        list     one class per place, -1 for none: token_classes
        number   with a point: gaussian
        next     the next id of every place: token_classes over the vocabulary
    client       the column that names the client a row belongs to: the centres of partition `natural`

Rows of ids that are shorter than `length` are filled with the tokenizer's padding (0 without one), their
targets with -1.

Source: https://huggingface.co/docs/datasets (load_from_disk, load_dataset).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import hub_folders
from fedsim.data import vocabulary
from fedsim.data.arrays import Array, Arrays
from fedsim.errors import DataError, FedsimError, UsageError, unknown
from fedsim.extras import needed
from fedsim.specs import Form, key_values, whole

PREFIX = "hf:"
KEYS = ("label", "input", "client", "tokenizer", "length", "classes")
FORM = Form("hf", ("FOLDER[,KEY=VALUE,...]",), help=f"where KEY is one of {', '.join(KEYS)}")
LENGTH = 128


@dataclass(frozen=True)
class HubDataset:
    """A spec in its parts; `length` is 0 and `classes` 0 where the spec does not say them."""

    folder: Path
    columns: Mapping[str, str]
    tokenizer: Path | None
    length: int
    classes: int

    @staticmethod
    def parse(text: str, root: Path | None) -> HubDataset:
        """Take a spec apart.

        Args:
            text: The spec.
            root: The data folder, for relative folders; None: the working directory.

        Raises:
            UsageError: If a key is unknown or a value is wrong.
            DataError: If the folder does not exist.
        """
        name, _, rest = text.removeprefix(PREFIX).partition(",")
        values = dict(key_values(rest))
        for key in values:
            if key not in KEYS:
                raise unknown(f"key of data set {text!r}:", key, KEYS)
        numbers = {key: whole(values.get(key, "0")) for key in ("length", "classes")}
        if not name or min(numbers.values()) < 0 or not all(values.values()):
            raise FORM.misuse("data set", text)
        folder = _there(name, root, text)
        tokenizer = _there(values["tokenizer"], root, text) if "tokenizer" in values else None
        columns: dict[str, str] = {key: values[key] for key in ("label", "input", "client") if key in values}
        return HubDataset(folder, columns, tokenizer, numbers["length"], numbers["classes"])

    def files(self) -> tuple[Path, ...]:
        """All files that it is read from, in an order that does not depend on the machine.

        Raises:
            DataError: As fedsim.hub_folders.files_inside.
        """
        folders = [self.folder, *([self.tokenizer] if self.tokenizer else [])]
        return tuple(path for folder in folders for path in hub_folders.files_inside(folder))

    def read(self) -> Arrays:
        """The arrays, and `facts`: the number of classes and the scale of the inputs.

        Raises:
            UsageError: If the package is missing, or a column is named that is not there.
            DataError: If the data do not have one of the forms above.
        """
        train, test = self._splits()
        owner, names = f"data set hf:{self.folder.name}", tuple(train.column_names)
        label = self._column("label", names, ("label", "labels")) if self._label != "next" else ""
        client = self._column("client", names, ()) if "client" in self.columns else ""
        inputs = [self._inputs(split, names, (label, client), owner) for split in (train, test)]
        if inputs[0].shape[1:] != inputs[1].shape[1:]:
            raise DataError(
                f"{owner}: train inputs are {inputs[0].shape[1:]} each, test inputs {inputs[1].shape[1:]}"
            )
        if label:
            targets, classes = _targets([train, test], label, inputs[0].shape[1:], owner)
        else:
            targets, classes = (
                [_next(rows, self._padding) for rows in inputs],
                int(max(i.max() for i in inputs)) + 1,
            )
        classes = max(classes, self.classes, 0 if label else self._vocabulary)
        arrays = {
            "train_inputs": inputs[0],
            "train_targets": targets[0],
            "test_inputs": inputs[1],
            "test_targets": targets[1],
            "facts": np.array([classes, 255.0 if inputs[0].dtype == np.uint8 else 1.0]),
        }
        if client:
            arrays["centres"] = np.unique(np.asarray(train[client]), return_inverse=True)[1].astype(np.int64)
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    @property
    def _label(self) -> str:
        return self.columns.get("label", "")

    @property
    def _padding(self) -> int:
        padding = self._words.pad_token_id if self.tokenizer else None
        return 0 if padding is None else int(padding)

    @property
    def _vocabulary(self) -> int:
        return len(self._words) if self.tokenizer else 0

    @property
    def _words(self) -> Any:
        transformers = needed("transformers", "a tokenizer")
        hub_folders.check_tokenizer(Path(str(self.tokenizer)), "a tokenizer")
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
                text = " ".join(str(e).split())[:300]
                raise DataError(
                    f"{self.folder} cannot be read as a data set: {type(e).__name__}: {text}"
                ) from e
        test = next((parts[name] for name in ("test", "validation") if name in parts), None)
        if "train" not in parts or test is None:
            raise DataError(
                f"{self.folder} has the splits {', '.join(parts)}; it needs train, and test or validation. "
                "Make one: datasets.Dataset.train_test_split(seed=0).save_to_disk(FOLDER)"
            )
        return parts["train"], test

    def _column(self, key: str, names: Sequence[str], defaults: Sequence[str]) -> str:
        column = self.columns.get(key) or next((d for d in defaults if d in names), "")
        if column not in names:
            raise unknown(f"column of {self.folder.name} ({key}=):", column, names)
        return column

    def _inputs(self, split: Any, names: Sequence[str], taken: Sequence[str], owner: str) -> Array:
        column = self.columns.get("input") or _default_input(split, [n for n in names if n not in taken])
        if not column:
            numeric = [n for n in names if n not in taken and _is_number(split.features[n])]
            if not numeric or self._label == "next":
                raise DataError(
                    f"{owner}: say which column the inputs are: input=COLUMN of {', '.join(names)}"
                )
            return np.stack([np.asarray(split[n], dtype=np.float32) for n in numeric], axis=1)
        if column not in names:
            raise unknown(f"column of {self.folder.name} (input=):", column, names)
        if type(split.features[column]).__name__ == "Image":
            return _images(split[column], owner)
        rows = list(split[column])
        if rows and isinstance(rows[0], str):
            if self.tokenizer is None:
                raise UsageError(
                    f"{owner}: column {column} is text; say tokenizer=FOLDER (with tokenizer.json)"
                )
            rows = self._words(rows, truncation=True, max_length=self.length or LENGTH)["input_ids"]
        return _lists(rows, self.length, self._padding, f"{owner}: column {column}")


def _there(name: str, root: Path | None, text: str) -> Path:
    path = Path(name).expanduser()
    path = path if path.is_absolute() or root is None else root / path
    if not path.is_dir():
        raise DataError(
            f"data set {text!r}: there is no folder {path}. A run downloads nothing: fetch the data first "
            "(datasets.load_dataset(NAME).save_to_disk(FOLDER)); relative folders lie in --data-dir"
        )
    return path


def _default_input(split: Any, names: Sequence[str]) -> str:
    images = [n for n in names if type(split.features[n]).__name__ == "Image"]
    texts = [n for n in names if str(getattr(split.features[n], "dtype", "")).endswith("string")]
    if len(images) == 1:
        return images[0]
    return "input_ids" if "input_ids" in names else texts[0] if len(texts) == 1 else ""


def _is_number(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "float", "uint", "bool"))


def _images(images: Any, owner: str) -> Array:
    rows = [np.asarray(image, dtype=np.uint8) for image in images]
    if len({row.shape for row in rows}) != 1:
        raise DataError(f"{owner}: its images have several sizes or modes; resize and convert them first")
    stacked = np.stack(rows)
    return stacked[:, None] if stacked.ndim == 3 else stacked.transpose(0, 3, 1, 2)


def _lists(rows: Sequence[Any], length: int, padding: int, what: str) -> Array:
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
    return _filled(values, longest, padding).astype(np.int32)


def _filled(values: Sequence[Array], length: int, padding: int) -> Array:
    filled = np.full((len(values), length), padding, dtype=np.int64)
    for row, value in zip(filled, values, strict=True):
        row[: min(len(value), length)] = value[:length]
    return filled


def _next(ids: Array, padding: int) -> Array:
    """The id behind every place; -1 at the end and where it is padding."""
    shifted = np.full(ids.shape, vocabulary.NO_TARGET, dtype=np.int64)
    shifted[:, :-1] = np.where(ids[:, 1:] == padding, vocabulary.NO_TARGET, ids[:, 1:])
    return shifted


def _targets(
    splits: Sequence[Any], label: str, shape: tuple[int, ...], owner: str
) -> tuple[list[Array], int]:
    """Targets of every split, and how many classes they have (outputs, for numbers with a point)."""
    columns = [list(split[label]) for split in splits]
    if any(value is None for column in columns for value in column):
        raise DataError(f"{owner}: column {label} has rows without a value")
    first = columns[0][0]
    if isinstance(first, str):
        names = sorted({name for column in columns for name in column})
        return [np.searchsorted(names, column).astype(np.int64) for column in columns], len(names)
    if isinstance(first, list):
        rows = [_filled([np.asarray(r) for r in c], shape[0], vocabulary.NO_TARGET) for c in columns]
        return rows, int(max(r.max() for r in rows)) + 1
    if isinstance(first, float):
        return [np.asarray(column, dtype=np.float32)[:, None] for column in columns], 1
    named = getattr(splits[0].features[label], "num_classes", 0)
    rows = [np.asarray(column, dtype=np.int64) for column in columns]
    return rows, max(int(named or 0), int(max(r.max() for r in rows)) + 1)


def likelihood_of(targets: Array) -> str:
    """What targets as read here are."""
    if targets.dtype == np.float32:
        return "gaussian"
    return "categorical" if targets.ndim == 1 else "token_classes"
