"""Messages are frozen dataclasses whose fields say what they mean.

    @dataclass(frozen=True)
    class Up:
        mean: Mean            # (P,) float32
        precision: Precision  # (P,) float32, positive
        loss: Scalar

The codec, the ledger and `fedsim describe` read the schema from the annotations; nothing about a
message is written down twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedsim.errors import UsageError, WireError

Dims = Mapping[str, int]
"""Sizes by name: P parameters, C classes, K clients. They come from the set-up, never from a message."""

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """What a field is, mathematically, and the shape it has by the names of Dims."""

    name: str
    dims: tuple[str, ...] = ("P",)
    positive: bool = False
    dtype: str = "f32"


Mean = Annotated[Tensor, Kind("mean")]
Precision = Annotated[Tensor, Kind("precision", positive=True)]
Dual = Annotated[Tensor, Kind("dual")]
Shift = Annotated[Tensor, Kind("shift")]
Delta = Annotated[Tensor, Kind("delta")]
Gradient = Annotated[Tensor, Kind("gradient")]
Curvature = Annotated[Tensor, Kind("curvature")]
Statistic = Annotated[Tensor, Kind("statistic")]
Scalar = Annotated[float, Kind("scalar", (), dtype="f64")]
Flag = Annotated[bool, Kind("scalar", (), dtype="u8")]

DTYPES = {"f32": torch.float32, "f64": torch.float64, "u8": torch.uint8}


@dataclass(frozen=True)
class Field:
    """One field of a message's schema."""

    name: str
    kind: Kind
    python: type

    def shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(dims[d] for d in self.kind.dims)

    def dense_bytes(self, dims: Dims) -> int:
        return math.prod(self.shape(dims)) * DTYPES[self.kind.dtype].itemsize


def schema(message: type[Any]) -> tuple[Field, ...]:
    """The fields of a message class, in order.

    Errors: UsageError for a class that is no frozen dataclass of annotated fields.
    """
    if message not in _schemas:
        _schemas[message] = _read_schema(message)
    return _schemas[message]


_schemas: dict[type, tuple[Field, ...]] = {}


def _read_schema(message: type[Any]) -> tuple[Field, ...]:
    params = getattr(message, "__dataclass_params__", None)
    if not is_dataclass(message) or params is None or not params.frozen:
        raise UsageError(f"message {message.__name__} must be a frozen dataclass")
    hints = get_type_hints(message, include_extras=True)
    out = []
    for f in fields(message):
        hint = hints[f.name]
        kinds = [a for a in get_args(hint)[1:] if isinstance(a, Kind)]
        if get_origin(hint) is not Annotated or len(kinds) != 1:
            raise UsageError(
                f"field {f.name!r} of {message.__name__} must be annotated with a kind, "
                f"such as Mean, Precision or Scalar of fedsim.wire.messages"
            )
        out.append(Field(f.name, kinds[0], get_args(hint)[0]))
    return tuple(out)


def check_values(message: object, whose: str) -> None:
    """Raise WireError unless every float of a decoded message is finite and every precision positive.

    A finite sum proves that all values are finite at a fifth of the cost of isfinite.
    """
    for f in schema(type(message)):
        value = getattr(message, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise WireError(f"{whose}: field {f.name!r} is {value}")
        if isinstance(value, float) and f.kind.positive and value <= 0:
            raise WireError(f"{whose}: {f.kind.name} {f.name!r} is not positive: {value:g}")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if not math.isfinite(float(value.sum())):
            bad = int((~torch.isfinite(value)).sum())
            if bad:
                raise WireError(f"{whose}: field {f.name!r} has {bad} of {value.numel()} values NaN or Inf")
        if f.kind.positive and value.numel() and float(value.min()) <= 0:
            bad = int((value <= 0).sum())
            raise WireError(
                f"{whose}: precision {f.name!r} is not positive in {bad} of {value.numel()} entries "
                f"(smallest {float(value.min()):g})"
            )


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same (nested) dataclass with `change` applied to every tensor: moving between devices."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(map_tensors(v, change) for v in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        changed: dict[str, Any] = {f.name: map_tensors(getattr(value, f.name), change) for f in fields(value)}
        return replace(value, **changed)
    return value
