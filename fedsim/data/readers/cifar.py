"""Reader of CIFAR-10 and CIFAR-100, from the binary files or a lossy JPEG copy.

A row of a binary file consists of the label bytes (CIFAR-10: the class; CIFAR-100: coarse, then fine) and
3072 pixel bytes: red, green, blue, each 32 x 32 in row order. The other public format, a pickle, is not read.
"""

from __future__ import annotations

import io
import lzma
from pathlib import Path

import numpy as np

from fedsim.data.arrays import Array, Arrays, bundle
from fedsim.errors import DataError
from fedsim.foreign_files import read

_PIXELS = 3 * 32 * 32


def read_rows(path: Path, label_bytes: int) -> tuple[Array, Array]:
    """Read images (n, 3, 32, 32) uint8 and labels (n,) uint8 (the last label byte) from one file."""
    row = label_bytes + _PIXELS
    content = np.fromfile(path, np.uint8)
    if len(content) == 0 or len(content) % row:
        raise DataError(
            f"{path} holds {len(content)} bytes, not a whole number of rows of {row}; unpack it again"
        )
    rows = content.reshape(-1, row)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


def read_binary(files: tuple[Path, ...], label_bytes: int) -> Arrays:
    """Read training data from all files but the last, in order, and the test set from the last."""
    *train, test = (read_rows(path, label_bytes) for path in files)
    return bundle(
        np.concatenate([images for images, _ in train]),
        np.concatenate([labels for _, labels in train]),
        *test,
    )


def read_jpeg(path: Path) -> Arrays:
    """Read the lossy copy, an xz-compressed .npz.

    For train and test, it contains concatenated JPEG files (`*_jpeg` uint8), their lengths in bytes
    (`*_len`) and `*_labels`. Training images are in torchvision's order, test images sorted by class.
    """
    try:
        packed = np.load(io.BytesIO(lzma.decompress(read(path, links=True))), allow_pickle=False)
        parts = [
            (packed[f"{part}_jpeg"], packed[f"{part}_len"], packed[f"{part}_labels"])
            for part in ("train", "test")
        ]
    except (OSError, lzma.LZMAError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{path} is not the JPEG copy of CIFAR-10 ({error})") from error
    (train_inputs, train_targets), (test_inputs, test_targets) = (
        (_decode(path, stream, lengths), labels) for stream, lengths, labels in parts
    )
    return bundle(train_inputs, train_targets, test_inputs, test_targets)


def _decode(path: Path, stream: Array, lengths: Array) -> Array:
    """Decode n concatenated JPEG files in `stream` to images (n, 3, 32, 32) uint8."""
    try:
        # Use Pillow, not torchvision.io, to get the same pixels as the script that unpacks the copy.
        from PIL import Image
    except ImportError as error:
        raise DataError(f"{path} needs the package pillow to decode its images") from error
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) == 0 or ends[-1] != len(stream):
        raise DataError(f"{path}: the lengths of its images do not add up to its size")
    data = stream.tobytes()
    images = np.empty((len(ends), 32, 32, 3), np.uint8)
    for i, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        try:
            with Image.open(io.BytesIO(data[end - length : end]), formats=("JPEG",)) as image:
                images[i] = np.asarray(image.convert("RGB"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: image {i} is not a 32 x 32 JPEG ({error})") from error
    return images.transpose(0, 3, 1, 2)
