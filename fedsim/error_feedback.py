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

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from typing import Any

import torch

from fedsim.algorithm import AnyShard, Context, Task
from fedsim.errors import UsageError
from fedsim.wire.schema import all_fields
from fedsim.wrapper import AnyAlgorithm, Wrapper


@cache
def with_residuals(client: type) -> type:
    """A client state and, by exchange and field, what is owed: (P,) float64 each. In a draft it is what
    was to be sent."""
    columns = [("inner", client), ("residuals", tuple[torch.Tensor, ...])]
    return make_dataclass("WithResiduals", columns, frozen=True)


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """`inner` with its fields ((exchange, name), ...) corrected."""

    fields: tuple[tuple[int, str], ...]

    @property
    def client_type(self) -> type:  # type: ignore[override]
        return with_residuals(self.inner.client_type)

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

    def client_unsent(self, client: Any, down: Any, up: Any, task: Task) -> Any:
        """All that was to be sent is owed."""
        return replace(client, inner=self.inner.client_unsent(client.inner, down, up, task))

    def dual_mismatch(self, server: Any, clients: Iterable[Any]) -> float | None:
        return self.inner.dual_mismatch(server, (client.inner for client in clients))

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
