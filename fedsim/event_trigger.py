"""Event-triggered participation for any algorithm: participants compute, but may send nothing.

    client:  (draft, up) <- client_update                     every participant
             change      <- difference between `up` and the server's value without it (own_and_held)
             sends `up` and commits if the rule requires it; else sends an envelope without fields
    server:  folds a substitute for an upload that was not sent (Algorithm.unsent)
    damped:  after n rounds in which a client sent nothing, both sides count its next dual step
             min(n + 1, 1 / damping) times, and the rule multiplies the change by this number

    +quiet:  a client gets a broadcast only if it differs enough from the client's last broadcast; else the
             client computes from its last broadcast, and the upload answers that one (as with --async)

fedsim.event_rules defines the rules. They compare decoded messages, so both sides agree under any codec.
Messages of the set-up are always sent. Source: event-based ADMM, Er et al. 2025, Algorithm 1,
https://arxiv.org/abs/2405.10618, for the ADMM family with silent = last. fedsim adds the other rules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, make_dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.algorithm import AnyShard, Arrival, At, Context, Task
from fedsim.errors import UsageError, WireError
from fedsim.event_rules import Rule, Trigger
from fedsim.learning.gaussian import Gaussian, is_full, kl_divergence, unpacked
from fedsim.round_policy import RoundPolicy
from fedsim.wire.header import Header
from fedsim.wire.schema import RUNNING, Field, check_values, optional_group, schema
from fedsim.wrapper import AnyAlgorithm, StateWrapper


@cache
def client_state(inner: type, up: type, down: type) -> type:
    """Return the class of a client's state. trigger: the rule's state. sent: the last upload, if the server
    may fold it again. got, got_in: with +quiet, the client's last broadcast and its round."""
    columns = [("inner", inner), ("trigger", Trigger), ("sent", up | None), ("got", down | None)]
    return make_dataclass("WithTrigger", [*columns, ("got_in", int)], frozen=True)


@cache
def server_state(inner: type, up: type, down: type) -> type:
    """Return the class of the server's state. sent: every client's last upload if it may be folded again, or
    empty. got_in: the round of each client's last broadcast, (K,) int64, 0 for none. got: these broadcasts,
    by ascending round. waited: each client's rounds since its last upload, (K,) int64, -1 for none."""
    columns: list[tuple[str, Any]] = [("inner", inner), ("sent", tuple[up | None, ...])]  # type: ignore[valid-type]
    columns += [("got_in", Tensor), ("got", tuple[down, ...]), ("waited", Tensor)]  # type: ignore[valid-type]
    return make_dataclass("WithSent", columns, frozen=True)


@dataclass(frozen=True)
class EventTriggered(StateWrapper, RoundPolicy):
    """`inner` with a rule for uploads (up) and one for broadcasts (down); without a rule, all are sent."""

    up: Rule | None
    down: Rule | None

    sizes_are_fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check that the rules fit the algorithm.

        Raises:
            UsageError: If they do not; the message says why.
        """
        which = "+event" if self.up else "+quiet"
        if len(self.inner.exchanges) > 1 or self.inner.default_rounds == 1:
            what = (
                "has one round"
                if self.inner.default_rounds == 1
                else "has several exchanges a round, and each needs what all clients send in the one before"
            )
            raise UsageError(f"{which}: {self.name} {what}")
        if optional_group(self._up) or optional_group(self._down):
            raise UsageError(
                f"{which}: {self.name} sends some data only once, and whether they have arrived must not "
                "depend on a threshold"
            )
        if self.up is not None:
            self.inner.unsent()
        if self.down is not None:
            try:
                self.inner.check_stale(damped=False)
            except UsageError as e:
                raise UsageError(str(e).replace("--async", "+quiet", 1)) from None
        tensors = [f for f in schema(self._up) if f.python is Tensor and f.kind.dims != (RUNNING,)]
        if self._counts_zero and any(f.kind.dims != ("P",) for f in tensors):
            raise UsageError(f"{which}: an increment of {self.name} is no vector of its parameters")
        if self.up is not None and self.up.kind == "kl" and not self._has_posterior(self._up):
            raise UsageError(
                f"--participation +event:kl: uploads of {self.name} have no precision; take norm:C"
            )
        if self.down is not None and self.down.kind == "kl" and not self._has_posterior(self._down):
            raise UsageError(f"+quiet:kl: {self.name} broadcasts no precision; take norm:C")

    @property
    def _up(self) -> type:
        return self.inner.exchanges[0].up

    @property
    def _down(self) -> type:
        return self.inner.exchanges[0].down

    @staticmethod
    def _has_posterior(message: type) -> bool:
        names = {f.name.removeprefix("z_") for f in schema(message)}
        return "precision" in names and bool({"mean", "shift"} & names)

    @property
    def client_type(self) -> type:  # type: ignore[override]
        return client_state(self.inner.client_type, self._up, self._down)

    @property
    def server_type(self) -> type:  # type: ignore[override]
        return server_state(self.inner.server_type, self._up, self._down)

    @property
    def _keeps_uploads(self) -> bool:
        return self.up is not None and self.inner.unsent() == "last"

    @property
    def _counts_zero(self) -> bool:
        return self.up is not None and self.inner.unsent() == "zero"

    def check_sums(self, at: At) -> None:
        """Check that a damped dual step can count several times, which needs sums of weighted uploads.

        Raises:
            UsageError: If the algorithm defines no sums.
        """
        if self.up is not None and self.inner.dual_damping(at) < 1 and self.inner.exchanges[0].sums is None:
            raise UsageError(
                f"+event: a dual step of {self.name} counts for every round in which its client sent "
                "nothing, and for that the algorithm has to define add and from_sums, not server_update"
            )

    # ---- the client

    def client_init(self, ctx: Context, k: int) -> Any:
        return self.client_type(self.inner.client_init(ctx, k), Trigger(), None, None, 0)

    def client_update(self, client: Any, down: Any, shard: AnyShard, task: Task) -> tuple[Any, Any]:
        draft, up = self.inner.client_update(client.inner, down, shard, task)
        return replace(client, inner=draft), up

    def decide(
        self, algorithm: AnyAlgorithm, draft: Any, down: Any, up: Any, task: Task, *, size: int, fresh: bool
    ) -> tuple[Any, bool]:
        client = draft
        if self.down is not None and fresh and task.round:
            client = replace(client, got=down, got_in=task.round)
        trigger, sends = client.trigger, True
        if self.up is not None and task.round:
            weight = self._weight(trigger.waited, task.at)
            first = self.up.kind == "kl" and not trigger.sent  # nothing to compare with yet
            change = 0.0 if first else weight * measured(self.up, *self._compared(client, down, up, task))
            task = replace(task, weight=weight)
            sends = trigger.sends(self.up, change) or _is_unfit(up)
            trigger = trigger.after(self.up, change, size, sends)
        step = self.inner.client_commit if sends else self.inner.client_unsent
        client = replace(client, inner=step(client.inner, down, up, task), trigger=trigger)
        return (replace(client, sent=up) if sends and self._keeps_uploads and task.round else client), sends

    def _weight(self, waited: int, at: At) -> float:
        """Return the weight of a dual step after `waited` rounds without an upload."""
        return max(min(waited + 1.0, 1 / self.inner.dual_damping(at)), 1.0)

    def _compared(self, client: Any, down: Any, up: Any, task: Task) -> tuple[Any, Any]:
        match self.inner.unsent():
            case "dual":
                return self.inner.own_and_held(client.inner, down, up, task)
            case "zero":
                return up, None
            case _:
                return up, down if client.sent is None else client.sent

    # ---- the server

    def server_init(self, ctx: Context) -> Any:
        sent = (None,) * (ctx.K if self._keeps_uploads else 0)
        got_in = torch.zeros(ctx.K if self.down is not None else 0, dtype=torch.int64)
        waited = torch.full((ctx.K if self.up is not None else 0,), -1)
        return self.server_type(self.inner.server_init(ctx), sent, got_in, (), waited)

    def withheld(self, upload: Header) -> bool:
        return self.up is not None and upload.round > 0 and not upload.fields

    def keeps_older(self, task: Header) -> bool:
        return self.down is not None and task.round > 0 and not task.fields

    def older(self, server: Any, down: Any, clients: Collection[int]) -> dict[int, Any]:
        """Return, by client, the decoded last broadcast of clients that do not get `down`, because it differs
        too little from the last one."""
        if self.down is None:
            return {}
        stays = {
            r: got
            for r, got in _by_round(server).items()
            if not Trigger(sent=1).sends(self.down, measured(self.down, down, got))
        }
        return {k: stays[r] for k in clients if (r := int(server.got_in[k])) in stays}

    def server_update(self, server: Any, down: Any, arrivals: Iterable[Arrival], ctx: Context) -> Any:
        """Fold the uploads that count, each with its weight; `up` is None if the client's rule sent none."""
        if not ctx.round:
            return replace(server, inner=self.inner.server_update(server.inner, down, arrivals, ctx))
        sent, waited, there = list(server.sent), server.waited.clone(), list[int]()
        counts_rounds = len(waited) and ctx.edge_of is None
        older = self.older(server, down, range(ctx.K))

        def counted() -> Iterator[Arrival]:
            for a in arrivals:
                there.append(a.client)
                rounds = int(server.waited[a.client]) if counts_rounds else 0
                if a.up is None and rounds < 0:
                    raise WireError(f"client {a.client}'s first upload, in round {ctx.round}, has no fields")
                if counts_rounds:
                    waited[a.client] = 0 if a.up is not None else rounds + 1
                if sent and a.up is not None:
                    sent[a.client] = a.up
                up = self._counts(a.up, sent[a.client] if sent else None, down, ctx.start)
                if up is not None:
                    yield replace(a, up=up, at=replace(a.at, weight=self._weight(max(rounds, 0), a.at)))
                del a, up  # only one upload is in memory

        stream = counted()
        first = next(stream, None)
        inner = server.inner
        if first is not None:
            everything = chain([first], stream)
            del first
            mixed = replace(ctx, mixed=bool(older))
            inner = self.inner.server_update(server.inner, down, everything, mixed)
            for _ in stream:  # the algorithm may not have read every upload
                pass
        server = replace(server, inner=inner, sent=tuple(sent), waited=waited)
        return self._got(server, down, [k for k in there if k not in older], ctx)

    def _counts(self, up: Any, last: Any, down: Any, start: Tensor) -> Any:
        """Return the upload to fold: `up`, a substitute if `up` is None (not sent), or None for no upload."""
        if up is not None:
            return up
        match self.inner.unsent():
            case "dual":
                return None
            case "zero":
                return _zero(self._up, down, start)
            case _:
                return last

    def _got(self, server: Any, down: Any, clients: list[int], ctx: Context) -> Any:
        """Record that these clients' last broadcast is `down`, as their answers prove."""
        if self.down is None:
            return server
        known = _by_round(server) | {ctx.round: down}
        got_in = server.got_in.clone()
        got_in[clients] = ctx.round
        rounds = sorted(set(got_in.tolist()) - {0})
        return replace(server, got_in=got_in, got=tuple(known[r] for r in rounds))

    def check_edges(self, sizes: tuple[int, ...], merges: bool) -> None:
        if merges and self.up is not None and self.inner.dual_damping(At(sizes)) < 1:
            raise UsageError(
                f"--tree: with +event a dual step of {self.name} counts for every round in which its client "
                "sent nothing, and an edge server does not know how many these are"
            )
        if merges and self._keeps_uploads:
            raise UsageError(
                f"--tree: with +event the server of {self.name} counts every client's last upload again, and "
                "an edge server's sums do not have them one by one"
            )


def _by_round(server: Any) -> dict[int, Any]:
    """Return the clients' last broadcasts by round."""
    return dict(zip(sorted(set(server.got_in.tolist()) - {0}), server.got, strict=True))


def _is_unfit(up: Any) -> bool:
    """Return whether the receiver would refuse this upload."""
    try:
        check_values(up, "")
    except WireError:
        return True
    return False


def _zero(up: type, down: Any, start: Tensor) -> Any:
    """Return an upload whose increments and numbers are 0, with the broadcast's running statistics."""
    sizes = {"P": len(start)}

    def value(f: Field) -> Any:
        if f.kind.dims == (RUNNING,):
            return getattr(down, f.name)
        return start.new_zeros(f.shape(sizes)) if f.python is Tensor else 0.0

    return up(**{f.name: value(f) for f in schema(up)})


def measured(rule: Rule, own: Any, held: Any) -> float:
    """Return the change that a rule compares: a norm, or nats per parameter.

    own, held: messages or Gaussians; held is None for 0. For messages, the norm is over the differences of
    all tensors except precisions, curvatures and running statistics; for Gaussians, it is over the means.
    """
    if rule.kind == "kl":
        return _kl(own, held)
    return math.sqrt(sum(_squared(a, b) for a, b in _vectors(own, held)))


def _vectors(own: Any, held: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    if isinstance(own, Gaussian):
        yield own.mean, held.mean
        return
    for f in schema(type(own)):
        weights = f.kind.name != "curvature" and f.kind.dims != (RUNNING,)
        if f.python is Tensor and not f.kind.positive and weights and not f.members:
            yield getattr(own, f.name), getattr(held, f.name, None)


def _squared(own: Tensor, held: Tensor | None) -> float:
    change = own.double() if held is None else own.double() - held.double()
    return float(torch.linalg.vector_norm(change)) ** 2


def _kl(own: Any, held: Any) -> float:
    """Return the divergence KL(own || held) / P in nats; infinite if one of the two is improper."""
    q, p = (m if isinstance(m, Gaussian) else _gaussian(m) for m in (own, held))
    if not (q.is_proper and p.is_proper):
        return math.inf
    count = len(q.shift)
    if not is_full(q.precision):
        return (
            kl_divergence(q.mean, torch.as_tensor(q.precision), p.mean, torch.as_tensor(p.precision)) / count
        )
    S, S_p, distance = torch.as_tensor(q.precision), torch.as_tensor(p.precision), q.mean - p.mean
    trace = float(torch.linalg.solve(S, S_p).diagonal().sum())
    logs = float(torch.logdet(S) - torch.logdet(S_p))
    return (trace - count + logs + float(distance @ (S_p @ distance))) / 2 / count


def _gaussian(message: Any) -> Gaussian:
    precision = message.precision.double()
    full = precision.dim() == 1 and len(precision) != len(message.mean)
    return Gaussian.at(message.mean, unpacked(precision) if full else precision)


def event_triggered(algorithm: AnyAlgorithm, up: Rule | None, down: Rule | None, at: At) -> AnyAlgorithm:
    """Wrap the algorithm with these rules; return it unchanged if both are None. at: of any client.

    Raises:
        UsageError: If a rule does not fit the algorithm.
    """
    if up is None and down is None:
        return algorithm
    triggered = EventTriggered(algorithm, up, down)
    triggered.check_sums(at)
    return triggered
