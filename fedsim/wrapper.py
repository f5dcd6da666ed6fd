"""The base class of wrappers, which delegate everything they do not define to an inner algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fedsim.algorithm import Algorithm, Context

AnyAlgorithm = Algorithm[Any, Any, Any, Any]


def _of_inner(name: str) -> Any:
    """Return a property that returns the inner algorithm's attribute or method of this name."""
    return property(attrgetter(f"inner.{name}"))


@dataclass(frozen=True)
class Wrapper(AnyAlgorithm):
    """An algorithm that adds something to the clients or the server of `inner` (docs/decisions/011*.md)."""

    inner: AnyAlgorithm

    name = _of_inner("name")
    paper = _of_inner("paper")
    default_model = _of_inner("default_model")
    default_rounds = _of_inner("default_rounds")
    centralised = _of_inner("centralised")
    fed_back = _of_inner("fed_back")
    duals = _of_inner("duals")
    eval_samples = _of_inner("eval_samples")
    stale_damping = _of_inner("stale_damping")
    server_type = _of_inner("server_type")
    client_type = _of_inner("client_type")
    exchanges = _of_inner("exchanges")
    setup = _of_inner("setup")
    public_inputs = _of_inner("public_inputs")
    sizes_on_wire = _of_inner("sizes_on_wire")
    check = _of_inner("check")
    server_init = _of_inner("server_init")
    client_init = _of_inner("client_init")
    broadcast = _of_inner("broadcast")
    broadcast_to = _of_inner("broadcast_to")
    client_update = _of_inner("client_update")
    client_commit = _of_inner("client_commit")
    server_update = _of_inner("server_update")
    unsent = _of_inner("unsent")
    client_unsent = _of_inner("client_unsent")
    dual_damping = _of_inner("dual_damping")
    own_and_held = _of_inner("own_and_held")
    check_stale = _of_inner("check_stale")
    model = _of_inner("model")
    report = _of_inner("report")

    @property
    def unwrapped(self) -> AnyAlgorithm:
        return self.inner.unwrapped


@dataclass(frozen=True)
class StateWrapper(Wrapper):
    """A wrapper whose server state and client states have the inner algorithm's states as `inner`."""

    def broadcast(self, server: Any, ctx: Context) -> Any:
        return self.inner.broadcast(server.inner, ctx)

    def broadcast_to(self, server: Any, k: int, ctx: Context) -> object | None:
        return self.inner.broadcast_to(server.inner, k, ctx)

    def model(self, server: Any, ctx: Context) -> Any:
        return self.inner.model(server.inner, ctx)

    def report(self, server: Any, ctx: Context) -> Mapping[str, float]:
        return self.inner.report(server.inner, ctx)

    def dual_mismatch(self, server: Any, clients: Iterable[Any]) -> float | None:
        return self.inner.dual_mismatch(server.inner, (client.inner for client in clients))
