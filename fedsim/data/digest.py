"""One number for everything that an experiment reads: two machines with the same digest have the same data,
in the same split."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from fedsim.data.arrays import Array
from fedsim.data.datasets import Dataset

ROWS = 4096


def data_digest(dataset: Dataset, clients: Sequence[Array]) -> str:
    """32 hexadecimal digits (xxh3_128) over shapes, dtypes and values of each client's rows in their order,
    and of what is scored. clients: rows by client."""
    hashed = xxhash.xxh3_128()
    for k, rows in enumerate(clients):
        for values in (dataset.train_inputs, dataset.train_targets):
            hashed.update(f"client {k} {values.dtype.str} {values.shape[1:]} {len(rows)}".encode())
            for at in range(0, len(rows), ROWS):
                hashed.update(values[rows[at : at + ROWS]].tobytes())
    for values in (dataset.test_inputs, dataset.test_targets):
        hashed.update(f"test {values.dtype.str} {values.shape}".encode())
        for at in range(0, len(values), ROWS):
            hashed.update(values[at : at + ROWS].tobytes())
    return hashed.hexdigest()
