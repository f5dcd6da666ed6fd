"""Data sets of the `datasets` package, from a local folder; nothing is downloaded.

    hf:FOLDER,label=COLUMN,input=COLUMN,client=COLUMN,tokenizer=FOLDER,length=T,classes=C

FOLDER is what save_to_disk wrote, or has parquet, csv, json or image files as load_dataset takes them; a
relative one lies in the data folder. Its splits are train, and test or validation.

    input        the column of inputs (default: the only image column, else input_ids, else, with a
                 tokenizer, the only text, else all but label and client); repeated: several of numbers
        image    (channels, height, width), all of one size, scaled to 0 .. 1 (fedsim.data.readers.images)
        text     ids of the tokenizer in FOLDER (tokenizer.json), `length` places (default 128)
        list     of whole numbers: ids; of numbers with a point: features
        numbers  columns of numbers, as features; another column among them is an error
    label        the column of targets (default: label, labels)
        class    whole numbers or names: categorical (names as the train split numbers them, or sorted)
        list     one class per place, -1 for none: token_classes
        number   with a point, or with classes=1: gaussian
        next     the next id of every place: token_classes over the vocabulary
    client       the column that names the client a row belongs to: the centres of partition `natural`

Classes of the splits are matched by name; one that train has not is an error (fedsim.data.readers.tables).

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
from fedsim.data.arrays import Array, Arrays
from fedsim.data.readers import hub_columns, tables
from fedsim.errors import DataError, FedsimError, UsageError
from fedsim.extras import needed
from fedsim.specs import Form, whole
from fedsim.user_files import no_folder, refuse_utf_16

PREFIX = "hf:"
KEYS = ("label", "input", "client", "tokenizer", "length", "classes")
FORM = Form("hf", ("FOLDER[,KEY=VALUE,...]",), help=f"where KEY is one of {', '.join(KEYS)}")
LENGTH = 128
TEXT_HINT = "; a text needs input=COLUMN,tokenizer=FOLDER"
TEXTS = (".csv", ".tsv", ".txt", ".json", ".jsonl")


@dataclass(frozen=True)
class HubDataset:
    """A spec in its parts; `length` is 0 and `classes` 0 where the spec does not say them."""

    folder: Path
    columns: Mapping[str, str]
    inputs: tuple[str, ...]
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
        values, inputs = tables.options(rest, text, FORM, KEYS)
        numbers = {key: whole(values.get(key, "0")) for key in ("length", "classes")}
        if not name or min(numbers.values()) < 0:
            raise FORM.misuse("data set", text)
        folder = _there(name, root, text)
        tokenizer = _there(values["tokenizer"], root, text) if "tokenizer" in values else None
        columns: dict[str, str] = {key: values[key] for key in ("label", "client") if key in values}
        return HubDataset(folder, columns, inputs, tokenizer, numbers["length"], numbers["classes"])

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
        for path in self.files():
            if path.suffix in TEXTS:
                refuse_utf_16(path)
        splits = self._splits()
        train, names = splits[0], tuple(splits[0].column_names)
        label = self._column("label", names, ("label", "labels")) if self._label != "next" else ""
        client = self._column("client", names, ()) if "client" in self.columns else ""
        if label and label not in splits[1].column_names:
            raise DataError(f"{self.owner}: its test split has no column {label}")
        inputs, white = self._inputs(splits, [n for n in names if n not in (label, client)])
        if inputs[0].shape[1:] != inputs[1].shape[1:]:
            raise DataError(
                f"{self.owner}: train inputs are {inputs[0].shape[1:]} each, test inputs "
                f"{inputs[1].shape[1:]}"
            )
        if label:
            targets, classes = self._targets(splits, label, inputs[0].shape[1:])
        else:
            targets = [hub_columns.next_ids(rows, self._padding) for rows in inputs]
            outputs = int(max(i.max() for i in inputs)) + 1
            classes = max(outputs, self.classes, self._vocabulary)
        arrays = {
            "train_inputs": inputs[0],
            "train_targets": targets[0],
            "test_inputs": inputs[1],
            "test_targets": targets[1],
            "facts": np.array([classes, white]),
        }
        if client:
            arrays["centres"] = tables.clients(
                hub_columns.table(self.owner, "train", train, [client], client), client
            )
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    @property
    def name(self) -> str:
        """The prefix of its cache folder."""
        return f"hf-{self.folder.name}"

    @property
    def owner(self) -> str:
        """The prefix of messages about the data."""
        return f"data set hf:{self.folder.name}"

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

    def _column(self, key: str, names: Sequence[str], defaults: Sequence[str]) -> str:
        column = self.columns.get(key) or next((d for d in defaults if d in names), "")
        if column not in names:
            raise tables.unknown_column(self.folder.name, key, column, names)
        return column

    def _inputs(self, splits: Sequence[Any], rest: Sequence[str]) -> tuple[list[Array], float]:
        """The inputs of every split, and the number that stands for white (1 where there is none)."""
        train, names = splits[0], self.inputs or self._default_input(splits[0], rest)
        for name in names:
            if name not in train.column_names:
                raise tables.unknown_column(self.folder.name, "input", name, train.column_names)
            if name not in splits[1].column_names:
                raise DataError(f"{self.owner}: its test split has no column {name}")
        if len(names) == 1 and type(train.features[names[0]]).__name__ == "Image":
            return hub_columns.images(splits, names[0], self.owner)
        if len(names) == 1 and not hub_columns.is_number(train.features[names[0]]):
            return [self._ids(title, split, names[0]) for title, split in hub_columns.titled(splits)], 1.0
        if self._label == "next":
            raise DataError(f"{self.owner}: say which column the ids are: input=COLUMN of {', '.join(rest)}")
        columns = names or rest
        if columns and all(type(train.features[n]).__name__.startswith("Array") for n in columns):
            return [
                np.stack([np.asarray(s[n], dtype=np.float32) for n in columns], axis=1) for s in splits
            ], 1.0
        missing = [n for n in columns if n not in splits[1].column_names]
        if missing:
            raise DataError(f"{self.owner}: its test split has no column {', '.join(missing)}")
        for name in columns:
            hub_columns.same_classes(splits, name, self.owner)
        parts = [
            hub_columns.table(self.owner, title, split, columns)
            for title, split in hub_columns.titled(splits)
        ]
        return [*tables.features(parts, columns, bool(names), TEXT_HINT)], 1.0

    def _default_input(self, split: Any, names: Sequence[str]) -> tuple[str, ...]:
        images = [n for n in names if type(split.features[n]).__name__ == "Image"]
        texts = [n for n in names if str(getattr(split.features[n], "dtype", "")).endswith("string")]
        if len(images) == 1:
            return tuple(images)
        if "input_ids" in names:
            return ("input_ids",)
        return tuple(texts) if len(texts) == 1 and (self.tokenizer or texts == list(names)) else ()

    def _ids(self, title: str, split: Any, column: str) -> Array:
        """A column of texts or of lists: ids as int32 (n, T), or features as float32 (n, I)."""
        rows = list(split[column])
        if missing := [i for i, row in enumerate(rows) if row is None]:
            raise DataError(
                f"{self.owner}: {hub_columns.place(title)(missing[0])}, column {column} has no value"
            )
        if rows and isinstance(rows[0], str):
            if self.tokenizer is None:
                raise UsageError(
                    f"{self.owner}: column {column} is text; say tokenizer=FOLDER (with tokenizer.json)"
                )
            rows = self._words(rows, truncation=True, max_length=self.length or LENGTH)["input_ids"]
        return hub_columns.lists(rows, self.length, self._padding, f"{self.owner}: column {column}")

    def _targets(self, splits: Sequence[Any], label: str, shape: tuple[int, ...]) -> tuple[list[Array], int]:
        """Targets of every split, and how many outputs they need."""
        if isinstance(splits[0][0][label], list):
            rows, outputs = hub_columns.classes_by_place(splits, label, shape[0], self.owner)
            return rows, max(outputs, self.classes)
        parts = [
            hub_columns.table(self.owner, title, split, [label], label)
            for title, split in hub_columns.titled(splits)
        ]
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


def likelihood_of(targets: Array) -> str:
    """The likelihood that fits the targets."""
    if targets.dtype == np.float32:
        return "gaussian"
    return "categorical" if targets.ndim == 1 else "token_classes"
