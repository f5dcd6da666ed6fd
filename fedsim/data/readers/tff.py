"""Reader of the federated data sets that TensorFlow Federated (TFF) publishes as HDF5 files.

There is one file for training and one for testing. Each has a group of columns per client:

    examples/<client id>/<column>         one row per example

    fed_emnist       pixels (n, 28, 28) float32, 1 is the background; label (n,) int32, 0..61
    fed_cifar100     image (n, 32, 32, 3) uint8; label (n,) int64, 0..99; coarse_label (n,)
    stackoverflow    strings, fedsim/data/readers/stackoverflow.py

Training clients become centres, numbered by their ids in sorted order (as strings: '10' is before
'2'); the examples of all test clients are pooled. Clients without examples are left out.

h5py is needed for these files only, so it is imported when such a file is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data.arrays import Array, Arrays, bundle
from fedsim.errors import DataError, UsageError


class ClientFile:
    """The clients of one open file: sorted ids, and columns that are read on request."""

    def __init__(self, path: Path, examples: Any) -> None:
        self.path, self._examples = path, examples
        self.ids: tuple[str, ...] = tuple(sorted(examples))

    def column(self, client: str, name: str, most: int | None = None) -> Array:
        """Return the first `most` rows of examples/<client>/<name> (None: all)."""
        key = f"examples/{client}/{name}"
        try:
            return np.asarray(self._examples[client][name][:most])
        except KeyError:
            raise DataError(f"{self.path} has no {key}; it is not the published file") from None
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{self.path}: {key} cannot be read ({error}); fetch it again") from error

    def alike(self, client: str, names: tuple[str, ...], columns: tuple[Array, ...]) -> None:
        """Check that the columns of a client have equally many rows."""
        counts = [len(column) for column in columns]
        if len(set(counts)) > 1:
            message = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True))
            raise DataError(
                f"{self.path}: examples/{client} has {message}; they do not belong together, fetch it again"
            )


@contextmanager
def opened(path: Path) -> Iterator[ClientFile]:
    try:
        h5py: Any = import_module("h5py")
    except ImportError:
        raise UsageError(
            f"{path.name} is an HDF5 file, which needs the package h5py: pip install h5py"
        ) from None
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DataError(f"{path} cannot be read as HDF5 ({error}); fetch it again") from None
    with file:
        examples = file.get("examples")
        if not isinstance(examples, h5py.Group) or not len(examples):
            raise DataError(f"{path} has no group 'examples' of clients; it is not the published file")
        yield ClientFile(path, examples)


def read_emnist(files: tuple[Path, ...]) -> Arrays:
    """Read inputs (671,585 train / 77,483 test, 1, 28, 28) uint8, targets 0..61 and centres 0..3399.

    The file's float32 pixels are k / 255 with whole k. The arrays have k = round(255 x) in a quarter of the
    memory (0.6 GB instead of 2.4); `scaled` inputs equal the values of the file.
    """
    return _read(files, "pixels", (28, 28), lambda pixels, owner: _as_bytes(pixels, owner)[:, None])


def read_cifar100(files: tuple[Path, ...]) -> Arrays:
    """Read inputs (50,000 / 10,000, 3, 32, 32) uint8, fine labels 0..99, centres 0..499 (100 rows each)."""
    return _read(files, "image", (32, 32, 3), _as_planes)


Convert = Callable[[Array, str], Array]


def _read(files: tuple[Path, ...], name: str, shape: tuple[int, ...], convert: Convert) -> Arrays:
    train, test = (_pooled(path, name, shape, convert) for path in files)
    return bundle(*train[:2], *test[:2], centres=train[2])


def _pooled(path: Path, name: str, shape: tuple[int, ...], convert: Convert) -> tuple[Array, Array, Array]:
    """Read the inputs, labels and client numbers of all rows of a file of images."""
    inputs, labels = [], []
    with opened(path) as file:
        for client in file.ids:
            images, label = file.column(client, name), file.column(client, "label")
            owner = f"{path}: examples/{client}/{name}"
            if images.shape[1:] != shape:
                raise DataError(f"{owner} has images of shape {images.shape[1:]}, not {shape}")
            if label.dtype.kind not in "iu" or label.size != len(label):
                raise DataError(f"{path}: examples/{client}/label is not one whole number per example")
            file.alike(client, (name, "label"), (images, label))
            if len(images):
                inputs.append(convert(images, owner))
                labels.append(label.reshape(-1))  # some copies of the files have (n, 1)
    if not inputs:
        raise DataError(f"{path} has no examples")
    centres = np.repeat(np.arange(len(labels)), [len(label) for label in labels])
    return np.concatenate(inputs), np.concatenate(labels), centres


def _as_bytes(pixels: Array, owner: str) -> Array:
    if pixels.dtype.kind != "f" or not (pixels.min() >= 0 and pixels.max() <= 1):
        raise DataError(f"{owner} are not grey values from 0 to 1; it is not the published file")
    return np.asarray(np.rint(pixels * 255), np.uint8)


def _as_planes(images: Array, owner: str) -> Array:
    if images.dtype != np.uint8:
        raise DataError(f"{owner} holds {images.dtype}, not bytes; it is not the published file")
    return images.transpose(0, 3, 1, 2)
