"""Objects that a user's program passes to fedsim.run: an algorithm, model, data set, split or schedule.

An Experiment contains only text. An object therefore gets a name like that of an object in a file,
/<python>/OPTION/MODULE.py:NAME, under which this process can look it up. Other processes do not have the
object: a run with an object has no worker processes, and another process that resumes the run must pass the
object again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from fedsim.errors import UsageError

ROOT = "/<python>/"
NOT_CODE = ("__doc__", "__module__", "__dict__", "__weakref__", "__abstractmethods__", "_abc_impl")
"""The attributes of a class that its digest leaves out."""
_objects: dict[str, object] = {}


def register(thing: object, option: str) -> str:
    """Store an object under its name, in place of an earlier object with this name, and return the name."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    name = re.sub(r"[^\w.]", "", str(getattr(named, "__qualname__", type(thing).__name__)))
    module = re.sub(r"[^\w.]", "", str(getattr(named, "__module__", "") or "unnamed"))
    spec = f"{ROOT}{option}/{module}.py:{name}"
    _objects[spec] = thing
    return spec


def is_live(spec: str) -> bool:
    """Return whether a spec names an object of this process, or of the process that started the run."""
    return spec.startswith(ROOT)


def load(spec: str, option: str) -> object:
    """Return the object with this name."""
    if spec not in _objects:
        name, keyword = spec.rpartition(":")[2], spec.removeprefix(ROOT).partition("/")[0]
        raise UsageError(
            f"{option} {name}: the run was begun from Python with an object of that process. Pass it again: "
            f"fedsim.resume(RUN, {keyword}={name}), or fedsim.open(RUN, {keyword}={name}) to read the model"
        )
    return _objects[spec]


def refuse_workers(spec: str, option: str) -> UsageError:
    """Return the error for an object in a run with worker processes; it names the alternative."""
    thing = _objects.get(spec)
    name = str(getattr(thing, "__qualname__", type(thing).__name__))
    file = inspect.getsourcefile(thing) if inspect.isclass(thing) or inspect.isfunction(thing) else None
    if file is not None and thing.__module__ != "__main__" and name.isidentifier():
        instead = f"Write {option}{f'{Path(file).resolve()}:{name}'!r}"
    else:
        instead = f"Put it into a file of its own and write {option}'FILE.py:NAME'"
    return UsageError(
        f"{option}{name} is an object of this program, and worker processes start without this program. "
        f"{instead}, or take workers=0"
    )


def digest(spec: str) -> str:
    """Return the sha256 of an object: the bytecode of a class or function, and the values of a dataclass.

    The digest changes with the code, but not with comments. It does not cover imported code.
    """
    result = hashlib.sha256()
    for piece in _pieces(_objects[spec], set()):
        result.update(len(piece).to_bytes(8, "little") + piece)
    return result.hexdigest()


def known(spec: str) -> bool:
    """Return whether this process has the object with this name."""
    return spec in _objects


def _pieces(thing: Any, seen: set[int]) -> Iterator[bytes]:
    """Yield the parts of an object that its digest covers, in the same order in every process."""
    if id(thing) in seen:
        return
    if isinstance(thing, str | bytes | int | float | complex | bool | None | type(Ellipsis)):
        yield repr(thing).encode()
        return
    seen.add(id(thing))
    if isinstance(thing, tuple | list):
        for item in thing:
            yield from _pieces(item, seen)
    elif isinstance(thing, dict):
        for item in thing.items():
            yield from _pieces(item, seen)
    elif isinstance(thing, set | frozenset):
        yield repr(sorted(map(repr, thing))).encode()
    elif isinstance(thing, CodeType):
        yield thing.co_code + repr(thing.co_names).encode() + repr(thing.co_varnames).encode()
        yield from _pieces(thing.co_consts, seen)
    elif isinstance(thing, FunctionType):
        yield from _pieces((thing.__code__, thing.__defaults__), seen)
        kwonly = thing.__kwdefaults__ or {}
        yield from _pieces(tuple(kwonly[key] for key in sorted(kwonly)), seen)
        yield from _pieces(tuple(_content(cell) for cell in thing.__closure__ or ()), seen)
    elif isinstance(thing, MethodType | staticmethod | classmethod):
        yield from _pieces(thing.__func__, seen)
    elif isinstance(thing, property):
        yield from _pieces(thing.fget, seen)
    elif isinstance(thing, functools.cached_property):
        yield from _pieces(thing.func, seen)
    elif isinstance(thing, functools.partial):
        yield from _pieces((thing.func, thing.args, *sorted(thing.keywords.items())), seen)
    elif inspect.isclass(thing):
        yield thing.__qualname__.encode()
        for base in thing.__bases__:
            if base.__module__ == thing.__module__:
                yield from _pieces(base, seen)
        for key in sorted(vars(thing)):
            if key not in NOT_CODE:
                yield key.encode()
                yield from _pieces(vars(thing)[key], seen)
    elif hasattr(thing, "tobytes"):  # an array
        yield repr((str(thing.dtype), thing.shape)).encode() + thing.tobytes()
    elif dataclasses.is_dataclass(thing):
        yield from _pieces(type(thing), seen)
        for f in dataclasses.fields(thing):
            yield from _pieces(getattr(thing, f.name), seen)
    else:
        yield type(thing).__qualname__.encode()


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was not bound yet
        return None
