"""Marks on tensors that their owner no longer needs, so that a computation may overwrite them.

A task does not change its arguments. But a worker that has read a large state from a file for one task holds
the only reference to it, and with 16 million parameters each copy of a vector takes 65 MB in every worker.
Such tensors are marked, and the few functions that can save a copy check the mark. The results are the same.
The sums of a fold are marked, too, while uploads are added to them.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from fedsim.wire.schema import tensors_of

T = TypeVar("T")
_MARK = "_fedsim_expendable"


def give_up(value: T, above: int) -> T:
    """Mark all tensors of a value with more than `above` bytes; only the value's recipient reads them."""
    for tensor in tensors_of(value):
        if tensor.nbytes > above:
            setattr(tensor, _MARK, True)
    return value


def keep(value: object) -> None:
    """Remove the marks from all tensors of a value, because it has an owner again."""
    for tensor in tensors_of(value):
        if hasattr(tensor, _MARK):
            delattr(tensor, _MARK)


def owned(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values that may be overwritten: `tensor` if marked, else a copy."""
    return tensor if hasattr(tensor, _MARK) else tensor.clone()


def spent(value: T) -> T | None:
    """Return the value if all its vectors are marked, else None."""
    return value if all(hasattr(t, _MARK) for t in tensors_of(value) if t.dim()) else None
