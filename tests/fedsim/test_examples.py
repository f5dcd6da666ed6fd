"""Every public class and function has an example in its docstring, and every example gives what it says."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import fedsim

PUBLIC = {name: value for name in fedsim.__all__ if callable(value := getattr(fedsim, name))}
DOCUMENTED = sorted(
    name
    for name, value in PUBLIC.items()
    if inspect.isfunction(value)
    or (inspect.isclass(value) and (value is fedsim.FedsimError or not issubclass(value, Exception)))
)
"""Functions and classes; of the errors, which nobody calls, their base class. Others are types of fields."""
PROCESSES = {"sweep"}


def _examples(name: str) -> doctest.DocTest:
    text = inspect.getdoc(PUBLIC[name]) or ""
    return doctest.DocTestParser().get_doctest(text, {}, f"fedsim.{name}", None, None)


def test_functions_and_classes_of_all_kinds_are_among_them() -> None:
    assert {"run", "step_size", "Algorithm", "Gaussian", "Bound", "FieldKind"} <= set(DOCUMENTED)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_it_has_an_example_that_calls_it(name: str) -> None:
    section = (inspect.getdoc(PUBLIC[name]) or "").partition("Examples:")[2]
    code = "".join(example.source for example in doctest.DocTestParser().get_examples(section))
    assert f"fedsim.{name}" in code or name == "Run"  # which fedsim.run returns


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.process if n in PROCESSES else ()) for n in DOCUMENTED]
)
def test_the_example_gives_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(_examples(name), out=failures.append)
    assert result.failed == 0, "".join(failures)
    assert result.attempted > 1
