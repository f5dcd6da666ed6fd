"""Check the values that the methods of a user's algorithm return, as soon as they return.

A wrong value would otherwise cause an error later, in a file that is not the user's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor

from fedsim import plugins
from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Task
from fedsim.errors import UsageError
from fedsim.learning.gaussian import Gaussian, Model, Point, Samples


class _Checked(Algorithm[Any, Any, Any, Any]):
    """The methods of the next base class, the user's algorithm, each with a check of its result."""

    _owner = ""

    def _instance(self, method: str, value: Any, kind: Any) -> Any:
        if isinstance(kind, type) and not isinstance(value, kind):
            self._wrong(method, f"a {kind.__name__}", value)
        return value

    def _wrong(self, method: str, rule: str, value: Any) -> None:
        text = f"{len(value)} values" if isinstance(value, tuple) else f"a {type(value).__name__}"
        if value is None:
            text = "None (is there a return?)"
        raise UsageError(f"{self._owner}: {method} must return {rule}; it returned {text}")

    def server_init(self, ctx: Context) -> Any:
        return self._instance("server_init", super().server_init(ctx), self.server_type)  # type: ignore[safe-super]

    def client_init(self, ctx: Context, k: int) -> Any:
        return self._instance("client_init", super().client_init(ctx, k), self.client_type)  # type: ignore[safe-super]

    def broadcast(self, server: Any, ctx: Context) -> Any:
        kind = self.exchanges_in(ctx.round)[ctx.exchange - 1].down
        return self._instance("broadcast", super().broadcast(server, ctx), kind)  # type: ignore[safe-super]

    def client_update(self, client: Any, down: Any, shard: AnyShard, task: Task) -> tuple[Any, Any]:
        result: Any = super().client_update(client, down, shard, task)  # type: ignore[safe-super]
        kind = self.exchanges_in(task.round)[task.exchange - 1].up
        if not isinstance(result, tuple) or len(result) != 2:
            self._wrong("client_update", f"two values, the client's state and a {kind.__name__}", result)
        self._instance("client_update", result[1], kind)
        return result[0], result[1]

    def client_commit(self, client: Any, down: Any, up: Any, task: Task) -> Any:
        result = super().client_commit(client, down, up, task)
        return self._instance("client_commit", result, self.client_type)

    def server_update(self, server: Any, down: Any, ups: Iterable[tuple[int, Any]], ctx: Context) -> Any:
        result = super().server_update(server, down, ups, ctx)
        return self._instance("server_update", result, self.server_type)

    def from_sums(self, server: Any, down: Any, sums: Any, ctx: Context) -> Any:
        result = super().from_sums(server, down, sums, ctx)
        return self._instance("from_sums", result, self.server_type)

    def stale_update(self, server: Any, arrivals: Iterable[Arrival], ctx: Context) -> Any:
        result = super().stale_update(server, arrivals, ctx)
        return self._instance("stale_update", result, self.server_type)

    def model(self, server: Any, ctx: Context) -> Model:
        result: Any = super().model(server, ctx)  # type: ignore[safe-super]
        if not isinstance(result, Point | Gaussian | Samples):
            self._wrong("model", "a Point, Gaussian or Samples of fedsim.learning.gaussian", result)
        shape = tuple(result.mean.shape) if isinstance(result.mean, Tensor) else type(result.mean).__name__
        if shape != tuple(ctx.start.shape):
            raise UsageError(
                f"{self._owner}: the mean of model must be a tensor of shape {tuple(ctx.start.shape)}; "
                f"it has {shape}"
            )
        checked: Model = result
        return checked


@cache
def checked(algorithm: type[Algorithm[Any, Any, Any, Any]], spec: str) -> type[Algorithm[Any, Any, Any, Any]]:
    """Return a subclass of the algorithm whose methods raise a UsageError if they return a wrong value."""
    attributes = {"_owner": f"--algo {plugins.short(spec)}", "__doc__": algorithm.__doc__}
    names = {key: getattr(algorithm, key) for key in ("__module__", "__qualname__")}
    created: type[Algorithm[Any, Any, Any, Any]] = type(
        algorithm.__name__, (_Checked, algorithm), {**attributes, **names}
    )
    return created
