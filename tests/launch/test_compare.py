"""fedsim compare: groups, means and ranges, the frontier, what an accuracy costs, mistakes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from launch.cli import main
from launch.results.comparison_page import AXES, MEASURES, pooled
from launch.results.figures import POINTS, Line, chart
from launch.results.frontier import cost, levels, pareto, running_maxima, winning_ranges
from launch.results.groups import gather
from launch.results.labels import labels
from launch.runs.folder import RunFolder
from tests.launch.run_folders import MB, Make
from tests.support.html_pages import below, check


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)], env={"COLUMNS": "80"})


# ---- groups


def test_runs_that_differ_in_the_seed_are_one_group(make: Make) -> None:
    for seed in (0, 1, 2):
        make(f"a{seed}", seed=seed)
    make("other", seed=3, hyperparameters={"local.lr": 0.01})
    groups = gather([make("prox", algo="fedprox").parent])
    assert [(g.label, g.seeds) for g in groups] == [
        ("fedavg (lr 0.01)", (3,)),
        ("fedavg (lr 0.1)", (0, 1, 2)),
        ("fedprox", (0,)),
    ]


def test_the_datas_digest_follows_from_the_seed_and_splits_no_group(make: Make) -> None:
    make("a0", seed=0, data="digest of split 0")
    folder = make("a1", seed=1, data="digest of split 1")
    (group,) = gather([folder.parent])
    assert group.seeds == (0, 1) and group.label == "fedavg"


def test_a_younger_key_has_its_default_in_older_runs(make: Make) -> None:
    make("old", seed=0)
    make("new", seed=1, evaluate_on="test", link="", error_feedback=False)
    (group,) = gather([make("held", seed=2, evaluate_on="test").parent])
    assert group.seeds == (0, 1, 2)


def test_a_seed_counts_once_and_finished_runs_stand_for_a_group(make: Make) -> None:
    make("a0", (0.1, 0.5), seed=0, rounds=(0, 1))
    make("b0", (0.1, 0.7), seed=0, rounds=(0, 1))  # the same seed again
    make("a1", (0.1, 0.9), seed=1, status=None)  # running
    folder = make("a2", (0.1, 0.7), seed=2)
    (group,) = gather([folder.parent, folder, folder.parent / ".." / "runs" / "a2"])
    assert group.seeds == (0, 2) and group.done
    assert sorted(m.path.name for m in group.aside) == ["a1", "b0"]
    assert group.values("test_accuracy@end") == [0.5, 0.7]


def test_labels_are_the_fewest_settings_that_tell_groups_apart() -> None:
    def created(algo: str, **settings: Any) -> dict[str, Any]:
        return {"algo": algo, "rounds": 5, **settings}

    h, codec = "hyperparameters.local.", "codecs."
    assert labels([created("fedavg", **{h + "lr": 0.1}), created("fedlap", **{h + "lr": 0.2})]) == [
        "fedavg",
        "fedlap",
    ]
    grid = [created("fedavg", **{h + "lr": lr, h + "epochs": e}) for lr in (0.1, 1.0) for e in (1, 2)]
    assert labels(grid)[1] == "fedavg (lr 0.1, epochs 2)" and len(set(labels(grid))) == 4
    # both differ everywhere, one is enough
    both = [created("fedavg", **{h + "lr": n, h + "epochs": n}) for n in (1, 2, 3)]
    assert labels(both) == ["fedavg (lr 1)", "fedavg (lr 2)", "fedavg (lr 3)"]
    codecs = [
        created("fola"),
        created("fola", **{codec + "mean": "bf16"}),
        created("fola", **{codec + "mean": "bf16", codec + "curvature": "log8"}),
    ]
    assert labels(codecs) == ["fola (dense)", "fola (mean bf16)", "fola (mean bf16, curvature log8)"]
    user = [created("/home/me/mine.py:Mine", participation=p) for p in ("full", "0.3")]
    assert labels(user) == ["mine:Mine (participation full)", "mine:Mine (participation 0.3)"]


# ---- numbers


def test_means_and_bands_are_over_the_seeds(make: Make) -> None:
    make("a0", (0.1, 0.5, 0.6), seed=0)
    (group,) = gather([make("a1", (0.2, 0.7, 0.7), seed=1).parent])
    hits = group.band("MB", "test_accuracy")
    assert list(hits.x) == pytest.approx([0, 2, 4])
    assert list(hits.low) == pytest.approx([0.1, 0.5, 0.6])
    assert list(hits.high) == pytest.approx([0.2, 0.7, 0.7])
    assert list(hits.y) == pytest.approx([0.15, 0.6, 0.65])


def test_the_frontier_of_a_small_example(make: Make) -> None:
    make("cheap", (0.1, 0.4, 0.3, 0.5), cost=MB, algo="fedavg")
    make("dear", (0.1, 0.2, 0.9), cost=3 * MB, algo="fedlap")
    groups = gather([make("bad", (0.1, 0.1, 0.2), cost=4 * MB, algo="fedprox").parent])
    maxima = running_maxima(groups)
    by = {g.settings["algo"]: n for n, g in enumerate(groups)}
    own = maxima[maxima.group == by["fedavg"]]
    assert [*zip(own.MB, own.accuracy, strict=True)] == [(2, 0.4), (6, 0.5)]
    ahead = pareto(maxima)
    assert [*zip(ahead.group, ahead.MB, ahead.accuracy, strict=True)] == [
        (by["fedavg"], 2, 0.4),
        (by["fedavg"], 6, 0.5),
        (by["fedlap"], 12, 0.9),
    ]
    ranges = winning_ranges(ahead)
    assert [*zip(ranges.MB, ranges["first"], ranges["last"], ranges.until, strict=True)] == [
        (2, 0.4, 0.5, 12),
        (12, 0.9, 0.9, float("inf")),
    ]
    assert levels(maxima, 0.1) == [0.2, 0.5, 0.9]
    assert levels(maxima, 0.95) == []


def test_bytes_to_an_accuracy_are_exact(make: Make) -> None:
    make("a0", (0.9, 0.5, 0.75), cost=123_457, seed=0)  # the start does not count
    make("a1", (0.1, 0.75, 0.8), cost=123_457, seed=1)
    (group,) = gather([make("a2", (0.1, 0.2, 0.3), cost=123_457, seed=2).parent])
    reached = cost(0, group, 0.75)
    assert (reached.rounds, reached.spent) == ((2, 1), (4 * 123_457, 2 * 123_457))
    assert reached.ended == (4 * 123_457,)


def test_rounds_that_were_not_evaluated_are_paid_for(make: Make) -> None:
    folder = make("a", (0.1, 0.5, 0.9), rounds=(0, 3, 5), cost=1000, eval_every=3, simulated=1.0)
    run = RunFolder.open(folder)
    assert [line["bytes_down"] for line in run.lines] == [0, 3000, 2000]
    assert list(run.metrics["MB"]) == pytest.approx([0, 0.006, 0.01])
    (group,) = gather([folder])
    reached = cost(0, group, 0.9)
    assert (reached.rounds, reached.spent) == ((5,), (10_000,))
    assert not group.has("simulated")  # the seconds of the other rounds are in no line


def test_lines_that_are_being_written_are_left_out(make: Make) -> None:
    folder = make("a", status=None)
    for name, half in (("metrics.jsonl", '{"round": 3, "tes'), ("ledger.csv", "algorithm,3,1,0,0,do")):
        with (folder / name).open("a") as file:
            file.write(half)
    (group,) = gather([folder])
    assert not group.done and group.members[0].rounds == 2
    assert group.bytes_by_field() == {"mean": 4 * MB}
    assert group.members[0].units("down") == pytest.approx(2 * MB / (4 * 1000 * 2))


# ---- what people see


def test_the_page_stands_by_itself(make: Make, tmp_path: Path) -> None:
    for seed in (0, 1):
        make(f"a{seed}", seed=seed, simulated=2.0)
        runs = make(f"b{seed}", (0.1, 0.6, 0.9), seed=seed, algo="fedlap", cost=9 * MB, simulated=3.0).parent
    out = tmp_path / "page.html"
    result = invoke(runs, "--out", out, "--to", "0.6", "--to", "90%")
    assert result.exit_code == 0, result.output
    assert str(out) in result.output.replace("\n", "")
    text = out.read_text()
    check(text)
    labels = re.findall(r'<figure role="img" aria-label="([^"]*)"', text)
    curves = [f"{y} against {x}" for x in AXES.values() if "joules" not in x for y in MEASURES.values()]
    ranges = [f"Bytes to an accuracy of {level} %" for level in (60, 90)]
    assert {*curves, *ranges, "differences from the reference", "bytes by field", "legend"} < {*labels}
    assert "n = 2: no ranking" in text
    assert "seconds, simulated" in text and "prefers-color-scheme: dark" in text
    # fedavg reaches 0.6 after 4 MB, fedlap after 18 MB, and is ahead from 36 MB on
    for printed in ("an accuracy of 60 %", "an accuracy of 90 %", "2.00 to 36.0", "from 36.0", "36,000,000"):
        assert printed in text


def test_tables_are_written_as_markdown_and_csv(make: Make, tmp_path: Path) -> None:
    make("a0", (0.1, 0.5, 0.7), seed=0)
    runs = make("a1", (0.1, 0.7, 0.7), seed=1).parent
    files = tmp_path / "t.md", tmp_path / "t.csv", tmp_path / "p.html"
    options = ["--markdown", files[0], "--csv", files[1], "--out", files[2], "--to", "0.7", "--to", "0.5"]
    assert invoke(runs, *options).exit_code == 0
    tables = files[0].read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert "| fedavg | 2.00 | 2.00 | 1.00 | least | 2 of 2 | 1±0 |" in tables
    assert "| fedavg | 3.00 | 2.00 to 4.00 | 1.00 | least | 2 of 2 | 2±0 |" in tables
    assert "| fedavg | 2 | 2 | 70.0±0.0 |" in tables  # seeds and rounds are counts
    (row,) = csv.DictReader(files[1].read_text().splitlines())
    assert (row["seeds"], row["seed_numbers"], row["params"]) == ("2", "0 1", "1000")
    assert (row["finished"], row["ended_at_target"]) == ("True", "False")
    assert float(row["bytes_to_0.7_mean"]) == 3 * MB and row["bytes_to_0.7_low"] == str(2 * MB)
    assert row["rounds_to_0.7_high"] == "2" and row["reached_0.7"] == "2"
    assert float(row["bytes_mean"]) == 4 * MB and float(row["bytes of mean"]) == 4 * MB
    assert float(row["test_accuracy_mean"]) == pytest.approx(0.7)


def test_the_terminal_and_the_page_say_the_same_median_where_a_seed_does_not_reach_it(make: Make) -> None:
    for seed, accuracies in enumerate([(0.1, 0.5, 0.7), (0.1, 0.7, 0.7), (0.1, 0.2, 0.3)]):
        runs = make(f"a{seed}", accuracies, seed=seed).parent
    printed = invoke(runs, "--to", "0.7").output.replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(r"^fedavg +3 .* 4.00 2 of 3$", printed, re.MULTILINE), printed


def test_the_terminal_fits_80_columns_and_says_where_the_files_are(make: Make, tmp_path: Path) -> None:
    for n, codec in enumerate(("bf16", "best:0.1", "delta+zstd")):
        selected = {"down.mean": "bf16", "up.mean": codec, "up.precision": codec}
        runs = make(f"a{n}", algo="fedlap_cov", codecs=selected, cost=10 ** (3 * n + 3)).parent
    result = invoke(runs, "--out", tmp_path / "p.html")
    lines = result.output.splitlines()
    assert result.exit_code == 0 and max(map(len, lines[:-1])) <= 80
    assert lines[-1] == f"page: {tmp_path / 'p.html'}"


def test_what_cannot_be_compared_is_said_at_the_top(make: Make, tmp_path: Path) -> None:
    make("a", dataset="digits")
    make("b", dataset="mnist", evaluate_on="unused:10", clients=7)
    runs = make("c", (0.1, 0.3), dataset="mnist", algo="fedlap", rounds=(0, 9), status="failed").parent
    result = invoke(runs, "--out", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
    assert "of different data sets (digits, mnist)" in printed
    assert "evaluated on different rows (test, unused:10)" in printed
    assert "also differ in clients (4, 7)" in printed
    assert "fedlap *, seed 0: failed, evaluated up to round 9 of 9" in printed
    text = (tmp_path / "p.html").read_text()
    assert text.index("different data sets") < text.index("<h2>") and "fedlap *" in text


def test_a_chart_states_what_it_draws_below_it() -> None:
    x = np.array([0.0, 1.0, 2.5])
    lines = [Line("a, b", x, x / 2, x / 2 - 0.1, x / 2 + 0.1), Line("c <i>", x[:2], np.array([7.0, np.nan]))]
    (drawn,) = chart(lines, "round", "accuracy", shares="y")
    assert drawn.numbers is not None and drawn.numbers.heads == ("line", "round", "accuracy", "range")
    assert drawn.numbers.rows == [
        ("a, b", "0", "0.0 %", "-10.0 % to 10.0 %"),
        ("a, b", "1", "50.0 %", "40.0 % to 60.0 %"),
        ("a, b", "2.5", "125.0 %", "115.0 % to 135.0 %"),
        ("c <i>", "0", "700.0 %", ""),
        ("c <i>", "1", "", ""),
    ]
    assert "c &lt;i&gt;" in drawn.svg and "<i>" not in drawn.svg
    assert chart([Line("a", x, np.full(3, np.nan))], "x", "y") == []


def test_of_many_points_the_table_has_some_the_first_and_the_last_among_them() -> None:
    x = np.arange(1000.0)
    (drawn,) = chart([Line("a", x, 2 * x)], "round", "y")
    assert drawn.numbers is not None
    rows = drawn.numbers.rows
    assert len(rows) == POINTS and rows[0] == ("a", "0", "0") and rows[-1] == ("a", "999", "1,998")


def test_clients_are_compared(
    launched: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"algo": "fedavg", "model": "logistic", "clients": 4, "rounds": 3, "participation": "coin:0.5"}
    folders = [launched(f"run{seed}", seed=seed, **common) for seed in (0, 1)]
    result = invoke(*folders, "--out", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "p.html").read_text()
    ledgers = [RunFolder.open(f).ledger for f in folders]
    spent = [
        sorted(own.bytes[own.client == k].sum() / 1e6 for k in range(4))
        for ledger in ledgers
        for own in [ledger[ledger.kind == "algorithm"]]
    ]
    rows = below(text, "megabytes of a client against client, sorted")
    assert [float(row[2]) for row in rows] == pytest.approx(list(np.mean(spent, axis=0)), rel=1e-3)
    assert [float(row[3].split()[0]) for row in rows] == pytest.approx(list(np.min(spent, axis=0)), rel=1e-3)
    rows = below(text, "accuracy of a client against client, sorted")
    ends = [sorted(RunFolder.open(f).lines[-1]["client_accuracies"]) for f in folders]
    assert [row[2] for row in rows] == [f"{100 * mean:.1f} %" for mean in np.mean(ends, axis=0)]
    monkeypatch.setattr("launch.results.comparison_page.MOST_CLIENTS", 2)
    invoke(*folders, "--out", tmp_path / "p.html")
    few = below((tmp_path / "p.html").read_text(), "accuracy of a client against client, sorted")
    assert few == [rows[0], rows[-1]]


def test_names_from_outside_are_escaped(make: Make, tmp_path: Path) -> None:
    runs = make("a", dataset="<script>alert(1)</script>", algo="[bold]x").parent
    result = invoke(runs, "--out", tmp_path / "p.html")
    assert result.exit_code == 0 and "[bold]x" in result.output
    assert "<script>" not in (tmp_path / "p.html").read_text()


def test_a_real_run_is_compared_with_itself(launched: Callable[..., Path], tmp_path: Path) -> None:
    folder = launched("run", algo="fedlap", model="logistic", clients=3, rounds=2)
    result = invoke(folder, "--out", tmp_path / "p.html", "--csv", tmp_path / "t.csv")
    assert result.exit_code == 0, result.output
    summary = json.loads((folder / "summary.json").read_text())
    (row,) = csv.DictReader((tmp_path / "t.csv").read_text().splitlines())
    assert float(row["bytes_mean"]) == summary["bytes_down"] + summary["bytes_up"]
    assert float(row["test_accuracy_mean"]) == summary["test_accuracy"]
    assert float(row["units_of_p_up"]) == summary["units_of_p_up"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{runs}/none"], "there is no run folder"),
        (["{runs}", "--to", "1.5"], "--to '1.5': give an accuracy, such as 0.75 or 75%"),
        (["{runs}", "--where", "algo"], "give key=value"),
        (["{runs}", "--out", "{empty}/no/p.html"], "cannot write"),
        (["{broken}"], "damaged"),
    ],
)
def test_a_mistake_is_one_line(make: Make, tmp_path: Path, arguments: list[str], says: str) -> None:
    placements = {"runs": make("a").parent, "empty": tmp_path / "empty"}
    placements["empty"].mkdir()
    for name, text in (("broken", "{"),):
        placements[name] = tmp_path / name
        placements[name].mkdir()
        (placements[name] / "manifest.json").write_text(text)
    supplied = [a.format(**placements) for a in arguments]
    if "--out" not in supplied:
        supplied += ["--out", str(tmp_path / "p.html")]
    result = invoke(*supplied)
    assert result.exit_code in (2, 5) and "Traceback" not in result.output
    assert result.output.startswith("fedsim: ") and says in result.output
    assert len(result.output.strip().splitlines()) == 1


# ---- calibration and clients


def calibrated(folder: Path, ece: float, worst: float, table: list[list[float]]) -> Path:
    """The folder with what a run of this version has in its last line."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= {"test_ece": ece, "test_brier": 2 * ece, "client_accuracy_worst": worst}
    lines[-1] |= {"reliability": table}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_calibration_and_the_worst_client_are_compared(make: Make, tmp_path: Path) -> None:
    table = [[0, 0.0, 0], [10, 6.0, 5]]
    runs = [
        calibrated(make("a"), 0.02, 0.4, table),
        calibrated(make("b", seed=1), 0.04, 0.5, [[2, 1.0, 1], [0, 0.0, 0]]),
        calibrated(make("c", algo="fedprox"), 0.05, 0.6, table),
        make("old", algo="fedadmm"),  # of an earlier fedsim
    ]
    out, files = tmp_path / "c.html", {what: tmp_path / f"c.{what}" for what in ("csv", "md")}
    written = ["--out", out, "--csv", files["csv"], "--markdown", files["md"]]
    arguments = ["compare", *map(str, (*runs, *written))]
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "ECE" in result.output and "0.030±0.010" in result.output and "45.0±5.0" in result.output
    markdown = files["md"].read_text().partition("### Calibration and clients")[2].partition("###")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.strip().splitlines()]
    assert rows[0] == ["", "ECE", "Brier", "worst client\u00a0%"]
    assert rows[2:] == [
        ["fedavg", "0.030±0.010", "0.060±0.020", "45.0±5.0"],
        ["fedprox", "0.050", "0.100", "60.0"],
        ["fedadmm", "–", "–", "–"],
    ]
    with files["csv"].open(newline="") as file:
        lines = {line["group"]: line for line in csv.DictReader(file)}
    assert float(lines["fedavg"]["test_ece_mean"]) == pytest.approx(0.03)
    assert float(lines["fedprox"]["client_accuracy_worst_low"]) == 0.6
    assert lines["fedadmm"]["test_brier_mean"] == lines["fedavg"]["ensemble_ece_mean"] == ""
    page = out.read_text()
    section = page.partition("<h2>Calibration</h2>")[2].partition("<h2>")[0]
    rows = below(section, "accuracy against confidence at the mean")
    assert rows == [
        ["fedavg", "2", "50.0 %", "50.0 %"],
        ["fedavg", "10", "60.0 %", "50.0 %"],
        ["fedprox", "10", "60.0 %", "50.0 %"],
    ]
    check(page)


def test_the_predictions_of_all_seeds_are_pooled(make: Make) -> None:
    for seed, table in enumerate(([[4, 1.0, 1], [6, 5.0, 6]], [[1, 0.5, 0], [9, 8.0, 7]])):
        calibrated(make(f"a{seed}", seed=seed), 0.1, 0.5, table)
    (group,) = gather([make("b", algo="fedprox").parent])[:1]
    np.testing.assert_allclose(pooled(group, "reliability"), [[5, 1.5, 1], [15, 13.0, 13]])
    assert pooled(group, "ensemble_reliability") is None
