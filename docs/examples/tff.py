"""Data sets in the HDF5 files of TensorFlow Federated (TFF), with TFF's clients, and FedPA's model of EMNIST.

    pip install h5py
    TFF=DIR fedsim launch --dataset tff.py:emnist62 --model tff.py:cnn_emnist --partition natural \
        --clients 3400 --participation 100 --algo fedpa

The archives fed_emnist.tar.bz2 and fed_cifar100.tar.bz2 of https://storage.googleapis.com/tff-datasets-public/
are unpacked into DIR/fed_emnist and DIR/fed_cifar100. Each file, of training or of test examples, has a group
of columns per client, with one row per example:

    fed_emnist       examples/CLIENT/pixels (n, 28, 28) float32, 1 is the background; label (n,) int32, 0..61
    fed_cifar100     examples/CLIENT/image (n, 32, 32, 3) uint8; label (n,) int64, 0..99

Training clients with examples are the centres, numbered by their ids as text ('10' is before '2'). The
examples of all test clients are pooled.

Differs: CIFAR-100's images are whole; TFF crops 24x24 at random, flips and standardises each image.

Source: tff.simulation.datasets and tff.simulation.baselines.emnist of
https://github.com/google-parfait/tensorflow-federated, as in Al-Shedivat et al. 2021 (arXiv:2010.05273).
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from fedsim import DataError, Dataset


def images(name: str, column: str, shape: tuple[int, ...], classes: int) -> Dataset:
    """Read one of TFF's data sets of images, with `shape` as in its files."""
    folder = Path(os.environ.get("TFF", "")) / name
    inputs, targets, centres = pooled(folder / f"{name}_train.h5", column, shape)
    test_inputs, test_targets, _ = pooled(folder / f"{name}_test.h5", column, shape)
    return Dataset(
        name,
        inputs,
        targets,
        test_inputs,
        test_targets,
        classes,
        scale=255.0,
        centres=centres,
    )


def pooled(path: Path, column: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the inputs, labels and client numbers of all rows of a file."""
    import h5py  # the model does not need it

    inputs, labels = [], []
    with h5py.File(path, "r") as file:
        examples = file["examples"]
        for client in sorted(examples):
            rows, label = examples[client][column][:], examples[client]["label"][:].reshape(-1)
            if rows.shape != (len(label), *shape):
                raise DataError(
                    f"{path}: examples/{client} has {len(label)} labels and {column} of shape {rows.shape}"
                )
            if len(label):
                inputs.append(planes(rows))
                labels.append(label.astype(np.int64))
    centres = np.repeat(np.arange(len(labels)), [len(label) for label in labels])
    return np.concatenate(inputs), np.concatenate(labels), centres


def planes(rows: np.ndarray) -> np.ndarray:
    """Return images as bytes (n, channels, height, width).

    Grey values are k / 255 with whole k in the file; as bytes they take a quarter of the memory, and scaling
    restores them.
    """
    if rows.dtype.kind == "f":
        rows = np.rint(rows * 255).astype(np.uint8)
    return rows[:, None] if rows.ndim == 3 else rows.transpose(0, 3, 1, 2)


emnist62 = partial(images, "fed_emnist", "pixels", (28, 28), 62)
"""Digits and letters by 3,400 writers."""
cifar100_lda = partial(images, "fed_cifar100", "image", (32, 32, 3), 100)
"""CIFAR-100, divided among 500 clients by two-step LDA (Reddi et al. 2021, arXiv:2003.00295, App. F)."""


def cnn_emnist(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build conv3x3 32, conv3x3 64, max pool, FC 128, with dropout (TFF's create_conv_dropout_model).

    Weights are Glorot-normal, not truncated as in Keras; biases are zero. P = 1,206,590 for EMNIST.
    """
    channels, *sides = shape
    height, width = ((side - 4) // 2 for side in sides)
    net = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * height * width, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.zeros_(module.bias)
    return net
