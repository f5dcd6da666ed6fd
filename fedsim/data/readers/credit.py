"""Reader of UCI Credit Approval, exactly as in the FedLap experiments.

Source: class FederatedUCICreditDataGenerator of the released bayes-admm history (see
docs/references/published-numbers.md#uci-credit). The published numbers depend on its quirks, which are kept:

- the first row is lost (pandas took it for a header);
- rows with a '?' are dropped: 652 of 689 remain;
- categorical columns are one-hot encoded, a binary column as one indicator of its second value in
  alphabetical order; these columns are followed by the numeric columns, RAW (up to 1e5);
- label 1 is '+', "approved" (the paper's text says "default on payments");
- scikit-learn splits the rows 80/20, stratified, random_state=1; rows stay in the shuffled order.

Differs: one-hot encoding is written out here instead of using pandas and OneHotEncoder.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from fedsim.data.arrays import Array, Arrays, bundle
from fedsim.errors import DataError
from fedsim.user_files import opened_text

_CATEGORICAL = (0, 3, 4, 5, 6, 8, 9, 11, 12)
_NUMERIC = (1, 2, 7, 10, 13, 14)
_LABEL = 15


def read_credit(path: Path) -> Arrays:
    """Read inputs (521 train / 131 test, 42) float32, targets {0, 1}; 236 training rows are positive."""
    from sklearn.model_selection import train_test_split

    rows = _complete_rows(path)
    try:
        numeric = np.array([[float(row[c]) for c in _NUMERIC] for row in rows])
    except ValueError as error:
        raise DataError(f"{path}: a numeric column holds something else ({error})") from error
    columns = [_one_hot([row[c] for row in rows]) for c in _CATEGORICAL]
    inputs = np.concatenate([*columns, numeric], axis=1).astype(np.float32)
    targets = np.array([row[_LABEL] == "+" for row in rows], dtype=np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        inputs, targets, test_size=0.2, random_state=1, stratify=targets
    )
    return bundle(train_x, train_y, test_x, test_y)


def _complete_rows(path: Path) -> list[list[str]]:
    """Return the rows without a missing value, except the first row."""
    with opened_text(path) as file:
        rows = [row for row in csv.reader(file) if row]
    for number, row in enumerate(rows, start=1):
        if len(row) != _LABEL + 1 or row[_LABEL] not in ("+", "-"):
            raise DataError(
                f"{path}: row {number} is not 15 attributes and a label + or -; fetch crx.data "
                "of UCI Credit Approval again"
            )
    return [row for row in rows[1:] if "?" not in row]


def _one_hot(values: list[str]) -> Array:
    """Return indicators (n, values) in alphabetical order; two values give one column, of the second."""
    known = sorted(set(values))
    columns = known[1:] if len(known) == 2 else known
    return np.array([[value == column for column in columns] for value in values], dtype=float)
