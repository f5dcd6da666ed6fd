"""Error feedback: a client adds the error of a lossy codec to its next upload (Seide et al. 2014;
Karimireddy et al., arXiv:1901.09847, Alg. 2). It wraps any algorithm whose uploads are increments.

    client:  p_k <- x_k + e_k            x_k: the upload of the wrapped algorithm
             sends C(p_k)                C: the codec
             e_k <- p_k - C(p_k)         when the upload is folded; if it is lost, e_k does not change

Without lost uploads, a client's sent C(p_k) and its residual e_k add up to the sum of its x_k. The residual
is part of the client's state, in float64. This module is independent of the codec, because client_commit gets
the decoded upload.
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
    """Return the class of a client's state, with a residual for each corrected field, (P,) float64: e_k in a
    state, p_k in a draft."""
    columns = [("inner", client), ("residuals", tuple[torch.Tensor, ...])]
    return make_dataclass("WithResiduals", columns, frozen=True)


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """`inner` with error feedback on `fields`, pairs (exchange, field of the upload)."""

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
        """Keep the draft's p_k as the residual, because nothing is sent."""
        return replace(client, inner=self.inner.client_unsent(client.inner, down, up, task))

    def dual_mismatch(self, server: Any, clients: Iterable[Any]) -> float | None:
        return self.inner.dual_mismatch(server, (client.inner for client in clients))

    def client_commit(self, client: Any, down: Any, up: Any, task: Task) -> Any:
        owed = list(client.residuals)
        for i, name in self._now(task):
            owed[i] = owed[i] - getattr(up, name).double()
        return self.client_type(self.inner.client_commit(client.inner, down, up, task), tuple(owed))

    def _now(self, task: Task) -> list[tuple[int, str]]:
        """Return the index among the residuals and the name of this exchange's fields; none in the set-up."""
        return [(i, name) for i, (e, name) in enumerate(self.fields) if task.round and e == task.exchange]


def error_feedback(algorithm: AnyAlgorithm, lossy: frozenset[str]) -> ErrorFeedback:
    """Return the algorithm with error feedback on its upload fields in `lossy`, whose codecs are lossy."""
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
