"""Message schemas: messages are frozen dataclasses whose annotations give the meaning of each field.

    @dataclass(frozen=True)
    class Up:
        mean: Mean            # (P,) float32
        precision: Precision  # (P,) float32, positive
        loss: Scalar

The codec, the ledger and `fedsim describe` read the schema from the annotations, so that nothing about a
message is defined twice.

A field `info: Info`, where Info is a frozen dataclass of scalars, is a group: diagnostics that cross the wire
as one vector of float64.

A field `memory: Memory | None = None`, where Memory is also a message class, is optional: only some envelopes
contain it. In a broadcast, it has data that the client does not have yet; in an upload, it has data that the
client sends once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedsim.errors import UsageError, WireError
from fedsim.learning.gaussian import Gaussian, unpacked

Dims = Mapping[str, int]
"""Sizes by name: P parameters, TRIANGLE entries of a symmetric matrix, C classes, K clients, I features of an
input, L posterior samples of an evaluation, R running statistics, and names that the algorithm adds. Sizes
come from the set-up, never from a message."""

TRIANGLE = "P(P+1)/2"
RUNNING = "R"

T = TypeVar("T")


@dataclass(frozen=True)
class FieldKind:
    """The mathematical meaning of a field, and its shape as names in Dims.

    unit: True if all values are in [0, 1].
    elastic: True if the first size may be any number up to its entry in Dims.
    stored: True if integers of the sender's data set (uint8 pixels) are sent as they are stored.
    natural: the natural parameter of a Gaussian whose change the field is, "shift" or "precision". Codecs can
    measure it by the broadcast's precision S, in units of sqrt(S) or S.
    over: aggregation of a scalar over a round's uploads in metrics.jsonl: N_k-weighted mean, minimum, sum,
    root of the sum of squares ("rss"), or none ("nothing").

    Examples:
        >>> from typing import Annotated
        >>> import fedsim, torch
        >>> Variance = Annotated[torch.Tensor, fedsim.FieldKind("variance", positive=True)]
        >>> fedsim.Scalar.__metadata__[0].over
        'mean'
    """

    name: str
    dims: tuple[str, ...] = ("P",)
    positive: bool = False
    unit: bool = False
    dtype: str = "f32"
    elastic: bool = False
    stored: bool = False
    natural: Literal["", "shift", "precision"] = ""
    over: Literal["mean", "min", "sum", "rss", "nothing"] = "mean"


Mean = Annotated[Tensor, FieldKind("mean")]
Precision = Annotated[Tensor, FieldKind("precision", positive=True)]
Dual = Annotated[Tensor, FieldKind("dual")]
Shift = Annotated[Tensor, FieldKind("shift")]
Delta = Annotated[Tensor, FieldKind("delta")]
ShiftDelta = Annotated[Tensor, FieldKind("delta", natural="shift")]
PrecisionDelta = Annotated[Tensor, FieldKind("delta", natural="precision")]
Gradient = Annotated[Tensor, FieldKind("gradient")]
Curvature = Annotated[Tensor, FieldKind("curvature")]
Statistic = Annotated[Tensor, FieldKind("statistic")]
RunningStatistics = Annotated[Tensor, FieldKind("statistic", (RUNNING,))]
"""Running means and variances of batch normalisation (fedsim.running_statistics)."""
RunningSum = Annotated[Tensor, FieldKind("sum", (RUNNING,), dtype="f64")]
FullPrecision = Annotated[Tensor, FieldKind("precision", (TRIANGLE,), positive=True)]
"""A symmetric positive definite matrix as its packed triangle (fedsim.learning.gaussian.packed)."""
FullDelta = Annotated[Tensor, FieldKind("delta", (TRIANGLE,))]
Logits = Annotated[Tensor, FieldKind("logits", ("M", "C"), elastic=True)]
Inputs = Annotated[Tensor, FieldKind("inputs", ("M", "I"), elastic=True, stored=True)]
Weights = Annotated[Tensor, FieldKind("weight", ("M",), elastic=True)]
Owners = Annotated[Tensor, FieldKind("statistic", ("M",), elastic=True, dtype="i64")]
Scalar = Annotated[float, FieldKind("scalar", (), dtype="f64")]
Least = Annotated[float, FieldKind("scalar", (), dtype="f64", over="min")]
Total = Annotated[float, FieldKind("scalar", (), dtype="f64", over="sum")]
Norm = Annotated[float, FieldKind("scalar", (), dtype="f64", over="rss")]
Check = Annotated[float, FieldKind("scalar", (), dtype="f64", over="nothing")]
Draws = Annotated[Tensor, FieldKind("mean", ("L", "P"), elastic=True)]
"""At most L samples of the weights, in evaluation requests."""
Sum = Annotated[Tensor, FieldKind("sum", dtype="f64")]
"""A sum over an edge server's uploads (fedsim.tree), in float64 to keep sums of sums precise."""
FullSum = Annotated[Tensor, FieldKind("sum", (TRIANGLE,), dtype="f64")]
Count = Annotated[float, FieldKind("scalar", (), dtype="f64", over="nothing")]
"""A sum of weights, or a number of uploads."""
Flag = Annotated[bool, FieldKind("scalar", (), dtype="u8")]

DTYPES = {"f32": torch.float32, "f64": torch.float64, "u8": torch.uint8, "i64": torch.int64}


@dataclass(frozen=True)
class Field:
    """One field of a message's schema.

    members: the scalars of a group, which cross the wire as one vector; empty for any other field.
    """

    name: str
    kind: FieldKind
    python: type
    members: tuple[Field, ...] = ()

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """Return the shape of the field; for an elastic field, the largest shape."""
        return (len(self.members),) if self.members else tuple(dims[d] for d in self.kind.dims)

    def fits(self, shape: tuple[int, ...], dims: Dims) -> bool:
        """Return whether a tensor may have this shape."""
        bound = self.shape(dims)
        if not self.kind.elastic:
            return shape == bound
        return len(shape) == len(bound) and shape[1:] == bound[1:] and 0 <= shape[0] <= bound[0]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that this field may have on the wire."""
        return (self.kind.dtype, "u8") if self.kind.stored else (self.kind.dtype,)

    def dense_bytes(self, dims: Dims) -> int:
        """Return the bytes of the field without a codec; for an elastic field, the largest number."""
        return math.prod(self.shape(dims)) * DTYPES[self.kind.dtype].itemsize


@dataclass(frozen=True)
class OptionalGroup:
    """The optional part of a message: the field that holds it and its class."""

    name: str
    message: type


def schema(message: type[Any]) -> tuple[Field, ...]:
    """Return the fields of a message class that every envelope contains, in order.

    Raises:
        UsageError: If the class is not a frozen dataclass of annotated fields.
    """
    return _schema(message)[0]


def optional_group(message: type[Any]) -> OptionalGroup | None:
    """Return the optional part of a message class; None if the class has none."""
    return _schema(message)[1]


def all_fields(message: type[Any]) -> tuple[Field, ...]:
    """Return the fields of a message class, followed by those of its optional part."""
    part = optional_group(message)
    return schema(message) + (schema(part.message) if part else ())


_schemas: dict[type, tuple[tuple[Field, ...], OptionalGroup | None]] = {}


def _schema(message: type[Any]) -> tuple[tuple[Field, ...], OptionalGroup | None]:
    if message not in _schemas:
        _schemas[message] = _read_schema(message)
    return _schemas[message]


def _read_schema(message: type[Any]) -> tuple[tuple[Field, ...], OptionalGroup | None]:
    params = getattr(message, "__dataclass_params__", None)
    if not is_dataclass(message) or params is None or not params.frozen:
        raise UsageError(f"message {message.__name__} must be a frozen dataclass")
    hints = get_type_hints(message, include_extras=True)
    out, parts = [], []
    for f in fields(message):
        hint = hints[f.name]
        optional = _optional(hint)
        if optional is not None:
            parts.append(OptionalGroup(f.name, optional))
            continue
        if isinstance(hint, type) and is_dataclass(hint):
            out.append(Field(f.name, FieldKind("info", (), dtype="f64"), hint, _members(hint)))
            continue
        kinds = [a for a in get_args(hint)[1:] if isinstance(a, FieldKind)]
        if get_origin(hint) is not Annotated or len(kinds) != 1:
            raise UsageError(
                f"field {f.name!r} of {message.__name__} must be annotated with a kind, "
                f"such as Mean, Precision or Scalar of fedsim.wire.schema"
            )
        out.append(Field(f.name, kinds[0], get_args(hint)[0]))
    if len(parts) > 1:
        raise UsageError(f"message {message.__name__} has {len(parts)} optional parts; it may have one")
    inner = [_schema(p.message) for p in parts]
    if any(part is not None for _, part in inner):
        raise UsageError(f"message {message.__name__}: an optional part cannot have an optional part itself")
    names = [f.name for f in out] + [f.name for own, _ in inner for f in own]
    if len(set(names)) < len(names):
        raise UsageError(f"message {message.__name__} and its optional part share a field name")
    return tuple(out), parts[0] if parts else None


def _members(group: type[Any]) -> tuple[Field, ...]:
    members = schema(group)
    if optional_group(group) or not members or any(m.python is not float or m.members for m in members):
        raise UsageError(
            f"{group.__name__} is a group of diagnostics: all its fields are numbers (Scalar, Norm, ...)"
        )
    return members


def scalars_of(message: type[Any]) -> tuple[tuple[Field, str], ...]:
    """Return the scalar fields of a message class, each with the name of its group ('' for none)."""
    own = [(f, "") for f in schema(message) if f.python is float]
    return (*own, *((m, f.name) for f in schema(message) for m in f.members))


def summed_scalars(message: Any) -> dict[str, float]:
    """Return the scalars of a message that metrics.jsonl aggregates; for a message class, all are 0."""
    named = scalars_of(message if isinstance(message, type) else type(message))
    summed = [(f.name, group) for f, group in named if f.kind.over != "nothing"]
    if isinstance(message, type):
        return dict.fromkeys((name for name, _ in summed), 0.0)
    return {name: getattr(getattr(message, group) if group else message, name) for name, group in summed}


def _optional(hint: Any) -> type | None:
    """Return the dataclass X of an annotation `X | None`; None for any other annotation."""
    if get_origin(hint) not in (Union, UnionType):
        return None
    inner = [a for a in get_args(hint) if a is not NoneType]
    return inner[0] if len(inner) == 1 and isinstance(inner[0], type) and is_dataclass(inner[0]) else None


def values_of(message: Any) -> list[tuple[Field, Any]]:
    """Return the fields and values of a message, followed by those of its optional part if present."""
    out = [(f, getattr(message, f.name)) for f in schema(type(message))]
    part = optional_group(type(message))
    inner = getattr(message, part.name) if part else None
    return out + ([(f, getattr(inner, f.name)) for f in schema(type(inner))] if inner is not None else [])


def check_values(message: object, owner: str, max_norm: float = math.inf) -> None:
    """Check the values of a decoded message; raise WireError if a value is not valid.

    Floats must be finite, precisions positive, values of `unit` kinds in [0, 1], and tensors' Euclidean norms
    at most `max_norm`. A finite sum proves that all values are finite, at a fifth of the cost of isfinite.
    """
    for f, value in values_of(message):
        if f.members:
            check_values(value, owner)
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise WireError(f"{owner}: field {f.name!r} is {value}")
        if isinstance(value, float) and f.kind.positive and value <= 0:
            raise WireError(f"{owner}: {f.kind.name} {f.name!r} is not positive: {value:g}")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if not math.isfinite(float(value.sum())):
            bad = int((~torch.isfinite(value)).sum())
            if bad:
                raise WireError(f"{owner}: field {f.name!r} has {bad} of {value.numel()} values NaN or Inf")
        if max_norm < math.inf:
            norm = float(torch.linalg.vector_norm(value, dtype=torch.float64))
            if norm > max_norm:
                raise WireError(f"{owner}: field {f.name!r} has the norm {norm:g}; the limit is {max_norm:g}")
        if f.kind.unit and value.numel() and not 0 <= float(value.min()) <= float(value.max()) <= 1:
            raise WireError(f"{owner}: {f.kind.name} {f.name!r} has values outside [0, 1]")
        if not f.kind.positive or not value.numel():
            continue
        if f.kind.dims == (TRIANGLE,):
            if not Gaussian(value, unpacked(value.double())).is_proper:
                raise WireError(f"{owner}: precision {f.name!r} is not positive definite")
        elif float(value.min()) <= 0:
            bad = int((value <= 0).sum())
            raise WireError(
                f"{owner}: precision {f.name!r} is not positive in {bad} of {value.numel()} entries "
                f"(smallest {float(value.min()):g})"
            )


def zeros_of(message: type[T], like: Tensor) -> T:
    """Return a message whose sums are all 0, in float64, for vectors with the shape of `like`, (P,)."""
    P = len(like)
    dims = {"P": P, TRIANGLE: P * (P + 1) // 2}
    values = {
        f.name: 0.0 if f.python is float else like.new_zeros(f.shape(dims), dtype=torch.float64)
        for f in schema(message)
    }
    return message(**values)


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """Apply `change` to every tensor of a (nested) dataclass, for example to move it to another device."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(map_tensors(v, change) for v in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        changed: dict[str, Any] = {f.name: map_tensors(getattr(value, f.name), change) for f in fields(value)}
        return replace(value, **changed)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors of a (nested) dataclass or tuple, in the order of map_tensors."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [t for item in value for t in tensors_of(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [t for f in fields(value) for t in tensors_of(getattr(value, f.name))]
    return []
