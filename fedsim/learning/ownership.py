"""Tensors that their owner needs no more: a computation may write its result over them.

A task does not change its arguments. A worker that has read a large state from its file for one task holds
the only reference to it, though, and with 16 million parameters each copy of a vector is 65 MB in every
worker. Such tensors carry a mark, and the few places at which it counts look at it. The numbers are the same.
The sums of a fold carry it, too, while uploads are added to them.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from fedsim.wire.schema import tensors_of

T = TypeVar("T")
_MARK = "_fedsim_expendable"


def give_up(value: T, above: int) -> T:
    """Mark all tensors of a value that have more bytes than `above`: nobody but who gets it reads them."""
    for tensor in tensors_of(value):
        if tensor.nbytes > above:
            setattr(tensor, _MARK, True)
    return value


def keep(value: object) -> None:
    """Remove the mark of all tensors of a value: it has an owner again."""
    for tensor in tensors_of(value):
        if hasattr(tensor, _MARK):
            delattr(tensor, _MARK)


def owned(tensor: Tensor) -> Tensor:
    """A tensor with the same values that may be written over: this one if it is marked, else a copy."""
    return tensor if hasattr(tensor, _MARK) else tensor.clone()


def spent(value: T) -> T | None:
    """The value if all its vectors may be written over, else None."""
    return value if all(hasattr(t, _MARK) for t in tensors_of(value) if t.dim()) else None
