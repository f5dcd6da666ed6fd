"""The program that calls fedsim from Python: what a run must leave as it was, and what help() shows."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType
from typing import Any

from fedsim.experiment import Experiment
from launch.configuration.arguments import ExperimentOptions, Options
from launch.configuration.execution import Execution
from launch.inherited import check_working_folder, children_kept


@contextmanager
def called() -> Iterator[None]:
    """Begin a call from a user's program: its child processes are awaited."""
    check_working_folder()
    with children_kept():
        yield


@contextmanager
def process_restored() -> Iterator[None]:
    """Restore this process's environment variables and torch settings when the block ends."""
    environment = dict(os.environ)
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    flushes = sys.float_info.min / 2.0 == 0.0  # this thread flushes denormal numbers to zero
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            torch.set_flush_denormal(flushes)
            if threads is not None:
                torch.set_num_threads(threads)


@contextmanager
def without_main() -> Iterator[None]:
    """Keep new processes from importing the calling program, so it needs no `if __name__ == "__main__"`."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def with_defaults(function: Callable[..., Any]) -> inspect.Signature:
    """Return the function's signature for help(), with the keywords of Options and their defaults."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    known = {f.name: f.default for kind in (Experiment, Execution) for f in fields(kind)}
    known |= {"hyperparameters": None, "codecs": None, "workers": 0, "data_dir": None, "out": None}
    types = {**ExperimentOptions.__annotations__, **Options.__annotations__}
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=known[name],
            annotation=getattr(hint, "__forward_arg__", hint),
        )
        for name, hint in types.items()
    ]
    return inspect.Signature([*own, *more], return_annotation=function.__annotations__["return"])
