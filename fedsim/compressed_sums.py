"""Error feedback for the sums that edge servers send by a lossy codec (--codec edge.FIELD=CODEC).

    edge e:  p_e <- sum over the uploads of its clients + r_e
             sends C(p_e)                                       C: the codec
             r_e <- p_e - C(p_e)                                when the exchange is folded
    root:    adds C(p_e) to the server's sum of duals

The server's sum and all r_e add up to the sum of the clients' duals, up to the rounding of float64. With a
step of c standard deviations (sigma:c), r_e is at most c / 2 of them. The step of sigma:auto shrinks with the
changes; then r_e goes to 0, and the fixed point is that of exact sums.

In a real federation an edge server keeps its remainder. Here the server's state has the remainders of all
edge servers, so that a run can be resumed.

Source: Seide et al. 2014; Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, Alg. 2, here for the
partial sums of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from fedsim.algorithm import Context
from fedsim.errors import UsageError
from fedsim.learning.gaussian import Gaussian
from fedsim.wrapper import Wrapper


@dataclass(frozen=True)
class Remainder:
    """What the codecs took from an edge server's sums: r_e of each field with a lossy codec, (P,) float64."""

    values: tuple[Tensor, ...]


@cache
def with_remainders(inner: type) -> type:
    """Return the class of the server's state. remainders: r_e by edge server; None before its first sums."""
    columns: list[tuple[str, Any]] = [("inner", inner), ("remainders", tuple[Remainder | None, ...])]
    return make_dataclass("WithRemainders", columns, frozen=True)


@dataclass(frozen=True)
class CompressedSums(Wrapper):
    """`inner` with a server that has the remainders of its edge servers.

    fields: the names of the fields of Exchange.sums with a lossy codec. edges: the number of edge servers.
    """

    fields: tuple[str, ...]
    edges: int

    def __post_init__(self) -> None:
        """Raise a UsageError if the sums of several exchanges would share a remainder."""
        if len(self.inner.exchanges) > 1:
            raise UsageError(
                f"--codec edge: {self.name} has several exchanges a round; its sums are sent exactly"
            )

    @property
    def server_type(self) -> type:  # type: ignore[override]
        return with_remainders(self.inner.server_type)

    def server_init(self, ctx: Context) -> Any:
        return self.server_type(self.inner.server_init(ctx), (None,) * self.edges)

    def broadcast(self, server: Any, ctx: Context) -> Any:
        return self.inner.broadcast(server.inner, ctx)

    def broadcast_to(self, server: Any, k: int, ctx: Context) -> object | None:
        return self.inner.broadcast_to(server.inner, k, ctx)

    def model(self, server: Any, ctx: Context) -> Any:
        return self.inner.model(server.inner, ctx)

    def report(self, server: Any, ctx: Context) -> Mapping[str, float]:
        return self.inner.report(server.inner, ctx)

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
            factor = Gaussian(owed.get("shift", 0.0), owed.get("precision", 0.0))
            state = _times(state, self.inner.unwrapped._total, factor)
        return self.inner.dual_mismatch(state, clients)


def _times(state: Any, name: str, factor: Gaussian) -> Any:
    """Multiply the field `name` of a server's state by a factor. A wrapper's state has it in `inner`."""
    if hasattr(state, name):
        return replace(state, **{name: getattr(state, name) * factor})
    return replace(state, inner=_times(state.inner, name, factor))
