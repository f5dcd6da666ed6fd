"""What a reader of one file format hands to load_dataset, before it becomes a Dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# train_inputs, train_targets, test_inputs, test_targets and, where a data set has one, centres.
# A plain mapping because each entry becomes one file of the cache.
Arrays = dict[str, Array]

REQUIRED = ("train_inputs", "train_targets", "test_inputs", "test_targets")


def bundle(
    train_inputs: Array,
    train_targets: Array,
    test_inputs: Array,
    test_targets: Array,
    centres: Array | None = None,
    targets: type[np.generic] = np.int64,
) -> Arrays:
    """Contiguous arrays: inputs (n, *shape) as they are, targets as `targets`, centres (n,) as int64."""
    arrays = {
        "train_inputs": np.ascontiguousarray(train_inputs),
        "train_targets": np.ascontiguousarray(train_targets, dtype=targets),
        "test_inputs": np.ascontiguousarray(test_inputs),
        "test_targets": np.ascontiguousarray(test_targets, dtype=targets),
    }
    if centres is not None:
        arrays["centres"] = np.ascontiguousarray(centres, dtype=np.int64)
    return arrays
