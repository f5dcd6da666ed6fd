"""fedsim report: one page that stands by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.reading import Run
from launch.report.single import render, report

VOID = {"meta", "link", "br", "img", "hr", "input", "path", "use", "rect", "line", "circle"}


class Checked(HTMLParser):
    """Every tag that is opened is closed, and nothing is loaded from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        given = dict(attrs)
        self.loads += [
            v for k, v in given.items() if k in ("src", "href", "xlink:href") and v and v[0] != "#"
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def folder(launched: Callable[..., Path]) -> Path:
    chosen = {"algo": "fedlap_cov", "model": "logistic", "participation": "coin:0.7+lost:0.2"}
    return launched("run", clients=4, rounds=4, **chosen)


def test_the_page_stands_by_itself_and_says_what_the_run_says(folder: Path) -> None:
    text = report(folder).read_text()
    page = Checked()
    page.feed(text)
    assert page.open == [] and page.loads == []
    assert "<script" not in text and not re.search(r"https?://", text)
    summary = json.loads((folder / "summary.json").read_text())
    for number in (
        f"{summary['bytes_down']:,}",
        f"{summary['bytes_up']:,}",
        f"{summary['test_accuracy']:.2%}",
    ):
        assert number in text
    assert "prefers-color-scheme: dark" in text and text.count("<svg") >= 4


def test_names_from_outside_are_escaped(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["experiment"]["dataset"] = "<script>alert(1)</script>"
    path.write_text(json.dumps(manifest))
    text = render(Run.open(folder))
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_a_run_that_failed_has_a_page_that_says_so(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "failed", "error": "worker 1 died"}))
    (folder / "metrics.jsonl").write_text("")
    text = render(Run.open(folder))
    assert "failed" in text and "worker 1 died" in text


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "no run folder" in result.output and "Traceback" not in result.output
