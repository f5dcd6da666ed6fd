"""A data set in LEAF's JSON (Caldas et al. 2018, arXiv:1812.01097), with LEAF's users as natural clients.

    LEAF=femnist/data fedsim launch --dataset leaf.py:femnist --model cnn_mcmahan --partition natural \
        --clients 30 --algo fedavg

The folder $LEAF has the folders train and test, which LEAF's `preprocess.sh -t sample` writes. Each of their
JSON files has rows of some users:

    {"users": ["bob", ...], "num_samples": [124, ...],
     "user_data": {"bob": {"x": [[NUMBER, ...], ...], "y": [CLASS, ...]}, ...}}

Users with training rows are the centres, numbered in the order of their names as text ('10' is before '2').
A test row of another user belongs to no client (-1). Text (Shakespeare, Sentiment140, Reddit) and images
given by file name (CelebA) are refused.

Source: data/utils/split_data.py and models/utils/model_utils.py of https://github.com/TalwalkarLab/leaf.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import DataError, Dataset


def leaf(shape: tuple[int, ...], classes: int) -> Dataset:
    """Read the data in $LEAF, of inputs of this shape and of labels from 0 to classes - 1."""
    folder = Path(os.environ.get("LEAF", ""))
    train, test = (users(folder / part) for part in ("train", "test"))
    number = {name: client for client, name in enumerate(sorted(train))}
    tested = {name: test[name] for name in sorted(test)}
    inputs, targets, centres = stacked({name: train[name] for name in number}, number, shape)
    test_inputs, test_targets, test_centres = stacked(tested, number, shape)
    return Dataset(
        f"leaf-{folder.resolve().parent.name}",
        inputs,
        targets,
        test_inputs,
        test_targets,
        classes,
        centres=centres,
        test_centres=test_centres,
    )


def users(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Return the rows x and y of every user that has any."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise DataError(f"{folder} has no files .json; LEAF names the folder with train and test")
    rows: dict[str, dict[str, list[Any]]] = {}
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        for name, count in zip(content["users"], content["num_samples"], strict=True):
            own = content["user_data"][name]
            if name in rows:
                raise DataError(f"{path}: user {name} is given twice")
            if not len(own["x"]) == len(own["y"]) == count:
                raise DataError(
                    f"{path}: user {name} has {len(own['x'])} x, {len(own['y'])} y and num_samples {count}"
                )
            rows[name] = own
    return {name: own for name, own in rows.items() if own["y"]}


def stacked(
    rows: dict[str, dict[str, list[Any]]], number: dict[str, int], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs (n, *shape) float32, targets (n,) int64 and clients (n,) int64 of the users' rows."""
    inputs, targets, clients = [], [], []
    for name, own in rows.items():
        x, y = np.array(own["x"]), np.array(own["y"])
        if x.dtype.kind not in "iuf" or x[0].size != np.prod(shape) or y.dtype.kind not in "iu":
            raise DataError(f"user {name}: x must be lists of {np.prod(shape)} numbers, and y whole numbers")
        inputs.append(x.reshape(-1, *shape).astype(np.float32))
        targets.append(y.astype(np.int64))
        clients.append(np.full(len(y), number.get(name, -1)))
    if not rows:
        raise DataError("no user has rows")
    return np.concatenate(inputs), np.concatenate(targets), np.concatenate(clients)


femnist = partial(leaf, shape=(1, 28, 28), classes=62)
"""Digits and letters by writer. Another data set of LEAF is one more line, with its shape and classes."""
