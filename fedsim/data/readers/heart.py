"""Reader of heart disease at four hospitals, prepared as in FLamby (fed_heart_disease, dataset.py).

The order of hospitals is Cleveland, Hungary, Switzerland, VA Long Beach. Columns 10, 11, 12 are dropped, then
rows with a '?'. scikit-learn splits the rows of each hospital 66/34 with random_state=43, stratified by
"label > 0" if both labels occur more than twice; rows stay in file order. Columns 2 (chest pain, 1..4) and 6
(resting ECG, 0..2) become indicators of all values but the first, after the other columns:

    0 age, 1 sex, 3 blood pressure, 4 cholesterol, 5 sugar, 7 heart rate, 8 angina, 9 ST depression,
    2=2, 2=3, 2=4, 6=1, 6=2          (13 features)

The test set pools the four hospitals; label 1 is disease of any degree.

Differs: features are raw. FLamby standardises them per hospital since 2022; the FedLap experiments used the
features before that step (docs/references/published-numbers.md#flamby-heart). FLamby joins hospitals in the
order in which the file system lists them; here the order is fixed.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from fedsim.data.arrays import Array, Arrays, bundle
from fedsim.errors import DataError
from fedsim.user_files import opened_text

_FIELDS = 14
_KEPT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
_INDICATORS = (2, 6)
_TRAIN = 0.66


def read_heart(files: tuple[Path, ...]) -> Arrays:
    """Read inputs (486 train / 254 test, 13) float32, targets {0, 1} and centres (486,): index in `files`."""
    tables = [_complete_rows(path) for path in files]
    inputs = _features(np.concatenate([features for features, _ in tables]))
    targets = np.concatenate([labels for _, labels in tables])
    centres = np.repeat(np.arange(len(tables)), [len(labels) for _, labels in tables])
    train = np.concatenate([_train_mask(labels) for _, labels in tables])
    return bundle(inputs[train], targets[train], inputs[~train], targets[~train], centres[train])


def _complete_rows(path: Path) -> tuple[Array, Array]:
    """Return the kept columns, (n, 10) float64, and the labels 0 / 1, (n,), of the complete rows."""
    with opened_text(path) as file:
        rows = [row for row in csv.reader(file) if row]
    kept = [[row[c] for c in _KEPT] + row[-1:] for row in rows if len(row) == _FIELDS]
    if len(kept) != len(rows):
        raise DataError(f"{path}: a row does not have {_FIELDS} fields; fetch it again")
    try:
        table = np.array([[float(v) for v in row] for row in kept if "?" not in row])
    except ValueError as error:
        raise DataError(f"{path}: a field is neither a number nor '?' ({error})") from error
    if len(table) == 0:
        raise DataError(f"{path} has no complete row")
    return table[:, :-1], (table[:, -1] > 0).astype(np.int64)


def _features(table: Array) -> Array:
    """Convert the kept columns (n, 10) of all hospitals to features (n, 13) float32 with indicators."""
    plain = [c for c in _KEPT if c not in _INDICATORS]
    indicators = [
        table[:, c, None] == np.unique(table[:, c])[None, 1:] for c in _INDICATORS
    ]  # boolean (n, values - 1) each
    return np.concatenate([table[:, plain], *indicators], axis=1).astype(np.float32)


def _train_mask(labels: Array) -> Array:
    """Return a mask, (n,) bool, of FLamby's training rows of one hospital."""
    from sklearn.model_selection import train_test_split

    counts = np.unique(labels, return_counts=True)[1]
    stratify = labels if len(counts) > 1 and counts.min() > 2 else None
    # Both sizes are written as in FLamby: 1 - .66 is not .34, which can change the rounding of n * size.
    train, _ = train_test_split(
        np.arange(len(labels)),
        test_size=1.0 - _TRAIN,
        train_size=_TRAIN,
        random_state=43,
        shuffle=True,
        stratify=stratify,
    )
    mask = np.zeros(len(labels), dtype=bool)
    mask[train] = True
    return mask
