"""Error feedback: what a lossy codec took from an upload is added to the client's next one (Seide et al.
2014; Karimireddy et al., arXiv:1901.09847, Alg. 2), around any algorithm whose uploads are increments.

    client:  p_k <- x_k + e_k            x_k: what the algorithm would upload
             sends C(p_k)
             e_k <- p_k - C(p_k)         once the upload is folded; a lost one leaves e_k as it was

    sum of what a client has sent + e_k = sum of what the algorithm wanted to send

The residual e_k is client state, in float64. It needs no knowledge of the codec: client_commit gets the
upload as decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from fedsim.algorithm import Algorithm, AnyShard, Context, Task
from fedsim.errors import UsageError
from fedsim.wire.schema import all_fields

AnyAlgorithm = Algorithm[Any, Any, Any, Any]


@cache
def with_residuals(client: type) -> type:
    """A client state and, by exchange and field, what is owed: (P,) float64 each. In a draft it is what
    was to be sent."""
    columns = [("inner", client), ("residuals", tuple[torch.Tensor, ...])]
    return make_dataclass("WithResiduals", columns, frozen=True)


def _of_inner(name: str) -> Any:
    """A property, which may be a method, that is the inner algorithm's."""
    return property(attrgetter(f"inner.{name}"))


@dataclass(frozen=True)
class ErrorFeedback(Algorithm[Any, Any, Any, Any]):
    """`inner` with its fields ((exchange, name), ...) corrected; everything else is inner's."""

    inner: AnyAlgorithm
    fields: tuple[tuple[int, str], ...]

    name = _of_inner("name")
    paper = _of_inner("paper")
    default_model = _of_inner("default_model")
    default_rounds = _of_inner("default_rounds")
    default_codecs = _of_inner("default_codecs")
    eval_samples = _of_inner("eval_samples")
    stale_damping = _of_inner("stale_damping")
    server_type = _of_inner("server_type")
    exchanges = _of_inner("exchanges")
    setup = _of_inner("setup")
    public_inputs = _of_inner("public_inputs")
    sizes_on_wire = _of_inner("sizes_on_wire")
    check = _of_inner("check")
    server_init = _of_inner("server_init")
    broadcast = _of_inner("broadcast")
    broadcast_to = _of_inner("broadcast_to")
    server_update = _of_inner("server_update")
    no_sums = _of_inner("no_sums")
    sums = _of_inner("sums")
    add = _of_inner("add")
    from_sums = _of_inner("from_sums")
    merged = _of_inner("merged")
    check_stale = _of_inner("check_stale")
    stale_update = _of_inner("stale_update")
    model = _of_inner("model")
    report = _of_inner("report")

    def __post_init__(self) -> None:
        object.__setattr__(self, "client_type", with_residuals(self.inner.client_type))

    @property
    def unwrapped(self) -> AnyAlgorithm:
        return self.inner

    def client_init(self, ctx: Context, k: int) -> Any:
        zero = torch.zeros_like(ctx.start, dtype=torch.float64)
        return self.client_type(self.inner.client_init(ctx, k), (zero,) * len(self.fields))

    def client_update(self, client: Any, down: Any, shard: AnyShard, task: Task) -> tuple[Any, Any]:
        draft, up = self.inner.client_update(client.inner, down, shard, task)
        owed = list(client.residuals)
        for i, name in self._now(task):
            owed[i] = getattr(up, name).double() + owed[i]
            up = replace(up, **{name: owed[i]})
        return self.client_type(draft, tuple(owed)), up

    def client_commit(self, client: Any, down: Any, up: Any, task: Task) -> Any:
        owed = list(client.residuals)
        for i, name in self._now(task):
            owed[i] = owed[i] - getattr(up, name).double()
        return self.client_type(self.inner.client_commit(client.inner, down, up, task), tuple(owed))

    def _now(self, task: Task) -> list[tuple[int, str]]:
        """The fields of this exchange, with their place among the residuals; the set-up has none."""
        return [(i, name) for i, (e, name) in enumerate(self.fields) if task.round and e == task.exchange]


def error_feedback(algorithm: AnyAlgorithm, lossy: frozenset[str]) -> ErrorFeedback:
    """The algorithm with error feedback on the upload fields that `lossy` codecs encode."""
    if not algorithm.fed_back:
        raise UsageError(
            f"--error-feedback: {algorithm.name} uploads no plain increments. Its uploads are absolute, or "
            "relative to what the server got, so what a codec loses is not lost for good"
        )
    fields = tuple(
        (e, name)
        for e, exchange in enumerate(algorithm.exchanges, start=1)
        for name in algorithm.fed_back
        if name in lossy and name in {f.name for f in all_fields(exchange.up)}
    )
    if not fields:
        target = " or ".join(f"--codec up.{name}=topk:0.1" for name in algorithm.fed_back)
        raise UsageError(f"--error-feedback needs a lossy codec to correct, such as {target}")
    return ErrorFeedback(algorithm, fields)
