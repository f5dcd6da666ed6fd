"""docs/notebooks: each runs from beginning to end, and its page has its text, its code and its output.

What a notebook says of its numbers it asserts itself.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.commands import DEADLINE
from tests.support.pages import notebooks

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"
NAMES = sorted(file.stem for file in NOTEBOOKS.glob("*.py"))
OUTPUT = re.compile(r"^```text\n.*?^```\n\n", re.DOTALL | re.MULTILINE)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "recipes"))
    return importlib.import_module("notebook_pages")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_gives_its_page(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "recipes" / "notebook_pages.py"), name, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "FEDSIM_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    written = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    assert len(OUTPUT.findall(written)) >= 3
    pictures = re.findall(r"!\[.*\]\((.*)\)\n\n", written)
    assert {file.name for file in tmp_path.glob("*.png")} == set(pictures)
    assert re.sub(r"!\[.*\n\n", "", OUTPUT.sub("", written)) == OUTPUT.sub("", notebooks()[name])


def test_there_are_the_four_notebooks_of_the_site() -> None:
    assert NAMES == ["first_run", "partial_participation", "where_the_bytes_go", "write_scaffold"]


def test_cells_have_their_text_and_line(script: ModuleType) -> None:
    source = "# ---\n# jupyter: x\n# ---\n\n# %% [markdown]\n# # Title\n#\n# text\n\n# %%\na = 1\n\n\nb = a\n"
    prose, code = script.cells(source)
    assert (prose.prose, prose.text) == (True, "# Title\n\ntext")
    assert (code.prose, code.text) == (False, "a = 1\n\n\nb = a")
    assert source.splitlines()[code.line - 1] == "a = 1"


def test_a_cell_that_fails_ends_the_notebook(script: ModuleType, tmp_path: Path) -> None:
    """In a process of its own, because a notebook's cells take the place of __main__."""
    lines = (
        "import notebook_pages as n, pathlib",
        "cells = list(n.cells('# %%\\nprint(1)\\n\\n# %%\\nassert 1 == 2\\n'))",
        "list(n.carry_out('made', cells, pathlib.Path()))",
    )
    done = subprocess.run(
        [sys.executable, "-c", "; ".join(lines)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'docs' / 'recipes'}"},
    )
    assert done.returncode == 1
    assert 'made.py", line 5' in done.stderr and "AssertionError" in done.stderr
