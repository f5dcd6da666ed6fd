"""fedsim compare: which group reaches an accuracy with the fewest bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.numbers import NONE
from launch.results.frontier import by_budget
from launch.results.groups import gather
from launch.results.report import page_of
from launch.results.tables import costs, records, results
from launch.runs.folder import RunFolder
from tests.launch.run_folders import MB, Make

PLAIN = str.maketrans("\N{NO-BREAK SPACE}", " ")


def printed(*arguments: object, width: int = 120) -> str:
    result = CliRunner().invoke(main, ["compare", *map(str, arguments)], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.output.translate(PLAIN)


def three(make: Make) -> Path:
    """fedlap reaches 0.6 with every seed, fedavg with two of three, fedprox with none."""
    for seed, last in enumerate((0.7, 0.65, 0.5)):
        make(f"avg{seed}", (0.1, 0.4, last), seed=seed)
        make(f"lap{seed}", (0.1, 0.3, 0.6), seed=seed, algo="fedlap", cost=(5 + seed) * MB)
    return make("prox", (0.1, 0.2, 0.5977), algo="fedprox").parent


def test_who_reaches_it_with_some_seeds_or_not_at_all_comes_behind_and_says_so(make: Make) -> None:
    groups = gather([three(make)])
    (grid,) = costs(groups, [0.6])
    lines = [[cell.translate(PLAIN) for cell in line] for line in grid.rows]
    assert [line[:2] for line in lines] == [
        ["fedavg", "4.00"],
        ["fedlap", "24.0"],
        ["fedprox", "– (59.7 %)"],
    ]
    assert [line[5] for line in lines] == ["2 of 3", "3 of 3", "0 of 1"]
    assert [line[2] for line in lines] == ["4.00 to > 4.00", "20.0 to 28.0", NONE]
    assert [line[4] for line in lines] == ["least", "2 of 3 of the first reach it", "0 of 1 reach it"]


def test_the_terminal_says_the_best_that_was_reached_and_how_many_seeds_did(
    make: Make, tmp_path: Path
) -> None:
    output = printed(three(make), "--to", "60%", "--out", tmp_path / "p.html", width=80)
    table = output.partition("Differences")[0]
    by = {line.split()[0]: line for line in table.splitlines() if line.startswith("fed")}
    assert by["fedprox"].endswith("– (59.7 %)") and by["fedavg"].endswith("2 of 3")
    assert by["fedlap"].split()[1] == "3", "a count of seeds"
    assert max(map(len, output.splitlines()[:-1])) <= 80


def test_a_seed_that_has_ended_keeps_what_it_reached(make: Make) -> None:
    make("a0", (0.1, 0.8), seed=0, until=0.8, rounds=(0, 1))
    make("a1", (0.1, 0.5, 0.6, 0.9), seed=1, until=0.8)
    folder = tuple((make("x", algo="other").parent).glob("a*"))
    for path in folder:
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(re.sub(r'"rounds": \d+', '"rounds": 9', text))
    (group,) = gather(folder)
    b = by_budget(group)
    assert list(b.x) == [2, 4, 6]
    assert list(b.y) == pytest.approx([0.65, 0.7, 0.85]) and list(b.low) == [0.5, 0.6, 0.8]
    assert group.stopped and group.done


def ended_early(make: Make) -> Path:
    """fedavg ended at 0.8 of its own accord in round 1; fedlap went on to 0.85."""
    folder = make("short", (0.1, 0.8), until=0.8)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"rounds": 1', '"rounds": 3'))
    return make("long", (0.1, 0.7, 0.82, 0.85), algo="fedlap", until=0.8).parent


def test_a_run_that_ended_at_its_target_is_marked_and_no_end_is_bold(make: Make, tmp_path: Path) -> None:
    runs = ended_early(make)
    groups = gather([runs])
    assert [line[0] for line in results(groups).rows] == ["fedlap", "fedavg †"]
    assert not results(groups).best
    output = printed(runs, "--out", tmp_path / "p.html")
    assert "† ended when it reached its target accuracy (--until)" in output.replace("\n", " ")
    assert "median MB" in output and "to 80 %" in output  # the target is the level that is asked for
    assert "most accurate" not in output, "how much more fedavg would have reached is not known"
    page = (tmp_path / "p.html").read_text()
    assert "fedavg †" in page and "an accuracy of 80 %<" in page and "ended (◆)" in page
    assert "Most accurate for a budget" not in page


def test_a_real_run_with_a_target_accuracy_is_marked(launched: Callable[..., Path], tmp_path: Path) -> None:
    options = {"algo": "fedavg", "model": "logistic", "clients": 3, "until": 0.5}
    folder = launched("until", rounds=30, **options)
    (group,) = gather([folder])
    last = group.members[0].curve
    assert group.stopped and last.index[-1] < 30 and last["test_accuracy"].iloc[-1] >= 0.5
    output = printed(folder, "--out", tmp_path / "p.html")
    (line,) = [line for line in output.splitlines() if line.startswith("fedavg †")]
    assert line.split()[-1] == line.split()[-2], "what it spent in all is what it spent to get there"
    assert "it reached its target accuracy, 50 %" in page_of(RunFolder.open(folder)).html()


def test_a_seed_without_an_evaluated_round_has_not_reached_anything(make: Make) -> None:
    """The record of a group has no mean cost over only those of its seeds that were evaluated."""
    make("a0", (0.1, 0.8), seed=0)
    unscored = make("a1", (0.1, 0.8), seed=1)
    lines = (unscored / "metrics.jsonl").read_text().splitlines(keepends=True)

    def record() -> dict[str, object]:
        table = records(gather([unscored.parent]), [0.75])
        return dict(zip(table.heads, table.rows[0], strict=True))

    assert record()["reached_0.75"] == 2 and record()["bytes_to_0.75_mean"] == 2 * MB
    (unscored / "metrics.jsonl").write_text(lines[0])
    assert record()["reached_0.75"] == 1 and record()["seeds"] == 2
    assert {record()[f"{what}_to_0.75_{of}"] for what in ("bytes", "rounds") for of in ("mean", "low")} == {
        ""
    }


def test_bold_needs_five_seeds_and_is_never_the_only_one(make: Make) -> None:
    make("a", (0.1, 0.7))
    groups = gather([make("b", (0.1, 0.8), algo="fedlap").parent])
    assert not results(groups).best, "one seed is no ranking"
    for seed in range(1, 5):
        make(f"a{seed}", (0.1, 0.7 + 0.001 * seed), seed=seed)
        make(f"b{seed}", (0.1, 0.8), algo="fedlap", seed=seed)
    folder = groups[0].members[0].path.parent
    assert set(results(gather([folder])).best) == {(1, 3), (1, 4), (1, 5)}
    make("c", (None, None), algo="fedprox")
    groups = gather([groups[0].members[0].path, folder / "c"])
    assert len(results(groups).rows) == 2 and not results(groups).best


def test_the_levels_are_in_the_pictures_and_a_row_of_each_group_below(make: Make, tmp_path: Path) -> None:
    make("a0", (0.1, 0.5, 0.8), seed=0)
    make("a1", (0.1, 0.6, 0.9), seed=1)
    runs = make("b", (0.1, 0.6, 0.7), algo="fedlap", cost=3 * MB).parent
    printed(runs, "--to", "0.55", "--to", "0.75", "--out", tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    figures = page.split("<figure ")[1:]
    drawn = [figure for figure in figures if ">75 %</text>" in figure.partition("</figure>")[0]]
    assert len(drawn) == 3, "the picture at the top, accuracy over rounds and over megabytes"
    assert "best accuracy so far" in drawn[0] and page.index(drawn[0]) < page.index("<h2>Results")
    rows = page.partition("accuracy of 75 %</h3>")[2].partition("<table>")[0]
    assert ">fedavg</text>" in rows and ">fedlap</text>" not in rows, "who does not reach it has no row"


def test_a_page_without_a_name_is_a_new_file_each_time(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = make("a").parent
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        printed(runs)
    assert len(list(tmp_path.glob("comparisons/*.html"))) == 3
    assert "comparisons/TIME.html" in CliRunner().invoke(main, ["compare", "--help"]).output
