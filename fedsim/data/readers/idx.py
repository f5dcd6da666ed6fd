"""Reader of MNIST's idx files, compressed (.gz) or not.

An idx file of bytes consists of 0, 0, 8 (unsigned byte), the number of dimensions, one big-endian uint32
per dimension, and the values in row order.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from fedsim.data.arrays import Array, Arrays, bundle
from fedsim.errors import DataError
from fedsim.foreign_files import read

_UNSIGNED_BYTE = 8


def read_idx(path: Path, dimensions: int) -> Array:
    """Read one idx file as a uint8 array; DataError if its header or size is wrong."""
    try:
        content = read(path, links=True)
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from error
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise DataError(
            f"{path} is not an idx file of bytes with {dimensions} dimensions: it starts with "
            f"{content[:4].hex(' ') or 'nothing'}, not 00 00 08 {dimensions:02x}; fetch it again"
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, offset=4))
    size = header + math.prod(shape)
    if len(content) != size:
        raise DataError(
            f"{path} should hold {size} bytes for its shape {shape} but holds {len(content)}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_mnist_like(files: tuple[Path, ...]) -> Arrays:
    """Read (train images, train labels, test images, test labels); inputs (n, 1, rows, columns) uint8."""
    train_images, train_labels, test_images, test_labels = files
    return bundle(
        read_idx(train_images, 3)[:, None],
        read_idx(train_labels, 1),
        read_idx(test_images, 3)[:, None],
        read_idx(test_labels, 1),
    )
