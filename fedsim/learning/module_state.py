"""Restore what a module keeps beside its trained parameters, so that no task sees another one's traces.

A network is one torch module, and one process trains and scores many clients with it. A module may count its
steps, fill a table on first use, cache a value made from its weights, or draw from a generator of its own.
With such state the results would depend on the number of workers. `ModuleState` records all of it when the
network is made and restores it, in place, before every use.

Recorded are all objects that can be reached from the module: attributes of its submodules and their classes,
buffers, modes, hooks, variables that its functions close over or read from their file, and what containers
and objects among these hold. Contents are compared, so nothing is written where nothing has changed.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from io import IOBase
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Restore = Callable[[], object]

_LEAVES = (type(None), bool, int, float, complex, str, bytes, range, ModuleType, BuiltinFunctionType, IOBase)
_OURS = ("fedsim", "protocols", "workers", "launch")
_CACHE = type(cache(lambda: None))


class ModuleState:
    """The state of a module at one time."""

    def __init__(self, module: nn.Module, besides: Collection[Tensor] = ()) -> None:
        """Record the state. besides: buffers with the trained parameters, whose views are left alone."""
        self._storages = {tensor.untyped_storage()._cdata for tensor in besides}
        self._seen: dict[int, Any] = {}
        self._restores: list[Restore] = []
        self.unrestorable: dict[str, str] = {}
        """The kind of what is kept but cannot be restored, such as an iterator, by its name in the module."""
        self._record(module, "")

    def restore(self) -> None:
        """Restore everything that has changed."""
        for restore in self._restores:
            restore()

    def _record(self, value: Any, name: str) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # a reference, so that the id stays its own
        self._restores.extend(self._of(value, name))

    def _of(self, value: Any, name: str) -> Iterator[Restore]:
        """Yield functions that restore the value's own content, and visit what it holds."""
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or value.untyped_storage()._cdata in self._storages:
                return  # trained, or frozen and compared by its digest
            yield partial(_restore_tensor, value, value.detach().clone())
        elif isinstance(value, np.ndarray):
            yield partial(_restore_array, value, value.copy())
            for inner in value.flat if value.dtype == object else ():
                self._record(inner, name)
        elif isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            yield partial(value.setstate, value.getstate())
        elif isinstance(value, np.random.RandomState):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, np.random.Generator):
            yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        elif isinstance(value, dict):
            yield partial(_restore_dict, value, dict(value))
            for key, inner in list(value.items()):
                self._record(key, name)
                self._record(inner, f"{name}.{key}".lstrip(".") if isinstance(key, str) else name)
        elif isinstance(value, list | deque | set | bytearray):
            yield partial(_restore_collection, value, list(value))
            for inner in () if isinstance(value, bytearray) else list(value):
                self._record(inner, name)
        elif isinstance(value, tuple | frozenset):
            for inner in value:
                self._record(inner, name)
        elif isinstance(value, FunctionType):
            yield from self._of_function(value, name)
        elif isinstance(value, MethodType):
            self._record(value.__self__, name)
            self._record(value.__func__, name)
        elif isinstance(value, _CACHE):
            yield value.cache_clear
        elif isinstance(value, partial):
            for inner in (value.func, value.args, value.keywords):
                self._record(inner, name)
        elif isinstance(value, type):
            if not _of_a_library(value):
                yield from self._of_class(value, name)
        elif hasattr(value, "__next__"):
            self.unrestorable[name or "itself"] = f"an iterator ({type(value).__name__})"
        elif not _of_a_library(type(value)) or isinstance(value, nn.Module):
            yield from self._of_object(value, name)

    def _of_object(self, value: Any, name: str) -> Iterator[Restore]:
        """Yield the restores of an object's attributes. Names of submodules are those of torch."""
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield partial(_restore_dict, attributes, dict(attributes))
            for key, inner in list(attributes.items()):
                registers = isinstance(value, nn.Module) and key in ("_modules", "_buffers", "_parameters")
                self._record(inner, name if registers else f"{name}.{key}".lstrip("."))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, slot) and slot not in ("__dict__", "__weakref__"):
                    yield partial(_restore_attribute, value, slot, getattr(value, slot))
                    self._record(getattr(value, slot), f"{name}.{slot}".lstrip("."))
        self._record(type(value), name)

    def _of_class(self, kind: type, name: str) -> Iterator[Restore]:
        """Yield the restores of a user's class: its attributes, and what its methods close over."""
        for base in kind.__mro__[1:]:
            self._record(base, name)
        for key, inner in list(vars(kind).items()):
            if isinstance(inner, staticmethod | classmethod):
                self._record(inner.__func__, name)
            elif isinstance(inner, property):
                for function in (inner.fget, inner.fset):
                    self._record(function, name)
            elif isinstance(inner, FunctionType | _CACHE):
                self._record(inner, name)
            elif not key.startswith("__"):
                yield partial(_restore_attribute, kind, key, inner)
                self._record(inner, f"{name}.{key}".lstrip("."))

    def _of_function(self, function: FunctionType, name: str) -> Iterator[Restore]:
        """Yield the restores of the variables of a user's function that outlive its calls."""
        if _of_a_library(function):
            return
        self._record(function.__defaults__, name)
        self._record(function.__kwdefaults__, name)
        self._record(function.__dict__, name)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _holds(cell):
                yield partial(_restore_attribute, cell, "cell_contents", cell.cell_contents)
                self._record(cell.cell_contents, f"{name}.{variable}".lstrip("."))
        for variable in dict.fromkeys(_globals(function.__code__)):
            if variable in function.__globals__:
                inner = function.__globals__[variable]
                yield partial(_restore_item, function.__globals__, variable, inner)
                self._record(inner, variable)


def _of_a_library(value: Any) -> bool:
    """Return whether a class or function is Python's, torch's, fedsim's or another installed package's.

    Their objects are left alone: what matters of them are tensors, containers and generators.
    """
    root = str(getattr(value, "__module__", None) or "builtins").partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return True
    file = getattr(sys.modules.get(str(value.__module__)), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file or root in _OURS


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the names that code, and the functions defined in it, may look up among global variables."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)


def _holds(cell: CellType) -> bool:
    """Return whether a variable that functions close over has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _restore_tensor(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape or tensor.dtype != before.dtype:
        tensor.data = before.clone()
    elif not torch.equal(tensor, before):
        with torch.no_grad():
            tensor.copy_(before)


def _restore_array(array: np.ndarray, before: np.ndarray) -> None:
    if array.shape != before.shape:
        array.resize(before.shape, refcheck=False)
    if array.flags.writeable:
        array[...] = before


def _restore_dict(values: dict[Any, Any], before: dict[Any, Any]) -> None:
    same = len(values) == len(before) and all(
        a is b and values[a] is before[b] for a, b in zip(values, before, strict=True)
    )
    if not same:
        values.clear()
        values.update(before)


def _restore_collection(values: Any, before: list[Any]) -> None:
    if len(values) == len(before) and all(a is b for a, b in zip(values, before, strict=True)):
        return
    if isinstance(values, bytearray):
        values[:] = bytes(before)
        return
    values.clear()
    (values.update if isinstance(values, set) else values.extend)(before)


def _restore_attribute(owner: Any, name: str, before: Any) -> None:
    if getattr(owner, name, None) is not before:
        setattr(owner, name, before)


def _restore_item(values: dict[str, Any], name: str, before: Any) -> None:
    if values.get(name) is not before:
        values[name] = before
