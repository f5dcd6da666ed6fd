"""fedsim report: one page that stands by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedsim.errors import DataError
from launch.cli import main
from launch.results.run_page import render, report
from launch.results.timeline import timeline
from launch.runs.reader import Run

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
        supplied = dict(attrs)
        self.loads += [
            v for k, v in supplied.items() if k in ("src", "href", "xlink:href") and v and v[0] != "#"
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def folder(launched: Callable[..., Path]) -> Path:
    selected = {"algo": "fedlap_cov", "model": "logistic", "participation": "coin:0.7+lost:0.2"}
    return launched("run", clients=4, rounds=4, **selected)


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
    del manifest["experiment_sha256"]
    path.write_text(json.dumps(manifest))
    text = render(Run.open(folder))
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_a_run_that_failed_has_a_page_that_says_so(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    failed = {"status": "failed", "error": "worker 1 died", "files": {}}
    (folder / "summary.json").write_text(json.dumps(summary | failed))
    (folder / "metrics.jsonl").write_text("")
    text = render(Run.open(folder))
    assert "failed" in text and "worker 1 died" in text


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "no run folder" in result.output and "Traceback" not in result.output


HEAD = "round,exchange,client,worker,what,given,arrived,computing"


def timed(folder: Path, *rows: str) -> str:
    (folder / "timeline.csv").write_text("\n".join([HEAD, *rows, ""]))
    return timeline(folder / "timeline.csv")


def printed(picture: str, kind: str) -> list[str]:
    """The tooltips of a kind of bar."""
    return re.findall(rf'<rect class="{kind}"[^>]*><title>([^<]*)</title>', picture)


def test_a_timeline_shows_who_computed_when(tmp_path: Path) -> None:
    text = timed(
        tmp_path,
        "1,1,0,0,task,0.0,2.0,1.5",
        "1,1,1,1,gone,0.0,3.0,3.0",
        "1,0,-1,0,evaluate,3.5,4.0,-1",
        "2,1,1,1,task,4.0,6.0,2.0",
    )
    assert printed(text, "odd") == [
        "round 1, client 0: 2 s from giving it out to its answer, 1.5 s computing",
        "round 1, client 1, gone after the download: 3 s from giving it out to its answer, 3 s computing",
    ]
    assert len(printed(text, "even")) == 1 and len(printed(text, "holding")) == 3
    assert "evaluation after round 1, chunk 0" in printed(text, "scoring unsaid")[0]
    assert printed(text, "folding") == ["between rounds 1 and 2: 1 s"]
    # 6 s in all; the first bar of worker 0 begins after 0.5 s and takes a quarter of the width
    assert 'class="odd" x="162.17" y="27.0" width="228.50"' in text
    assert "Rounds 1 to 2: 6 s, of which a worker trained 54%" in text  # (1.5 + 3 + 2) / 6 / 2 workers
    assert [name for name in ("coordinator", "worker 0", "worker 1", "worker 2") if f">{name}<" in text] == [
        "coordinator",
        "worker 0",
        "worker 1",
    ]
    page = Checked()
    page.feed(text)
    assert page.open == []


def test_a_long_timeline_is_its_first_and_last_rounds(tmp_path: Path) -> None:
    text = timed(tmp_path, *(f"{r},1,0,0,task,{r},{r + 0.5},0.5" for r in range(1, 101)))
    assert text.count("<svg") == 2 and "Rounds 1 to 3: 2.5 s" in text and "Rounds 98 to 100: 2.5 s" in text
    tips = printed(text, "odd") + printed(text, "even")
    assert sorted(int(re.findall(r"round (\d+)", tip)[0]) for tip in tips) == [1, 2, 3, 98, 99, 100]


def test_a_timeline_that_is_being_written_or_missing_or_strange(tmp_path: Path) -> None:
    assert timeline(tmp_path / "timeline.csv") == ""
    assert timed(tmp_path) == ""
    assert len(printed(timed(tmp_path, "1,1,0,0,task,0.0,2.0,1.5", "1,1,1,0,task,0."), "odd")) == 1
    (tmp_path / "timeline.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="has the columns a, b"):
        timeline(tmp_path / "timeline.csv")


def test_the_page_has_the_timeline(folder: Path) -> None:
    (folder / "timeline.csv").unlink(missing_ok=True)
    assert "Timeline" not in render(Run.open(folder))
    timed(folder, "1,1,0,0,task,0.0,2.0,1.5")
    assert "<h2>Timeline</h2>" in render(Run.open(folder))
