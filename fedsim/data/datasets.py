"""Load data sets as plain arrays, from files (decoded once per machine) or from a user's Python file."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import plugins
from fedsim.data.arrays import ARRAY_RULES, REQUIRED, Array, Arrays, check_array, checked
from fedsim.data.cache import cached
from fedsim.data.catalogue import DATASETS, DatasetInfo
from fedsim.data.readers import cifar, credit, digits, heart, idx, table_files
from fedsim.errors import DataError, UsageError, unknown
from fedsim.experiment import plain_number
from fedsim.removed import removed
from fedsim.specs import Form, parse
from fedsim.user_files import is_table, no_file, no_folder

__all__ = ["DATASETS", "Dataset", "DatasetInfo", "load_dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set. All arrays are read-only; cached arrays are memory-mapped.

    train_inputs, test_inputs     (n, *shape); uint8 for images, float32 for tables, int32 for tokens
    train_targets, test_targets   (n,) int64, 0..classes-1; for other likelihoods, see fedsim.data.arrays
    classes                       number of outputs of a model per example (or token)
    scale                         "scaled" inputs are x / scale, "raw" inputs are x, both as float32;
                                  255 for images (digits: 16), 1 for tables
    centres                       (n,) int64, natural client of every training row, or None
    likelihood                    meaning of the targets: a name in fedsim.learning.likelihoods
    features                      names of the input columns, for the manifest; () if there are none
    test_centres                  (n,) int64, natural client of every test row, -1 for none; or None. With it,
                                  partition `natural` scores each client on the client's own test rows
    dropped                       number of rows left out because of a missing value, for the manifest

    Every process creates the data set itself, so a user's function must return the same numbers each time:
    use a generator with a fixed seed, never the clock, a global generator or the order of a set.

    Examples:
        >>> import numpy as np
        >>> import fedsim
        >>> inputs = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
        >>> targets = (inputs[:, 0] > 0).astype(np.int64)
        >>> halves = fedsim.Dataset("halves", inputs[:40], targets[:40], inputs[40:], targets[40:], classes=2)
        >>> run = fedsim.run(algo="fedavg", dataset=halves, model="logistic", clients=2, rounds=1, quiet=True)
        >>> run.status
        'done'
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
    features: tuple[str, ...] = ()
    test_centres: Array | None = None
    dropped: int = 0


def load_dataset(name: str, data_dir: Path | None = None) -> Dataset:
    """Load a data set: NAME, FILE.py:NAME or FILE.csv,label=COLUMN.

    NAME is in DATASETS, with files in `data_dir` (default: $FEDSIM_DATA). FILE.py:NAME is a Dataset, or a
    function without arguments that returns one. FILE.csv is described in fedsim.data.readers.table_files.

    Raises:
        UsageError: If the name is unknown or a user's Python file is wrong.
        DataError: If a file is missing or malformed, or if arrays do not fit.

    Examples:
        >>> import fedsim
        >>> digits = fedsim.load_dataset("digits")
        >>> digits.train_inputs.shape, digits.classes
        ((1442, 1, 8, 8), 10)
    """
    if not isinstance(name, str):
        raise UsageError(f"a data set is a name such as 'digits', FILE.py:NAME or FILE.csv, not {name!r}")
    if plugins.is_spec(name):
        return _users(name)
    if is_table(name):
        return _table(name, data_dir)
    parse(name, "data set", {known: Form(known) for known in DATASETS})
    info = DATASETS[name]
    if not info.files:
        arrays = digits.read_digits(digits.digits_file())
    else:
        sources, read = _source(info, _data_dir(data_dir))
        owner, hint = f"data set {info.name!r}", "a file is not the public one"

        def build() -> Arrays:
            return checked(owner, info.shape, info.classes, read(), hint, "categorical")

        arrays = cached(info.name, sources, build)
    for array in arrays.values():
        array.setflags(write=False)
    named: dict[str, Any] = dict(arrays)
    return Dataset(name=name, classes=info.classes, scale=info.scale, **named)


def _table(spec: str, data_dir: Path | None) -> Dataset:
    """Load a file with a table."""
    described = table_files.TableFile.parse(spec, _data_dir(data_dir))
    files = described.files()
    # relative paths are part of the cache key, because they tell a table from its test rows
    named = (spec, *(os.path.relpath(file, described.folder) for file in files))
    options = hashlib.sha256(os.fsencode("\0".join(named))).hexdigest()[:8]
    arrays = cached(f"{described.name}-{options}", files, described.read)
    classes, dropped = arrays.pop("facts").tolist()
    features = tuple(str(name) for name in arrays.pop("features", ()))
    known: dict[str, Any] = dict(arrays)
    likelihood = "gaussian" if arrays["train_targets"].dtype == np.float32 else "categorical"
    dataset = Dataset(
        name=spec, classes=classes, likelihood=likelihood, features=features, dropped=dropped, **known
    )
    return _checked(dataset, described.owner)


def _data_dir(data_dir: Path | None) -> Path | None:
    selected = data_dir if data_dir is not None else os.environ.get("FEDSIM_DATA") or None
    return Path(selected).expanduser() if selected else None


def _source(info: DatasetInfo, root: Path | None) -> tuple[tuple[Path, ...], Callable[[], Arrays]]:
    """Return the files of `info` in `root`, all of which exist, and a function that reads them."""
    if root is None:
        raise DataError(
            f"data set {info.name!r} needs files: say where they are with --data-dir DIR or the "
            "environment variable FEDSIM_DATA (only 'digits' needs none)"
        )
    if wrong := no_folder(root):
        raise DataError(f"the data folder {root} (--data-dir or FEDSIM_DATA) {wrong}")
    if info.name in ("cifar10", "cifar100"):
        _refuse_pickles(info, root)
    packed = ("", ".gz") if info.name in ("mnist", "fashion_mnist") else ("",)
    files = _source_files(info, root, packed)
    readers: dict[str, Callable[[], Arrays]] = {
        "mnist": partial(idx.read_mnist_like, files),
        "fashion_mnist": partial(idx.read_mnist_like, files),
        "cifar10": partial(cifar.read_binary, files, 1),
        "cifar100": partial(cifar.read_binary, files, 2),
        "cifar10_jpeg": partial(cifar.read_jpeg, files[0]),
        "uci_credit": partial(credit.read_credit, files[0]),
        "flamby_heart": partial(heart.read_heart, files),
    }
    return files, readers[info.name]


def _refuse_pickles(info: DatasetInfo, root: Path) -> None:
    pickled = root / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[info.name]
    binary = root / Path(info.files[0]).parent
    if not binary.is_dir() and pickled.is_dir():
        raise DataError(
            f"data set {info.name!r}: {pickled} holds pickles, which are not read, because a pickle can run "
            f"code; the publisher has the same images as binary files: {info.source} (DIR is {root})"
        )


def _source_files(info: DatasetInfo, root: Path, suffixes: tuple[str, ...] = ("",)) -> tuple[Path, ...]:
    """Return the path of every file of `info`, with the first suffix for which the file exists."""
    result = []
    for name in info.files:
        variants = [root / (name + suffix) for suffix in suffixes]
        path = next((v for v in variants if not no_file(v)), None)
        if path is None:
            there = next((v for v in variants if os.path.lexists(v)), None)
            if there is not None:
                raise DataError(f"data set {info.name!r}: {there} {no_file(there)}")
            missing = " or ".join(str(v) for v in variants)
            raise DataError(
                f"data set {info.name!r}: {missing} is missing. To get it: {info.source} (DIR is {root})"
            )
        result.append(path)
    return tuple(result)


def _users(spec: str) -> Dataset:
    """Load a data set from a user's Python file."""
    dataset, owner = plugins.load(spec, "--dataset"), f"--dataset {plugins.short(spec)}"
    if callable(dataset):
        from fedsim.process_settings import settings_kept  # imports torch

        with settings_kept(), plugins.user_code_errors(spec, "--dataset", "calling it"):
            dataset = dataset()
    if not isinstance(dataset, Dataset):
        raise UsageError(
            f"{owner} must be a fedsim.data.Dataset, or a function without arguments that returns one; "
            f"it gives a {type(dataset).__name__}"
        )
    return _checked(dataset, owner)


def _checked(dataset: Dataset, owner: str) -> Dataset:
    """Check everything in a user's data set that an experiment relies on; make its arrays read-only."""
    if gone := removed("likelihood", str(dataset.likelihood)):
        raise UsageError(f"{owner}: {gone}")
    if dataset.likelihood not in ARRAY_RULES:
        raise unknown(f"likelihood of {owner}", str(dataset.likelihood), ARRAY_RULES)
    optional = ("centres", "test_centres")
    names = (*REQUIRED, *(name for name in optional if getattr(dataset, name) is not None))
    for name in names:
        check_array(owner, name, getattr(dataset, name), dataset.likelihood)
    least = ARRAY_RULES[dataset.likelihood].least
    dataset = replace(dataset, classes=plain_number(dataset.classes), scale=plain_number(dataset.scale))
    if type(dataset.classes) is not int or dataset.classes < least:
        raise DataError(
            f"{owner}: classes must be a whole number of at least {least}, not {dataset.classes!r}"
        )
    if not isinstance(dataset.scale, int | float) or not (math.isfinite(dataset.scale) and dataset.scale > 0):
        raise DataError(f"{owner}: scale must be a positive number, not {dataset.scale!r}")
    if dataset.test_inputs.dtype != dataset.train_inputs.dtype:
        raise DataError(
            f"{owner}: train_inputs are {dataset.train_inputs.dtype} but test_inputs "
            f"{dataset.test_inputs.dtype}; they share one scale, so make them alike"
        )
    if dataset.likelihood == "token_classes" and dataset.scale != 1:
        raise DataError(f"{owner}: tokens are ids, so scale must be 1, not {dataset.scale!r}")
    if dataset.centres is not None and len(dataset.centres) != len(dataset.train_targets):
        raise DataError(
            f"{owner}: {len(dataset.centres)} centres but {len(dataset.train_targets)} training rows"
        )
    _check_test_centres(dataset, owner)
    arrays: Arrays = {name: np.ascontiguousarray(getattr(dataset, name)).view() for name in names}
    shape = dataset.train_inputs.shape[1:]
    hint = "train and test inputs must be alike"
    checked(owner, shape, dataset.classes, arrays, hint, dataset.likelihood)
    for array in arrays.values():
        array.setflags(write=False)  # a view, so the user's own array stays writable
    changes: dict[str, Any] = {**arrays, "scale": float(dataset.scale)}
    return replace(dataset, **changes)


def _check_test_centres(dataset: Dataset, owner: str) -> None:
    """Check that every test row belongs to a client with training rows, or to no client (-1)."""
    known, tested = dataset.centres, dataset.test_centres
    if tested is None:
        return
    if known is None:
        raise DataError(f"{owner}: test_centres are the clients of test rows, and there are no centres")
    if len(tested) != len(dataset.test_targets):
        raise DataError(f"{owner}: {len(tested)} test_centres but {len(dataset.test_targets)} test rows")
    if len(tested) and not -1 <= tested.min() <= tested.max() <= known.max():
        raise DataError(
            f"{owner}: test_centres reach from {tested.min()} to {tested.max()}; the centres are 0 to "
            f"{known.max()}, and -1 is none"
        )
