"""Marks on tensors that their owner no longer needs, so that a computation may overwrite them.

A task does not change its arguments, so it copies a tensor before an update in place. With 16 million
parameters, each copy takes 65 MB in every worker. A large state that a worker reads from a file for one task
has no other user, so the worker marks its tensors. Functions that check the mark avoid the copy; the results
are the same. The server's sums are also marked while uploads are added to them.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from fedsim.wire.schema import tensors_of

T = TypeVar("T")
_MARK = "_fedsim_expendable"


def give_up(value: T, above: int) -> T:
    """Mark the tensors of more than `above` bytes in a value that only its recipient reads from now on."""
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
