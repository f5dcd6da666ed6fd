"""What the text of the repository points to exists in the repository, or at a public address."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import protocols

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = re.compile(
    r"papers-and-code|design\.md|design section|trial-results|gpu-and-peers|house\.md|shared/(?!data)"
    r"|(?<!docs/)reference/(?![*s{])|(?<!docs/)wire\.md [0-9]|reliability\.md [0-9]"
)
"""Notes that the developers have beside the repository."""


def offences(text: str) -> list[str]:
    return [match[0] for match in FOREIGN.finditer(text)]


def test_the_search_finds_what_it_looks_for() -> None:
    assert offences("as in papers-and-code.md 3.1") and offences("(reference/wire.md 2.3)")
    assert not offences("docs/references/equations.md#fedlap and docs/wire.md")


def test_nothing_cites_a_file_outside_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    texts = [ROOT / name for name in listed.stdout.splitlines() if name.endswith((".py", ".md", ".toml"))]
    bad = {
        str(path.relative_to(ROOT)): words
        for path in texts
        if path != Path(__file__) and path.is_file() and (words := offences(path.read_text()))
    }
    assert not bad


@pytest.fixture(scope="module")
def citations() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs/references/citations.toml").read_text())


def test_every_algorithm_is_cited(citations: dict[str, Any]) -> None:
    assert set(citations["algorithms"]) == {a.name for a in protocols.REGISTRY}
    for name, entry in citations["algorithms"].items():
        assert entry["paper"] in citations["papers"], name


def test_every_paper_is_in_the_bibliography(citations: dict[str, Any]) -> None:
    entries = set(re.findall(r"^@\w+\{([^,]+),", (ROOT / "docs/references/references.bib").read_text(), re.M))
    assert set(citations["papers"]) <= entries
