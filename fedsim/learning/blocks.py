"""Formulas over whole parameter vectors, evaluated in blocks that stay in the processor's cache.

The formula site * (q_k / q_g)^rho has six intermediate vectors in float64. For a model of 16 million
parameters, each vector takes 130 MB, which are allocated, written, read and freed. In blocks, each takes half
a megabyte, and the arguments are read only once. The results have the same bits, because the operations on
each entry are the same.

An algorithm states its formula as a method and decorates it:

    @elementwise
    def cavity(self, q, site): return q / site

    @accumulating
    def dual_step(self, site, q_k, q_g, *, rho): return site * (q_k / q_g) ** rho
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from fedsim.learning.ownership import spent
from fedsim.wire.schema import map_tensors, tensors_of

BLOCK = 65_536
"""Number of entries of a block: 512 KiB in float64."""
CACHED = 4
"""Number of blocks that fit into the cache; vectors of up to this many blocks are not cut."""
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def elementwise(formula: F) -> F:
    """Decorate a method that is a formula over vectors, so that it is evaluated block by block.

    Positional arguments and the result are those of `by_blocks`; keyword arguments are passed unchanged.
    """

    @wraps(formula)
    def evaluated(self: Any, *values: Any, **constants: Any) -> Any:
        return by_blocks(partial(formula, self, **constants), *values)

    return cast(F, evaluated)


def accumulating(formula: F) -> F:
    """Decorate, as `elementwise` does, a formula that returns the next value of its first argument.

    If the owner has given up the first argument (fedsim.learning.ownership), the result overwrites it.
    """

    @wraps(formula)
    def evaluated(self: Any, before: Any, *values: Any, **constants: Any) -> Any:
        return by_blocks(partial(formula, self, **constants), before, *values, out=spent(before))

    return cast(F, evaluated)


def by_blocks(formula: Callable[..., T], *values: Any, out: T | None = None) -> T:
    """Return formula(*values), computed block by block.

    formula: a function, elementwise in all vectors (P,) of its arguments. It returns a tensor (P,), or a
    dataclass of tensors (P,) and of numbers that do not depend on the block. values: tensors and (nested)
    dataclasses of tensors. Vectors (P,) are cut into blocks; 0-d tensors are passed unchanged. If a tensor is
    a matrix or on a GPU, or if the vectors fit into the cache, the formula is called once with whole tensors.
    out: tensors that the result may overwrite. One of `values` can be `out` if the caller owns it, or if its
    owner has given it up (fedsim.learning.ownership).
    """
    tensors = [t for value in values for t in tensors_of(value)]
    size = max((t.numel() for t in tensors), default=0)
    if size <= CACHED * BLOCK or not all(_can_be_cut(t, size) for t in tensors):
        return formula(*values)
    whole: list[Tensor] = []
    result: Any = None
    for at in range(0, size, BLOCK):
        part = slice(at, at + BLOCK)
        block = formula(*(_cut(value, part) for value in values))
        pieces = tensors_of(block)
        if result is None:
            result = block  # its numbers are final; its tensors are replaced below
            whole = _wholes(pieces, tensors_of(out), size)
        for vector, piece in zip(whole, pieces, strict=True):
            if piece.dim():
                vector[part] = piece
    remaining = iter(whole)
    return map_tensors(result, lambda _: next(remaining))  # type: ignore[no-any-return]


def _wholes(pieces: Sequence[Tensor], out: Sequence[Tensor], size: int) -> list[Tensor]:
    """Return the vectors for these pieces: those of `out` if dtypes and shapes match, else new ones."""
    kinds = [(t.dtype, (size,) if t.dim() else ()) for t in pieces]
    if [(t.dtype, tuple(t.shape)) for t in out] == kinds:
        return [o if t.dim() else t for o, t in zip(out, pieces, strict=True)]
    return [t.new_empty(size) if t.dim() else t for t in pieces]


def _can_be_cut(t: Tensor, size: int) -> bool:
    return t.device.type == "cpu" and (not t.dim() or tuple(t.shape) == (size,))


def _cut(value: T, part: slice) -> T:
    return map_tensors(value, lambda t: t[part] if t.dim() else t)


def add_by_blocks(total: Tensor, x: Tensor, factor: float) -> None:
    """Add factor * x to `total` in place; `x` has the shape of `total` and any dtype."""
    size = total.numel()
    if not _can_be_cut(total, size):
        total.add_(x, alpha=factor)
        return
    for at in range(0, size if total.dim() else 1, BLOCK):
        part = slice(at, at + BLOCK)
        _cut(total, part).add_(_cut(x, part), alpha=factor)
