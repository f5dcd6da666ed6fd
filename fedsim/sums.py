"""Sums of uploads, derived from the return annotation of `add` and from the names of the duals.

The fold adds uploads to sums one by one. Sums are in float64: a message class of sums, or the server's sum of
duals itself, a tensor or a Gaussian. The "sum" of Gaussian duals is their product. Edge servers (fedsim.tree)
have sums of their own, which are added to the server's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from functools import cache, reduce
from types import SimpleNamespace
from typing import Any, ClassVar, cast, get_type_hints

import torch
from torch import Tensor

from fedsim.errors import UsageError
from fedsim.learning.blocks import settled
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.ownership import give_up, keep
from fedsim.round_values import Arrival, Context
from fedsim.wire.schema import FullSum, Sum, map_tensors, schema, zeros_of


@cache
def type_of_sums(algorithm: Any) -> Any:
    """Return the return type of `add`: a message class, or the type of the server's sum of duals."""
    results = (annotated_result(vars(kind)["add"]) for kind in algorithm.__mro__ if "add" in vars(kind))
    return next((kind for kind in results if kind is not None), None)


def annotated_result(method: Any) -> Any:
    """Return the annotation of a method's result; None if there is none, or none that its module defines."""
    method = inspect.unwrap(method)
    hints = {k: hint for k, hint in getattr(method, "__annotations__", {}).items() if k == "return"}
    try:
        return get_type_hints(SimpleNamespace(__annotations__=hints), method.__globals__).get("return")
    except (AttributeError, NameError):
        return None


@cache
def _message_of(name: str) -> type:
    """Return a message class with one sum of shape (P,)."""
    return make_dataclass("Sums", [(name, Sum)], frozen=True)


def _is_message_of_sums(kind: type) -> bool:
    """Return whether all fields of a class can be added up field by field."""
    try:
        return all(f.kind.name in ("sum", "scalar") and not f.members for f in schema(kind))
    except UsageError:
        return False


@dataclass(frozen=True)
class _GaussianSums:
    """The change of a product of Gaussian duals."""

    shift: Sum
    precision: Sum


@dataclass(frozen=True)
class _FullGaussianSums:
    """The change of a product of Gaussian duals with full precisions."""

    shift: Sum
    precision: FullSum


def _factor(state: Any, name: str) -> Gaussian:
    """Return the dual with this dotted name in a state, as a Gaussian factor."""
    for part in name.split("."):
        state = getattr(state, part)
    return state if isinstance(state, Gaussian) else Gaussian(state, 0.0)


def _products(ones: list[Gaussian], others: list[Gaussian]) -> list[Gaussian]:
    return [a * b for a, b in zip(ones, others, strict=True)]


class SumsOfUploads:
    """The methods of an algorithm with `add`; SiteAlgorithm and fedcurv replace some of them."""

    name: ClassVar[str]
    duals: ClassVar[Mapping[str, str | None]]

    @property
    def _returned(self) -> Any:
        kind: Any = type(self)
        return type_of_sums(kind)

    @property
    def sums_type(self) -> type | None:
        """The message class of an edge server's sums; None if the server needs every upload by itself."""
        kind = self._returned
        if kind is Tensor:
            return _message_of(self._total)
        if kind is Gaussian:
            return _FullGaussianSums if self.is_full else _GaussianSums
        message = cast(type, kind) if is_dataclass(kind) else None
        if message is not None and not _is_message_of_sums(message):
            raise UsageError(
                f"{self.name}: add returns {message.__name__}, whose fields must be Sum, FullSum or Count in "
                "float64; a sum of Gaussians has a Sum for the shift and one for the precision"
            )
        return message

    @property
    def is_full(self) -> bool:
        """True if the hyperparameter `covariance` is full: precisions are matrices (P, P)."""
        return getattr(self, "covariance", "diagonal") == "full"

    @property
    def _totals(self) -> list[str]:
        """The names of the server's sums of duals."""
        return [total for total in self.duals.values() if total]

    @property
    def _total(self) -> str:
        """The name of the server's only sum of duals, for algorithms whose `add` returns no message."""
        if len(self._totals) != 1:
            raise UsageError(f"{self.name}: where add returns no message, duals names one field of Server")
        return self._totals[0]

    def added(self, sums: Any, arrivals: Iterable[Arrival], ctx: Context) -> Any:
        """Add these uploads to the sums, which are overwritten and must belong to the caller."""
        algorithm: Any = self
        for arrival in arrivals:
            before = give_up(sums, above=0)
            sums = settled(algorithm.add(before, arrival, ctx), before)
            keep(before)
            del arrival  # only one upload is in memory
        return sums

    def sums(self, server: Any, down: Any, ctx: Context) -> Any:
        """Return the initial sums of an exchange: copies of the server's sums of duals, and 0 for others."""
        if self._returned in (Tensor, Gaussian):
            return map_tensors(getattr(server, self._total), Tensor.clone)
        zero = self.no_sums(down, ctx)
        kept = [f.name for f in fields(zero) if f.name in self._totals]
        return replace(zero, **{name: map_tensors(getattr(server, name), Tensor.clone) for name in kept})

    def no_sums(self, down: Any, ctx: Context) -> Any:
        """Return sums of 0, with which an edge server starts (fedsim.tree)."""
        algorithm: Any = self
        annotated = self._returned
        if annotated in (Tensor, Gaussian):
            return map_tensors(getattr(algorithm.server_init(ctx), self._total), torch.zeros_like)
        kind = algorithm.exchanges_in(ctx.round)[ctx.exchange - 1].sums or annotated
        if not is_dataclass(kind):
            raise UsageError(
                f"{self.name}: the fold needs add and from_sums, and the return annotation of add, such as "
                "-> Sums, names the type of the sums; or it needs server_update"
            )
        return zeros_of(cast(type, kind), ctx.start)

    def merged(self, sums: Any, others: Any) -> Any:
        """Add the sums of an edge server to the server's sums, field by field, in float64."""
        if isinstance(sums, Tensor):
            return sums + others
        names = [f.name for f in fields(sums)]
        return replace(sums, **{name: getattr(sums, name) + getattr(others, name) for name in names})

    def dual_mismatch(self, server: Any, clients: Iterable[Any]) -> float | None:
        """Return the relative difference between the server's sum of duals and the sum of the clients' duals.

        It is 0 up to rounding, under any schedule, upload loss and codec; None without a sum of duals.
        """
        names = [own for own, total in self.duals.items() if total]
        if not names:
            return None
        everyone = reduce(_products, ([_factor(client, name) for name in names] for client in clients))
        ours = [_factor(server, total) for total in self._totals]
        return max(a.mismatch(b) for a, b in zip(ours, everyone, strict=True))
