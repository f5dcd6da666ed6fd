"""The origin of a value, which determines its name in errors: --clients 0, clients = 0 in FILE, clients=0.

Most checks name an option of the command line. If the value came from a file or from Python, the error is
reworded to name the file's key or the Python argument.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from fedsim.errors import DataError, MismatchError, UsageError
from fedsim.experiment import Experiment
from fedsim.specs import number
from launch.configuration.execution import Execution

PYTHON = "Python"
REPEATED = ("hyperparameters", "codecs")
"""Tables whose keys are set one by one: --set KEY=VALUE, --codec FIELD=CODEC."""
_OPTION = re.compile(
    r"(?<![\w-])--([a-z][a-z-]*)"
    r"(?: ('[^']*'|[^\s']\S*(?=:\s)|tcp://[^\s,;]+|[^\s:=]+=[^\s,;:]+|\d[\w.%]*|"
    r"(?:auto|cpu|native|none|portable|tcp)\b|[A-Z]+\b))?"
)
"""Pattern of an option and its value, if any, in an error: --clients 0: ..., --set lr=1, --link 'up=x'."""


@cache
def options() -> Mapping[str, str]:
    """Return the option of every field of Experiment and Execution."""
    result = {}
    for kind in (Experiment, Execution):
        hints = get_type_hints(kind, include_extras=True)
        for f in fields(kind):
            supplied = (hints[f.name].__metadata__[0].extra or {})["name"]
            result[f.name] = "--" + f.name.replace("_", "-") if supplied is None else supplied
    return result


@cache
def _fields() -> Mapping[str, str]:
    """Return the Python argument for each option, including those of fedsim.compare and fedsim.sweep."""
    others = {f"--{name}": name for name in ("to", "where", "over", "seeds", "jobs", "runs")}
    return {option: name for name, option in options().items() if option} | others


@dataclass(frozen=True)
class Origins:
    """The origins of the values of an experiment and its execution.

    Attributes:
        typed: The dotted keys on the command line, by table.
        file: The file of --config; "" without --config, and "Python" for arguments in Python.
        written: The keys in that file, by table.
    """

    typed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    file: str = ""
    written: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def named(self, table: str, key: str, value: Any) -> str:
        """Return a key and its value in the form that the user wrote."""
        if self.file == PYTHON:
            return f"{table}={{{key!r}: {value!r}}}" if table in REPEATED else f"{key}={value!r}"
        if self._in_file(table, key):
            return f"[{table}] of {self.file}: {key} = {value!r}"
        text = f"{value:g}" if isinstance(value, float) else f"{value}"
        if table in REPEATED:
            return f"{options()[table]} {key}={text}"
        return f"{options().get(key) or key} {text}"

    def whence(self, table: str, key: str) -> str:
        """Return a text about the place of a key, for an error; "" for the command line."""
        return f"it is in {self.file}" if self._in_file(table, key) else ""

    def _in_file(self, table: str, key: str) -> bool:
        return key not in self.typed.get(table, ()) and key in self.written.get(table, ())

    @contextmanager
    def own_words(self) -> Iterator[None]:
        """Reword errors in the block, so that they name file keys or arguments if the user gave those."""
        try:
            yield
        except (UsageError, DataError, MismatchError) as e:
            text = self.reworded(str(e))
            if text == str(e):
                raise
            raise type(e)(text) from None

    def reworded(self, text: str) -> str:
        """Replace all options in an error by arguments (Python), or the first one by its key (file)."""
        if self.file == PYTHON:
            return _OPTION.sub(_as_argument, text)
        first = _OPTION.match(text)
        key = _fields().get(f"--{first[1]}", "") if first else ""
        tables = [table for table in ("experiment", "execution") if self._in_file(table, key)]
        if first is None or not tables:
            return text
        value = f" = {first[2]}" if first[2] else ""
        return f"[{tables[0]}] of {self.file}: {key}{value}{text[first.end() :]}"


def _as_argument(match: re.Match[str]) -> str:
    """Return participation='11' for --participation '11', hyperparameters={'lr': 1} for --set lr=1."""
    key, value = _fields().get(f"--{match[1]}", ""), match[2]
    if not key:
        return match[0]
    if value is None:
        return f"{key}="
    value = value.strip("'")
    if key in REPEATED:
        name, _, rest = value.partition("=")
        return f"{key}={{{name!r}: {repr(rest) if key == 'codecs' and rest else rest or '...'}}}"
    return f"{key}={value}" if value.isupper() or not math.isnan(number(value)) else f"{key}={value!r}"
