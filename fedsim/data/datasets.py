"""Data sets by name: files in a data folder as plain arrays, decoded once per machine; or a user's own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import plugin
from fedsim.data import cifar, credit, digits, heart, idx
from fedsim.data.arrays import REQUIRED, Array, Arrays
from fedsim.data.cache import cached
from fedsim.data.catalogue import DATASETS, DatasetInfo
from fedsim.errors import DataError, UsageError, unknown

__all__ = ["DATASETS", "Dataset", "DatasetInfo", "load_dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set; all arrays are read-only, memory-mapped where they come from the cache.

    train_inputs, test_inputs     (n, *shape); uint8 for images, float32 for tables
    train_targets, test_targets   (n,) int64, 0..classes-1
    scale                         "scaled" inputs are x / scale, "raw" are x, both as float32;
                                  255 for images (digits: 16), 1 for tables
    centres                       (n,) int64, the natural client of every training row, or None
    likelihood                    what targets are: a name of fedsim.learning.likelihood

    Every process makes its own, so a user's must be the same numbers each time, in every process: draw
    from a generator with a fixed seed, and never from the clock, a global generator or a set's order.
    """

    name: str
    train_inputs: Array
    train_targets: Array
    test_inputs: Array
    test_targets: Array
    classes: int
    scale: float = 1.0
    centres: Array | None = None
    likelihood: str = "categorical"


def load_dataset(name: str, data_dir: Path | None = None) -> Dataset:
    """The data set `name` of DATASETS from `data_dir` (default: $FEDSIM_DATA), or path/to/file.py:NAME, a
    Dataset or a callable without arguments that returns one.

    Raises UsageError for an unknown name and for what is wrong with a user's file, DataError for a
    missing or malformed file and for arrays that do not fit.
    """
    if plugin.is_spec(name):
        return _users(name)
    info = DATASETS.get(name)
    if info is None:
        raise unknown("data set", name, DATASETS)
    if not info.files:
        arrays = digits.read_digits(digits.digits_file())
    else:
        sources, read = _source(info, _data_dir(name, data_dir))
        arrays = cached(name, sources, lambda: _public(info, read()))
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


def _public(info: DatasetInfo, arrays: Arrays) -> Arrays:
    """The same arrays, if they are what the catalogue promises."""
    return _checked(
        f"data set {info.name!r}", info.shape, info.classes, arrays, "a file is not the public one"
    )


def _checked(whose: str, shape: tuple[int, ...], classes: int, arrays: Arrays, hint: str) -> Arrays:
    """The same arrays, if they fit each other, the shape of one input and the classes."""
    for part in ("train", "test"):
        inputs, targets = arrays[f"{part}_inputs"], arrays[f"{part}_targets"]
        if inputs.shape[1:] != shape:
            raise DataError(
                f"{whose}: the {part} inputs have shape {inputs.shape[1:]} each, not {shape}; {hint}"
            )
        if len(inputs) != len(targets) or len(targets) == 0:
            raise DataError(
                f"{whose}: {len(inputs)} {part} inputs but {len(targets)} labels; they do not belong together"
            )
        if targets.min() < 0 or targets.max() >= classes:
            reach = f"from {targets.min()} to {targets.max()}"
            raise DataError(f"{whose}: {part} labels reach {reach}, not 0 to {classes - 1}")
        if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
            raise DataError(f"{whose}: a {part} input is not a finite number")
    return arrays


def _users(spec: str) -> Dataset:
    """The data set of a user's file, with everything checked that an experiment relies on."""
    made, whose = plugin.load(spec, "--dataset"), f"--dataset {plugin.short(spec)}"
    if callable(made):
        with plugin.blame(spec, "--dataset", "calling it"):
            made = made()
    if not isinstance(made, Dataset):
        raise UsageError(
            f"{whose} must be a fedsim.data.Dataset, or a function without arguments that returns one; "
            f"it gives a {type(made).__name__}"
        )
    names = REQUIRED if made.centres is None else (*REQUIRED, "centres")
    for name in names:
        _check_kind(whose, name, getattr(made, name))
    if type(made.classes) is not int or made.classes < 2:
        raise DataError(f"{whose}: classes must be a whole number of at least 2, not {made.classes!r}")
    if not isinstance(made.scale, int | float) or not (math.isfinite(made.scale) and made.scale > 0):
        raise DataError(f"{whose}: scale must be a positive number, not {made.scale!r}")
    if made.test_inputs.dtype != made.train_inputs.dtype:
        raise DataError(
            f"{whose}: train_inputs are {made.train_inputs.dtype} but test_inputs {made.test_inputs.dtype}; "
            "they share one scale, so make them alike"
        )
    if made.centres is not None and made.centres.shape != made.train_targets.shape:
        raise DataError(f"{whose}: {len(made.centres)} centres but {len(made.train_targets)} training rows")
    # contiguous, and read-only without a change to the user's own arrays
    arrays: Arrays = {name: np.ascontiguousarray(getattr(made, name)).view() for name in names}
    shape = made.train_inputs.shape[1:]
    _checked(whose, shape, made.classes, arrays, "train and test inputs must be alike")
    for array in arrays.values():
        array.setflags(write=False)
    changes: dict[str, Any] = {**arrays, "scale": float(made.scale)}
    return replace(made, **changes)


def _check_kind(whose: str, name: str, array: object) -> None:
    """Inputs are float32 or uint8 (n, ...), everything else int64 (n,)."""
    inputs = name.endswith("inputs")
    kinds = ("float32", "uint8") if inputs else ("int64",)
    if not isinstance(array, np.ndarray):
        raise DataError(f"{whose}: {name} must be a numpy array, not a {type(array).__name__}")
    if array.dtype.name not in kinds or not array.dtype.isnative:
        raise DataError(
            f"{whose}: {name} must be {' or '.join(kinds)}, not {array.dtype}; convert it with "
            f".astype(numpy.{kinds[0]})"
        )
    if array.ndim < 2 if inputs else array.ndim != 1:
        needed = "(examples, ...)" if inputs else "(examples,)"
        raise DataError(f"{whose}: {name} must have the shape {needed}, not {array.shape}")
