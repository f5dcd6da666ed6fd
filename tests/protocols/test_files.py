"""What a reader of an algorithm opens: the size of its file, the files that it imports, its references."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import protocols

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fedsim", "protocols", "workers", "launch")
MODULES = sorted(f for p in PACKAGES for f in (ROOT / p).rglob("*.py"))
ALGORITHMS = sorted(f for f in (ROOT / "protocols").rglob("*.py") if not f.name.startswith("_"))

ALGORITHM_LINES, LINES = 150, 600
EXCEPTIONS: dict[str, int] = {
    "protocols/mime.py": 222,  # two algorithms of one paper, with seven messages and states
    "protocols/precond_admm.py": 163,  # its set-up is a second object
    "protocols/fedlap_func.py": 186,
    "protocols/fedlap_cov_func.py": 175,
    "protocols/fedlap_func_public.py": 182,
}
"""Files that are longer than they may be, until they are gone."""


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_are_short_enough_to_read() -> None:
    limits = {path: ALGORITHM_LINES if path in ALGORITHMS else LINES for path in MODULES}
    limits |= {ROOT / name: limit for name, limit in EXCEPTIONS.items()}
    assert not {str(path): lines(path) for path, limit in limits.items() if lines(path) > limit}


def test_every_exception_names_a_file() -> None:
    assert all((ROOT / name).is_file() for name in EXCEPTIONS)


def opened(path: Path) -> set[str]:
    """The file itself and every module of protocols._* and fedsim.learning.solvers.* that it imports.

    Counted are direct imports of these two places only: the shared rule and the solver of an algorithm.
    Vocabulary (fedsim.algorithm, Gaussian, field kinds) is not counted, nor what the modules import in turn.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    assert not any(isinstance(n, ast.Import) and "protocols" in ast.unparse(n) for n in ast.walk(tree))
    shared = {m for m in imported if m.startswith(("protocols.", "fedsim.learning.solvers"))}
    return {f"protocols.{path.stem}"} | shared


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_an_algorithm_is_read_in_at_most_three_files(path: Path) -> None:
    assert len(opened(path)) <= 3, opened(path)


@pytest.mark.parametrize("algorithm", protocols.REGISTRY, ids=lambda a: a.name)
def test_an_algorithm_says_how_its_clients_train_and_what_they_carry_over(algorithm: Any) -> None:
    paragraphs = (sys.modules[algorithm.__module__].__doc__ or "").split("\n\n")
    (training,) = (p for p in paragraphs if p.startswith(("Local training is", "There is no local training")))
    words = ("carried over", "carry", "keeps nothing", "over rounds", "begin at zero")
    assert any(word in training.replace("\n", " ") for word in words)


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_an_algorithm_imports_no_other_algorithm(path: Path) -> None:
    others = opened(path) - {f"protocols.{path.stem}"}
    assert not [m for m in others if m.startswith("protocols.") and not m.startswith("protocols._")]


MEMORY_AND_SUMS = {"by_blocks", "partial", "spent", "owned", "give_up", "no_sums", "merged", "added"}
"""Names that belong in fedsim/learning/blocks.py, fedsim/algorithm.py and protocols/_site_algorithm.py."""


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_an_algorithm_states_formulas_and_neither_memory_nor_sums(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported = {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    methods = {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    assert not (imported | methods) & MEMORY_AND_SUMS
    assert "sums" not in methods or path.stem == "fedcurv"  # whose sums have names of their own on the wire


@pytest.fixture(scope="module")
def citations() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs/references/citations.toml").read_text())


@pytest.mark.parametrize("algorithm", protocols.REGISTRY, ids=lambda a: a.name)
def test_an_algorithm_cites_papers_of_the_citations(algorithm: Any, citations: dict[str, Any]) -> None:
    papers, entry = citations["papers"], citations["algorithms"][algorithm.name]
    text = sys.modules[algorithm.__module__].__doc__ or ""
    references = text.partition("\nReferences:\n")[2]
    keys = [entry["paper"], *(cited.partition(":")[0] for cited in entry["also"])]
    links = [papers[key]["url"] for key in keys if "url" in papers[key]]
    assert algorithm.url in links
    assert algorithm.url in references.split()
    assert f"docs/references/{entry['page']}" in references.split()
    cited = {word for word in references.split() if word.startswith("https://")}
    assert cited <= {paper["url"] for paper in papers.values() if "url" in paper}
