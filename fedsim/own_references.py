"""Broadcasts encoded relative to each client's last broadcast (codec flag +own), for any algorithm.

    server:  d_k <- decoded(encode(broadcast, reference r_k))     for every participant k
    client:  computes from d_k
    both:    r_k <- d_k when the upload is folded

Both sides compute the first r_k, the broadcast of the initial server state, from the seed. If a tenth of the
clients take part in a round, most of them have missed the previous broadcast. Each still has an earlier one,
and the change over ten rounds also takes few bits. Clients then have different d_k, as in asynchronous runs,
and the server folds each upload with the broadcast that it answers. The server stores the r_k of all clients.

Source: EF21-P encodes broadcasts relative to one shared reference (Gruntkowska et al. 2022,
https://arxiv.org/abs/2209.15218, Alg. 1). Differs: each client has a reference and may miss rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from typing import Any

from fedsim.algorithm import AnyShard, Arrival, Context, Task
from fedsim.errors import UsageError
from fedsim.round_policy import RoundPolicy
from fedsim.wire.schema import map_tensors, optional_group
from fedsim.wrapper import StateWrapper


@cache
def with_reference(inner: type, down: type) -> type:
    """Return the class of a client's state. got: the client's last broadcast; None for the first r_k."""
    return make_dataclass("WithReference", [("inner", inner), ("got", down | None)], frozen=True)


@cache
def with_references(inner: type, down: type) -> type:
    """Return the class of the server's state. got: the `got` of every client, (K,)."""
    columns: list[tuple[str, Any]] = [("inner", inner), ("got", tuple[down | None, ...])]  # type: ignore[valid-type]
    return make_dataclass("WithReferences", columns, frozen=True)


@dataclass(frozen=True)
class OwnReferences(StateWrapper, RoundPolicy):
    """`inner` with clients and a server that store each client's last decoded broadcast."""

    def __post_init__(self) -> None:
        """Check that the algorithm can fold uploads that answer different broadcasts.

        Raises:
            UsageError: If it cannot; the message says why.
        """
        exchanges, why = self.inner.exchanges, ""
        if len(exchanges) > 1 or self.inner.default_rounds == 1:
            why = "has one round" if len(exchanges) == 1 else "has several exchanges a round"
        elif self.inner.setup:
            why = "has a set-up, after which the server is not the new one any more"
        elif optional_group(exchanges[0].down):
            why = "has broadcasts with a part that is one client's own"
        elif not self.inner.unwrapped.folds_stale:
            why = "has a server that averages uploads as they are, with the coding errors of their broadcasts"
        elif exchanges[0].sums is None:
            why = "has a server that needs one broadcast for all uploads (it defines no add and from_sums)"
        if why:
            raise UsageError(f"+own: {self.name} {why}; leave +own out")

    @property
    def _down(self) -> type:
        return self.inner.exchanges[0].down

    def reference(self, got: Any, new: Context) -> Any:
        """Return the reference r_k of a client's next broadcast. got: from its state. new: of round 0."""
        if got is not None:
            return got
        ctx = replace(new, round=1, exchange=1)
        first = self.inner.broadcast(self.inner.server_init(ctx), ctx)
        return map_tensors(first, lambda t: t.float() if t.is_floating_point() else t)

    def references(self, server: Any, new: Context, participants: Collection[int]) -> Mapping[int, Any]:
        return {k: self.reference(server.got[k], new) for k in participants}

    def has_own_broadcast(self) -> bool:
        return True

    @property
    def client_type(self) -> type:  # type: ignore[override]
        return with_reference(self.inner.client_type, self._down)

    @property
    def server_type(self) -> type:  # type: ignore[override]
        return with_references(self.inner.server_type, self._down)

    # ---- the client

    def client_init(self, ctx: Context, k: int) -> Any:
        return self.client_type(self.inner.client_init(ctx, k), None)

    def client_update(self, client: Any, down: Any, shard: AnyShard, task: Task) -> tuple[Any, Any]:
        draft, up = self.inner.client_update(client.inner, down, shard, task)
        return replace(client, inner=draft), up

    def client_commit(self, client: Any, down: Any, up: Any, task: Task) -> Any:
        return self.client_type(self.inner.client_commit(client.inner, down, up, task), down)

    # ---- the server

    def server_init(self, ctx: Context) -> Any:
        return self.server_type(self.inner.server_init(ctx), (None,) * ctx.K)

    def server_update(self, server: Any, down: Any, arrivals: Iterable[Arrival], ctx: Context) -> Any:
        """Fold the uploads of a round, each with the broadcast that it answers."""
        got = list(server.got)

        def seen() -> Iterator[Arrival]:
            for a in arrivals:
                got[a.client] = a.down
                yield a
                del a  # only one upload is in memory

        exact = self.inner.broadcast(server.inner, ctx)
        inner = self.inner.server_update(server.inner, exact, seen(), replace(ctx, mixed=True))
        return self.server_type(inner, tuple(got))
