"""Reader of scikit-learn's digits, the default data set, without importing scikit-learn.

The import takes over a second. Reading `datasets/data/digits.csv.gz` of the package takes less than 10 ms, so
the data set is not cached. Each line is one example: 64 pixel values 0..16 in row order, and the label.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
from pathlib import Path

import numpy as np

from fedsim.data.arrays import Array, Arrays, bundle
from fedsim.errors import DataError
from fedsim.foreign_files import read

# Every fifth example of each class, in file order, is a test example.
TEST_EVERY = 5


def digits_file() -> Path | None:
    """Return the csv file of the installed scikit-learn; None if it is not at its usual path."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("data set 'digits' needs scikit-learn: install the package scikit-learn")
    path = Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data" / "digits.csv.gz"
    return path if path.is_file() else None


def read_digits(path: Path | None) -> Arrays:
    """Read inputs (1442 train / 355 test, 1, 8, 8) uint8 of 0..16 and targets 0..9, in file order."""
    if path is None:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images, targets = np.asarray(bunch.data), np.asarray(bunch.target)
    else:
        content = gzip.decompress(read(path, links=True))
        table = np.loadtxt(io.BytesIO(content), delimiter=",", dtype=np.uint8)
        images, targets = table[:, :64], table[:, 64]
    images = images.astype(np.uint8).reshape(-1, 1, 8, 8)
    test = every_nth_of_class(targets, TEST_EVERY)
    return bundle(images[~test], targets[~test], images[test], targets[test])


def every_nth_of_class(targets: Array, n: int) -> Array:
    """Return a mask, (len(targets),) bool, of the n-th, 2n-th, ... example of each class."""
    mask = np.zeros(len(targets), dtype=bool)
    for label in np.unique(targets):
        mask[np.flatnonzero(targets == label)[n - 1 :: n]] = True
    return mask
