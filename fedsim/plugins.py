"""Objects in a user's file, with names such as `path/to/file.py:Name`.

An object is an algorithm, a model, a data set, a partition, a schedule or a codec.

A file is executed at most once per process. The manifest records the digest of the executed bytes, because
results depend on them. A file may import only modules that are installed or on PYTHONPATH. This module
imports no large packages, because options are resolved before the fork server starts.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fedsim import live_objects, partition_specs, traces, user_files
from fedsim.errors import FedsimError, UsageError, unknown
from fedsim.foreign_files import read, sha256

if TYPE_CHECKING:
    from fedsim.experiment import Experiment


@dataclass(frozen=True)
class _File:
    """An executed file: its module, the digest of its bytes, and the names that it defines itself."""

    module: ModuleType
    sha256: str
    names: tuple[str, ...]


_files: dict[Path, _File] = {}


def is_spec(text: str) -> bool:
    """Return whether a choice is an object in a user's file, and not a built-in name."""
    return ".py:" in text or text.endswith(".py")


def absolute(spec: str) -> str:
    """Return the same spec with an absolute path, valid in every working directory."""
    path, name = path_and_name(spec)
    return f"{path}:{name}" if name else str(path)


WEIGHTS = "+weights:"
"""Separates a model from the file of weights that it starts from (fedsim.model_specs)."""

_FOLDERS = re.compile(r"(\+weights:|^rows:).*/")


def short(choice: str) -> str:
    """Return a name for display: `mine:Mine` for a spec, and other names without their files' folders."""
    if user_files.is_table(choice) and not partition_specs.is_file(choice):
        return user_files.short_table(choice)
    choice = _FOLDERS.sub(r"\1", choice)
    if not is_spec(choice):
        return choice
    path, name = path_and_name(choice)
    return f"{path.stem}:{name}" if name else path.name


def fingerprint(spec: str) -> str:
    """Return a spec's identity, which depends on the bytes of its file, but not on the file's folder."""
    path, name = path_and_name(spec)
    try:
        digest = sha256(path)
    except OSError as e:
        raise UsageError(f"{short(spec)}: cannot read {path}: {e.strerror}") from None
    return f"{path.stem}:{name}@{digest}"


def load(spec: str, option: str) -> object:
    """Load the object that `spec` names. option: the option for error messages, such as "--algo"."""
    if live_objects.is_live(spec):
        return live_objects.load(spec, option)
    path, name = path_and_name(spec)
    if not name:
        raise UsageError(f"{option} {path.name}: say what in the file is meant: {option} {spec}:NAME")
    file = _executed(path, spec, option)
    if not hasattr(file.module, name):
        raise unknown(f"name in {path} ({option}):", name, file.names)
    result: object = getattr(file.module, name)
    return result


def sources(choices: Iterable[str]) -> dict[str, str]:
    """Return the digests {path: sha256 of the executed bytes} of the user files among the choices.

    For an object of this process, the key is its name (fedsim.live_objects).
    """
    selected = [choice for choice in choices if is_spec(choice)]
    paths = [path_and_name(choice)[0] for choice in selected if not live_objects.is_live(choice)]
    files = {str(path): _files[path].sha256 for path in paths if path in _files}
    return files | {choice: live_objects.digest(choice) for choice in selected if live_objects.known(choice)}


def computing_options(experiment: Experiment) -> tuple[tuple[str, str], ...]:
    """Return the options that every process resolves and that may name a user's file, with their values."""
    e = experiment
    return (
        *(("--algo", e.algo), ("--model", e.model.partition(WEIGHTS)[0])),
        *(("--dataset", e.dataset), ("--partition", partition_specs.split_of(e.partition))),
        *(("--codec", codec) for codec in e.codecs.values()),
    )


def computing_choices(experiment: Experiment) -> tuple[str, ...]:
    """Return the values of `computing_options`."""
    return tuple(choice for _, choice in computing_options(experiment))


def all_choices(experiment: Experiment) -> tuple[str, ...]:
    """Return the values of `computing_options`, and the schedule, which only the coordinator resolves."""
    return (*computing_choices(experiment), traces.split(experiment.participation)[0])


@contextmanager
def user_code_errors(spec: str, option: str, doing: str) -> Iterator[None]:
    """Turn an exception of a user's code in this block into a UsageError with its line and message.

    A FedsimError is raised unchanged.
    """
    try:
        yield
    except FedsimError:
        raise
    except (Exception, SystemExit) as e:
        line = _line(e, path_and_name(spec)[0])
        where = f" in line {line}" if line else ""
        output = e.msg if isinstance(e, SyntaxError) else (str(e).splitlines() or [""])[0]
        raise UsageError(
            f"{option} {short(spec)}: {doing} failed{where}: {type(e).__name__}"
            + (f": {output}" if output else "")
        ) from e


def path_and_name(spec: str) -> tuple[Path, str]:
    """Return the absolute path and the name in a spec; the name is '' if it is missing."""
    head, _, name = spec.rpartition(".py:") if ".py:" in spec else (spec.removesuffix(".py"), "", "")
    return Path(os.path.realpath(Path(f"{head}.py").expanduser())), name  # resolve() fails in a loop of links


@contextmanager
def executed_anew() -> Iterator[None]:
    """Execute users' files again if this block loads them; after the block, restore the earlier modules."""
    files = dict(_files)
    _files.clear()
    try:
        yield
    finally:
        _files.clear()
        _files.update(files)
        sys.modules.update({file.module.__name__: file.module for file in files.values()})


def _executed(path: Path, spec: str, option: str) -> _File:
    try:
        source = read(path, links=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{option} {short(spec)}: there is no file {path}") from None
    except OSError as e:
        raise UsageError(f"{option} {short(spec)}: cannot read {path}: {e.strerror}") from None
    digest = hashlib.sha256(source).hexdigest()
    if path in _files and _files[path].sha256 == digest:
        return _files[path]
    # two files with the same stem are two modules; annotations are resolved through sys.modules
    module = ModuleType(f"user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        with user_code_errors(spec, option, "importing it"):
            tree = ast.parse(source, str(path))
            exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - SECURITY.md
    except BaseException:
        del sys.modules[module.__name__]
        raise
    _files[path] = _File(module, digest, tuple(_defined(tree)))
    return _files[path]


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the public names that a file defines at its top level, without imported ones."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound = [node.name]
        elif isinstance(node, ast.Assign):
            bound = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound = [node.target.id]
        else:
            continue
        yield from (name for name in bound if not name.startswith("_"))


def _line(error: BaseException, path: Path) -> int | None:
    """Return the innermost line of the user's file in an error's traceback."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)
