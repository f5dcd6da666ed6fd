"""Error feedback for the sums that edge servers send by codecs (--codec edge.FIELD=CODEC).

    edge e:  p_e <- sum over the uploads of its clients + r_e        natural parameters, float64
             sends C(q p_e)                                          q: the broadcast; C: the codecs
             r_e <- p_e - C(q p_e) / q                               when the exchange is folded
    root:    multiplies the server's product of duals by C(q p_e) / q

An edge server sends its clients' change as one client would: as the mean and the precision of q times the
change, coded relative to q. If a codec rounds a precision down, the change of the mean shrinks with it; with
shifts that are coded by themselves, shift / precision could become large. Servers that average the q_k also
get the average of the edge server's clients, product_mean and product_precision.

The server's natural parameters and all r_e add up to those of the product of the clients' duals, up to the
rounding of float64. The step of sigma:auto shrinks with the changes; then r_e goes to 0, and the fixed point
is that of exact sums.

In a real federation an edge server keeps its remainder. Here the server's state has the remainders of all
edge servers, so that a run can be resumed: 2 P numbers in float64 for each edge server, 4 P with products.

Source: Seide et al. 2014; Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, Alg. 2, here for the
partial sums of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fedsim.algorithm import Context
from fedsim.errors import UsageError
from fedsim.learning.gaussian import Gaussian
from fedsim.wire.schema import Mean, Precision, schema
from fedsim.wrapper import ServerWrapper

LEAST = 2.0**-6
"""The lower limit of a precision that is sent, as a fraction of the broadcast's."""


@cache
def coded(sums: type) -> type | None:
    """Return the class in which an edge server sends these sums by codecs, in float32: a mean in the place of
    each shift. Return None if the sums have no natural parameters with P numbers."""
    kinds = {f.name: f.kind for f in schema(sums)}
    if not any(kind.natural for kind in kinds.values()):
        return None
    natural = {"shift": Mean, "precision": Precision}
    columns = [
        (name.replace("shift", "mean"), natural.get(kinds[name].natural, hint))
        for name, hint in get_type_hints(sums, include_extras=True).items()
    ]
    return make_dataclass("CodedSums", columns, frozen=True)


def natural_fields(sums: type) -> tuple[str, ...]:
    """Return the names of the fields that `coded` changes: each shift, and its precision."""
    return tuple(f.name for f in schema(sums) if f.kind.natural)


def _factors(sums: type) -> Iterator[tuple[str, bool]]:
    """Yield the prefix of every pair of shift and precision, and whether it is a product of posteriors."""
    for f in schema(sums):
        if f.kind.natural == "shift":
            yield f.name.removesuffix("shift"), f.kind.centred


def to_posteriors(sums: type, values: Mapping[str, Any], down: Any, uploads: int) -> dict[str, Any]:
    """Return the values of `coded(sums)`.

    down: the decoded broadcast, with a mean and a precision. uploads: the number of uploads in the sums.
    """
    m, S = down.mean.double(), down.precision.double()
    out = {name: value for name, value in values.items() if name not in natural_fields(sums)}
    for prefix, product in _factors(sums):
        shift, precision = values[f"{prefix}shift"], values[f"{prefix}precision"]
        whole = precision / uploads if product else S + precision
        known = torch.maximum(whole, LEAST * S)
        out[f"{prefix}mean"] = (shift / uploads if product else S * m + shift) / known
        out[f"{prefix}precision"] = known
    return out


def to_sums(sums: type, message: Any, down: Any, uploads: int) -> Any:
    """Return the sums that a message of the class `coded(sums)` stands for: to_posteriors, reversed."""
    m, S = down.mean.double(), down.precision.double()
    same = [f.name for f in schema(sums) if not f.kind.natural]
    values = {name: getattr(message, name) for name in same}
    for prefix, product in _factors(sums):
        precision = getattr(message, f"{prefix}precision").double()
        shift = precision * getattr(message, f"{prefix}mean").double()
        values[f"{prefix}shift"] = uploads * shift if product else shift - S * m
        values[f"{prefix}precision"] = uploads * precision if product else precision - S
    return sums(**values)


@dataclass(frozen=True)
class Remainder:
    """What the codecs took from an edge server's sums: r_e of each of natural_fields, (P,) float64."""

    values: tuple[Tensor, ...]


@cache
def with_remainders(inner: type) -> type:
    """Return the class of the server's state. remainders: r_e by edge server; None before its first sums."""
    columns: list[tuple[str, Any]] = [("inner", inner), ("remainders", tuple[Remainder | None, ...])]
    return make_dataclass("WithRemainders", columns, frozen=True)


@dataclass(frozen=True)
class CompressedSums(ServerWrapper):
    """`inner` with a server that has the remainders of its edge servers.

    edges: their number.
    """

    edges: int

    def __post_init__(self) -> None:
        """Raise a UsageError if the sums of several exchanges would share a remainder."""
        if len(self.inner.exchanges) > 1:
            raise UsageError(
                f"--codec edge: {self.name} has several exchanges a round; its sums are sent exactly"
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the sums that have a remainder."""
        sums = self.inner.exchanges[0].sums
        return natural_fields(sums) if sums else ()

    @property
    def server_type(self) -> type:  # type: ignore[override]
        return with_remainders(self.inner.server_type)

    def server_init(self, ctx: Context) -> Any:
        return self.server_type(self.inner.server_init(ctx), (None,) * self.edges)

    def server_update(self, server: Any, down: Any, ups: Iterable[tuple[int, Any]], ctx: Context) -> Any:
        """Fold the uploads of a set-up, which edge servers forward."""
        return replace(server, inner=self.inner.server_update(server.inner, down, ups, ctx))

    def sums(self, server: Any, down: Any, ctx: Context) -> Any:
        return self.inner.sums(server.inner, down, ctx)

    def from_sums(self, server: Any, down: Any, sums: Any, ctx: Context) -> Any:
        return replace(server, inner=self.inner.from_sums(server.inner, down, sums, ctx))

    def with_remainders(self, server: Any, new: Mapping[int, Remainder]) -> Any:
        """Return the server's state with these edge servers' new remainders."""
        return replace(server, remainders=tuple(new.get(e, old) for e, old in enumerate(server.remainders)))

    def dual_mismatch(self, server: Any, clients: Iterable[Any]) -> float | None:
        """Compare the server's sum of duals plus all remainders with the clients' duals."""
        state = server.inner
        for remainder in filter(None, server.remainders):
            owed = dict(zip(self.fields, remainder.values, strict=True))
            factor = Gaussian(owed["shift"], owed["precision"])
            state = _times(state, self.inner.unwrapped._total, factor)
        return self.inner.dual_mismatch(state, clients)


def _times(state: Any, name: str, factor: Gaussian) -> Any:
    """Multiply the field `name` of a server's state by a factor. A wrapper's state has it in `inner`."""
    if hasattr(state, name):
        return replace(state, **{name: getattr(state, name) * factor})
    return replace(state, inner=_times(state.inner, name, factor))
