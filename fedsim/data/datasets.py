"""Data sets by name: files in a data folder become plain arrays, decoded once per machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fedsim.data import cifar, credit, digits, heart, idx
from fedsim.data.arrays import Array, Arrays
from fedsim.data.cache import cached
from fedsim.data.catalogue import DATASETS, DatasetInfo
from fedsim.errors import DataError, unknown

__all__ = ["DATASETS", "Dataset", "DatasetInfo", "load_dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set; all arrays are read-only, memory-mapped where they come from the cache.

    train_inputs, test_inputs     (n, *shape); uint8 for images, float32 for tables
    train_targets, test_targets   (n,) int64, 0..classes-1
    scale                         "scaled" inputs are x / scale, "raw" are x, both as float32;
                                  255 for images (digits: 16), 1 for tables
    centres                       (n,) int64, the natural client of every training row, or None
    """

    name: str
    train_inputs: Array
    train_targets: Array
    test_inputs: Array
    test_targets: Array
    classes: int
    scale: float
    centres: Array | None


def load_dataset(name: str, data_dir: Path | None = None) -> Dataset:
    """The data set `name` of DATASETS from `data_dir` (default: $FEDSIM_DATA).

    Raises UsageError for an unknown name, DataError for a missing or malformed file.
    """
    info = DATASETS.get(name)
    if info is None:
        raise unknown("data set", name, DATASETS)
    if not info.files:
        arrays = digits.read_digits(digits.digits_file())
    else:
        sources, read = _source(info, _data_dir(name, data_dir))
        arrays = cached(name, sources, lambda: _checked(info, read()))
    for array in arrays.values():
        array.setflags(write=False)
    return Dataset(
        name=name,
        train_inputs=arrays["train_inputs"],
        train_targets=arrays["train_targets"],
        test_inputs=arrays["test_inputs"],
        test_targets=arrays["test_targets"],
        classes=info.classes,
        scale=info.scale,
        centres=arrays.get("centres"),
    )


def _data_dir(name: str, data_dir: Path | None) -> Path:
    chosen = data_dir if data_dir is not None else os.environ.get("FEDSIM_DATA") or None
    if chosen is None:
        raise DataError(
            f"data set {name!r} needs files: say where they are with --data-dir DIR or the "
            "environment variable FEDSIM_DATA (only 'digits' needs none)"
        )
    path = Path(chosen).expanduser()
    if not path.is_dir():
        raise DataError(f"the data folder {path} (--data-dir or FEDSIM_DATA) does not exist")
    return path


def _source(info: DatasetInfo, root: Path) -> tuple[tuple[Path, ...], Callable[[], Arrays]]:
    """The files that `info` is read from in `root`, all existing, and how to read them."""
    if info.name in ("mnist", "fashion_mnist"):
        files = _present(info, root, suffixes=("", ".gz"))
        return files, partial(idx.read_mnist_like, files)
    if info.name in ("cifar10", "cifar100"):
        return _cifar_source(info, root)
    files = _present(info, root)
    if info.name == "cifar10_jpeg":
        return files, partial(cifar.read_jpeg, files[0])
    if info.name == "uci_credit":
        return files, partial(credit.read_credit, files[0])
    return files, partial(heart.read_heart, files)


def _cifar_source(info: DatasetInfo, root: Path) -> tuple[tuple[Path, ...], Callable[[], Arrays]]:
    label_bytes = 1 if info.name == "cifar10" else 2
    pickled = root / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[info.name]
    binary = root / Path(info.files[0]).parent
    if not binary.is_dir() and pickled.is_dir():
        files = tuple(sorted(path for path in pickled.iterdir() if path.is_file()))
        return files, partial(cifar.read_torchvision, root, info.name)
    files = _present(info, root)
    return files, partial(cifar.read_binary, files, label_bytes)


def _present(info: DatasetInfo, root: Path, suffixes: tuple[str, ...] = ("",)) -> tuple[Path, ...]:
    """The first existing variant of every file of `info`; DataError names the missing one."""
    found = []
    for name in info.files:
        variants = [root / (name + suffix) for suffix in suffixes]
        path = next((v for v in variants if v.is_file()), None)
        if path is None:
            missing = " or ".join(str(v) for v in variants)
            raise DataError(
                f"data set {info.name!r}: {missing} is missing. To get it: {info.source} (DIR is {root})"
            )
        found.append(path)
    return tuple(found)


def _checked(info: DatasetInfo, arrays: Arrays) -> Arrays:
    """The same arrays, if they are what the catalogue promises."""
    for part in ("train", "test"):
        inputs, targets = arrays[f"{part}_inputs"], arrays[f"{part}_targets"]
        if inputs.shape[1:] != info.shape:
            raise DataError(
                f"data set {info.name!r}: the {part} inputs have shape {inputs.shape[1:]} each, "
                f"not {info.shape}; a file is not the public one"
            )
        if len(inputs) != len(targets) or len(targets) == 0:
            raise DataError(
                f"data set {info.name!r}: {len(inputs)} {part} inputs but {len(targets)} labels; "
                "the files do not belong together"
            )
        if targets.min() < 0 or targets.max() >= info.classes:
            raise DataError(
                f"data set {info.name!r}: {part} labels reach from {targets.min()} to "
                f"{targets.max()}, not 0 to {info.classes - 1}"
            )
        if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
            raise DataError(f"data set {info.name!r}: a {part} input is not a finite number")
    return arrays
