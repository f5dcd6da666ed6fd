"""Check the values that the methods of a user's algorithm return, as soon as they return.

A wrong value would otherwise cause an error later, in a file that is not the user's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from fedsim import plugins
from fedsim.algorithm import Algorithm, AnyShard, Arrival, Context, Exchange, Task
from fedsim.errors import UsageError
from fedsim.learning.gaussian import Gaussian, Model, Point, Samples
from fedsim.sums import type_of_sums
from fedsim.wire.schema import values_of

AnyAlgorithm = Algorithm[Any, Any, Any, Any]


class _Checked(Algorithm[Any, Any, Any, Any]):
    """The methods of the next base class, the user's algorithm, each with a check of its result."""

    _owner = _spec = ""
    _changes: ClassVar[dict[str, Any]] = {}
    """The parts of the exchange that a variant changes: its messages, and no sums."""

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        exchanges = super().exchanges
        if {"down", "up"} & self._changes.keys() and len(exchanges) > 1:
            raise UsageError(f"{self._owner}: its round has {len(exchanges)} exchanges; define exchanges too")
        return tuple(replace(e, **self._changes) for e in exchanges)

    def _instance(self, method: str, value: Any, kind: Any) -> Any:
        """Return the value, of exactly this class: the fields of a subclass are not sent and not stored."""
        wrong = type(value) is not kind if is_dataclass(kind) else not isinstance(value, kind)
        if isinstance(kind, type) and wrong:
            self._wrong(method, f"a {_name(kind, type(value))}", value, _name(type(value), kind))
        return value

    def _message(self, method: str, value: Any, kind: Any) -> Any:
        """Return the message, whose tensors have the dimensions of their kinds."""
        for field, part in values_of(self._instance(method, value, kind)):
            if field.kind.dims and isinstance(part, Tensor) and part.dim() != len(field.kind.dims):
                shape, says = tuple(part.shape), ", ".join(field.kind.dims)
                name = f"{kind.__name__}.{field.name}"
                raise UsageError(
                    f"{self._owner}: {name} of {method} has shape {shape}; its kind says ({says})"
                )
        return value

    def _wrong(self, method: str, rule: str, value: Any, name: str = "") -> None:
        text = f"{len(value)} values" if isinstance(value, tuple) else f"a {name or type(value).__name__}"
        if value is None:
            text = "None (is there a return?)"
        elif name and is_dataclass(value):
            text += (
                ". A variant of an algorithm names a class of its own in the annotation of server_init, "
                "client_init, broadcast or client_update, and defines every method that makes one"
            )
        raise UsageError(f"{self._owner}: {method} must return {rule}; it returned {text}")

    def _called(self, method: str) -> AbstractContextManager[None]:
        """Return a block in which an exception of the user's code becomes a UsageError."""
        return plugins.user_code_errors(self._spec, "--algo", method)

    def server_init(self, ctx: Context) -> Any:
        with self._called("server_init"):
            result = super().server_init(ctx)  # type: ignore[safe-super]
        return self._instance("server_init", result, self.server_type)

    def client_init(self, ctx: Context, k: int) -> Any:
        with self._called("client_init"):
            result = super().client_init(ctx, k)  # type: ignore[safe-super]
        return self._instance("client_init", result, self.client_type)

    def broadcast(self, server: Any, ctx: Context) -> Any:
        kind = self.exchanges_in(ctx.round)[ctx.exchange - 1].down
        with self._called("broadcast"):
            result = super().broadcast(server, ctx)  # type: ignore[safe-super]
        return self._message("broadcast", result, kind)

    def client_update(self, client: Any, down: Any, shard: AnyShard, task: Task) -> tuple[Any, Any]:
        with self._called(f"client_update of client {task.client} in round {task.round}"):
            result: Any = super().client_update(client, down, shard, task)  # type: ignore[safe-super]
        kind = self.exchanges_in(task.round)[task.exchange - 1].up
        if not isinstance(result, tuple) or len(result) != 2:
            self._wrong("client_update", f"two values, the client's state and a {kind.__name__}", result)
        return result[0], self._message("client_update", result[1], kind)

    def client_commit(self, client: Any, down: Any, up: Any, task: Task) -> Any:
        with self._called(f"client_commit of client {task.client} in round {task.round}"):
            result = super().client_commit(client, down, up, task)
        return self._instance("client_commit", result, self.client_type)

    def server_update(self, server: Any, down: Any, arrivals: Iterable[Arrival], ctx: Context) -> Any:
        with self._called("the server's update"):
            result = super().server_update(server, down, arrivals, ctx)
        return self._instance("server_update", result, self.server_type)

    def from_sums(self, server: Any, down: Any, sums: Any, ctx: Context) -> Any:
        result = super().from_sums(server, down, sums, ctx)
        return self._instance("from_sums", result, self.server_type)

    def model(self, server: Any, ctx: Context) -> Model:
        with self._called("model"):
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


def _name(kind: type, other: type) -> str:
    """Return the name of a class, with its file if another class has the same name."""
    if kind.__name__ != other.__name__:
        return kind.__name__
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__
    return f"{kind.__name__} of {Path(file).name}"


def _of_variant(algorithm: type[AnyAlgorithm], name: str) -> dict[str, Any]:
    """Return the attributes by which what a variant defines replaces what its parents do in other methods."""

    def defines(*names: str) -> int:
        return next(i for i, kind in enumerate(algorithm.__mro__) if any(n in vars(kind) for n in names))

    update, sums = defines("server_update"), defines("add", "from_sums")
    changes = {"sums": None} if update < sums else {}
    for side in ("down", "up"):
        if any(f"{side}_type" in vars(kind) for kind in algorithm.__mro__[: defines("exchanges")]):
            changes[side] = getattr(algorithm, f"{side}_type")
    attributes: dict[str, Any] = {"_changes": changes}
    if sums < update and "add" not in vars(algorithm.__mro__[update]):
        attributes["server_update"] = Algorithm.server_update
    if "name" not in vars(algorithm):
        attributes["name"] = name
    averages = defines("stale_damping")
    if (
        min(update, sums) < averages < algorithm.__mro__.index(Algorithm)
        and defines("folds_stale") >= averages
    ):
        attributes["folds_stale"] = (
            False  # from_sums of the parent knows ctx.mixed, and the variant's may not
        )
    return attributes


def _check_methods(algorithm: type[AnyAlgorithm], owner: str) -> None:
    """Check that own methods accept the arguments of the contract, and that the fold is complete.

    Raises:
        UsageError: if not; the message names the file and the line.
    """
    ours = algorithm.__mro__.index(Algorithm)
    own = {name: m for kind in reversed(algorithm.__mro__[:ours]) for name, m in vars(kind).items()}
    for name, method in own.items():
        contract = getattr(Algorithm, name, None)
        if not (inspect.isfunction(method) and inspect.isfunction(contract)):
            continue
        names = list(inspect.signature(contract).parameters)
        try:
            inspect.signature(method).bind(*names)
        except TypeError as e:
            call = f"{name}({', '.join(names[1:])})"
            raise UsageError(f"{owner}: {_place(method)}: {name} is called as {call}: {e}") from None
    add = own.get("add")
    if "server_update" in own and not (add and "from_sums" in own):
        return
    if lacks := [name for name in ("add", "from_sums") if name not in own]:
        raise UsageError(f"{owner}: the fold lacks {' and '.join(lacks)}; or it is server_update")
    if type_of_sums(algorithm) in (None, Any) and not {"exchanges", "sums_type", "no_sums"} & own.keys():
        raise UsageError(
            f"{owner}: {_place(add)}: add needs a return annotation, such as -> Sums, that names the type of "
            "the sums"
        )


def _place(method: Any) -> str:
    code = inspect.unwrap(method).__code__
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


@cache
def checked(algorithm: type[AnyAlgorithm], spec: str) -> type[AnyAlgorithm]:
    """Return a subclass of the algorithm whose methods raise a UsageError if they return a wrong value."""
    attributes = {key: getattr(algorithm, key) for key in ("__module__", "__qualname__", "__doc__")}
    name = plugins.short(spec)
    _check_methods(algorithm, f"--algo {name}")
    attributes |= {"_owner": f"--algo {name}", "_spec": spec, **_of_variant(algorithm, name)}
    created: type[AnyAlgorithm] = type(algorithm.__name__, (_Checked, algorithm), attributes)
    return created
