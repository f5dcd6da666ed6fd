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

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from fedsim.learning import gaussian
from fedsim.learning.gaussian import Gaussian, can_be_cut, evaluate, in_blocks, size_to_cut
from fedsim.learning.ownership import spent
from fedsim.wire.schema import map_tensors, tensors_of

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
    Positional arguments are vectors, messages and states; keyword arguments are passed unchanged.

    Examples:
        >>> import fedsim, torch
        >>> class Rule:
        ...     @fedsim.accumulating
        ...     def dual_step(self, dual, up, *, rho):
        ...         return dual + rho * up.double()
        >>> Rule().dual_step(torch.zeros(1, dtype=torch.float64), torch.ones(1), rho=0.5)
        tensor([0.5000], dtype=torch.float64)
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
    size = size_to_cut([t for value in values for t in tensors_of(value)])
    if not size:
        return formula(*values)
    first: list[T] = []  # its numbers are those of the result; its tensors are replaced below

    def pieces(*blocks: Any) -> tuple[Tensor, ...]:
        result = formula(*blocks)
        if not first:
            first.append(result)
        return tuple(tensors_of(result))

    wholes = iter(in_blocks(pieces, values, size, tensors_of(out), _cut))
    return map_tensors(first[0], lambda _: next(wholes))


def _cut(value: T, part: slice) -> T:
    return map_tensors(value, lambda t: t[part] if t.dim() else t)


def add_by_blocks(total: Tensor, x: Tensor, factor: float) -> None:
    """Add factor * x to `total` in place; `x` has the shape of `total` and any dtype."""
    size = total.numel()
    if not can_be_cut(total, size):
        total.add_(x, alpha=factor)
        return
    for at in range(0, size if total.dim() else 1, gaussian.BLOCK):
        part = slice(at, at + gaussian.BLOCK)
        _cut(total, part).add_(_cut(x, part), alpha=factor)


def settled(value: T, before: object = None) -> T:
    """Evaluate the Gaussians of a state that are still formulas, together, and return the state.

    before: the state from which it was computed. Its Gaussians at the same places are overwritten if their
    owner has given them up (fedsim.learning.ownership). No formula may outlive its task, because its operands
    may share memory with received frames.
    """
    pending = _pending(value, before)
    if pending:
        olds = [spent(old) if isinstance(old, Gaussian) else None for _, old in pending]
        values = [getattr(old, name, None) for old in olds for name in ("shift", "precision")]
        into = [value if isinstance(value, Tensor) else None for value in values]
        evaluate([g for g, _ in pending], into)
    return value


def _pending(value: Any, before: Any) -> list[tuple[Gaussian, Any]]:
    """Return the pending Gaussians of a value, each with what `before` has at the same place."""
    if isinstance(value, Gaussian):
        return [(value, before)] if "_pending" in value.__dict__ else []
    if isinstance(value, tuple):
        olds = before if isinstance(before, tuple) and len(before) == len(value) else (None,) * len(value)
        return [pair for v, old in zip(value, olds, strict=True) for pair in _pending(v, old)]
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value)]
        return [p for n in names for p in _pending(getattr(value, n), getattr(before, n, None))]
    return []
