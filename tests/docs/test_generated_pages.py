"""The pages that scripts in docs/recipes write are current; those that only the site has match the code."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from markdown_it import MarkdownIt

from launch.results.describe import hyperparameter_rows, wire_cost
from protocols import REGISTRY

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(DOCS / "recipes"))
    before = set(sys.modules)
    yield importlib.import_module(request.param)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == DOCS / "recipes":
            del sys.modules[name]


@pytest.mark.parametrize(
    "script", ["overview_picture", "round_machine_diagram", "statistics_page", "traffic"], indirect=True
)
def test_the_pages_are_what_the_script_writes(script: ModuleType) -> None:
    outdated = [
        name
        for name, text in script.files().items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != text
    ]
    assert outdated == [], f"run python docs/recipes/{script.__name__}.py"


@pytest.mark.parametrize("script", ["round_machine_diagram"], indirect=True)
def test_the_diagram_has_every_phase_event_and_command_of_the_round_machine(script: ModuleType) -> None:
    transitions, _ = script.explored()
    assert {t.origin for t in transitions} | {t.target for t in transitions} == set(script.PHASES)
    assert set(script.meanings()) == set(script.PHASES)
    assert {t.event for t in transitions} == set(script.EVENTS)
    assert {name for variants in transitions.values() for v in variants for name in v} == set(script.COMMANDS)


def test_every_algorithm_has_a_page_with_its_cost_and_hyperparameters() -> None:
    pages = runpy.run_path(str(DOCS / "algorithm_pages.py"))["pages"]()
    assert list(pages) == [f"algorithms/{kind.name}.md" for kind in REGISTRY]
    for kind in REGISTRY:
        page = pages[f"algorithms/{kind.name}.md"]
        assert f"**{wire_cost(kind())}**" in page
        for name, default, *_ in hyperparameter_rows(kind()):
            cell = default.replace("|", "\\|")
            assert f"\n| {name} | {cell} |" in page


def test_the_overview_links_every_algorithm_to_its_file() -> None:
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    folder = DOCS.parent / "protocols"
    files = {kind.name: str(Path(inspect.getfile(kind)).relative_to(folder)) for kind in REGISTRY}
    assert re.findall(r"\[(\w+)\]\(\.\./protocols/([\w/]+\.py)\)", text) == list(files.items())


def test_a_page_shows_signs_of_formulas_as_they_are() -> None:
    prose = runpy.run_path(str(DOCS / "algorithm_pages.py"))["_prose"]
    (paragraph,) = MarkdownIt().parse(prose("w_k <- v_k * [1, 2] | 3 and\n    `a_b`, _c_"))[1:2]
    shown = "".join(child.content for child in paragraph.children or [])
    assert shown == "w_k <- v_k * [1, 2] | 3 and a_b, _c_"


@pytest.mark.parametrize("script", ["traffic"], indirect=True)
def test_the_traffic_page_has_a_row_per_budget_and_its_picture(script: ModuleType, tmp_path: Path) -> None:
    script.main(["--out", str(tmp_path)])
    assert (tmp_path / script.PICTURE).stat().st_size > 50_000
    assert script.SHOWN.keys() <= script.curves().keys()
    page = (tmp_path / script.PAGE).read_text(encoding="utf-8")
    for budget in script.BUDGETS:
        assert page.count(f"\n| {budget} P (") == 1


@pytest.mark.parametrize("script", ["traffic"], indirect=True)
def test_a_traffic_below_the_third_round_has_no_accuracy(script: ModuleType) -> None:
    curve = [(6.0, [60.0, 62.0]), (8.0, [64.0, 66.0])]
    assert script.within(curve, 5) is None
    assert script.within(curve, 7) == [60.0, 62.0]
    assert script.within(curve, 100) == [64.0, 66.0]
