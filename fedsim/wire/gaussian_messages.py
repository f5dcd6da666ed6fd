"""Messages that carry a Gaussian. A message class derives from Posterior or Increment and is then a factor:

    @dataclass(frozen=True)
    class Up(Posterior):          # fields mean, precision, train_loss
        train_loss: Scalar

    change = (up / down) ** rho   # a Gaussian in natural parameters, float64

A class has fields for a diagonal precision; `in_full` gives the class for a full one, which sends the packed
triangle of a symmetric matrix. `at` chooses between the two by the shape of the precision.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.errors import UsageError
from fedsim.learning.gaussian import Carrier, Gaussian, is_full, packed, unpacked
from fedsim.wire.schema import (
    TRIANGLE,
    Delta,
    FullDelta,
    FullPrecision,
    Mean,
    Precision,
    PrecisionDelta,
    ShiftDelta,
    schema,
)

M = TypeVar("M")


class _Message(Carrier):
    """A message whose first two fields are a vector (P,) and a precision."""

    @classmethod
    def at(cls: type[M], first: Tensor, precision: Tensor | float, *others: Any) -> M:
        """Return the message with the values of its fields: the mean (of an increment: the shift), the
        precision, which may be a matrix (P, P), and all others."""
        kind: Any = cls
        if is_full(precision):
            return in_full(kind)(first, packed(torch.as_tensor(precision)), *others)  # type: ignore[no-any-return]
        return kind(first, torch.as_tensor(precision), *others)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Posterior(_Message):
    """A message with q = N(mean, S^-1). precision: S, positive; (P,), or in `in_full` the packed triangle.

    Examples:
        >>> import fedsim, torch
        >>> down = fedsim.Posterior.at(torch.tensor([1.0]), torch.tensor([2.0]))
        >>> up = fedsim.Posterior.at(torch.tensor([3.0]), torch.tensor([4.0]))
        >>> (up / down).precision, (up * down).mean.item() == 14 / 6
        (tensor([2.], dtype=torch.float64), True)
    """

    mean: Mean
    precision: Precision

    @property
    def factor(self) -> Gaussian:
        return Gaussian.at(self.mean, _received(self, self.precision))


@dataclass(frozen=True)
class Increment(_Message):
    """A message with a factor by which the receiver multiplies. z_precision may be negative.

    Examples:
        >>> import fedsim, torch
        >>> up = fedsim.Increment.at(torch.tensor([1.0]), torch.tensor([-2.0]))
        >>> (up**0.5).precision
        tensor([-1.], dtype=torch.float64)
    """

    z_shift: ShiftDelta
    z_precision: PrecisionDelta

    @property
    def factor(self) -> Gaussian:
        return Gaussian(self.z_shift.double(), _received(self, self.z_precision.double()))


FULL: dict[str, Any] = {"precision": FullPrecision, "z_shift": Delta, "z_precision": FullDelta}
"""The fields of Posterior and Increment whose kinds differ for a full precision."""


@cache
def in_full(message: type[Any]) -> type[Any]:
    """Return a message class for full precisions; the class itself if it carries no Gaussian."""
    if not issubclass(message, Carrier) or _is_for_full(message):
        return message
    changed = [(f.name, FULL[f.name]) for f in schema(message) if f.name in FULL]
    created = make_dataclass(message.__name__, changed, bases=(message,), frozen=True)
    created.__module__, created.__qualname__ = message.__module__, message.__qualname__
    return created


MAX_FULL = 3000
"""The largest number of parameters for which a full covariance is allowed."""


def check_size(message: type[Any], params: int) -> None:
    """Check that a message can be sent for a model of `params` parameters.

    Raises:
        UsageError: If it has a full covariance of more than MAX_FULL parameters.
    """
    if params > MAX_FULL and _is_for_full(message):
        raise UsageError(
            f"a full covariance of P = {params:,} parameters is {2 * params * (params + 1):,} bytes per "
            f"client, round and direction; the limit is P = {MAX_FULL:,}. Use --set covariance=diagonal, or "
            "a smaller model, such as --model logistic_bias"
        )


def _is_for_full(message: type[Any]) -> bool:
    return any(f.kind.dims == (TRIANGLE,) for f in schema(message))


def _received(message: object, precision: Tensor) -> Tensor:
    return unpacked(precision) if _is_for_full(type(message)) else precision
