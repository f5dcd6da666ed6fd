"""fedsim report: one page that stands by itself."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from click.testing import CliRunner

from fedsim.learning.recordings import Recordings
from launch.cli import main
from launch.configuration.names import names
from launch.numbers import ranges
from launch.results import report as page_module
from launch.results.field_bars import ordered, styles
from launch.results.figures import MOST_BARS, bar_chart
from launch.results.report import page_of, participation, report
from launch.runs.folder import RunFolder
from tests.launch.run_folders import COLUMNS, Make
from tests.support.html_pages import below, check
from workers.storage.metrics_file import LISTS


@pytest.fixture
def folder(launched: Callable[..., Path]) -> Path:
    selected = {"algo": "fedlap_cov", "model": "logistic", "participation": "coin:0.7+lost:0.2"}
    return launched("run", clients=4, rounds=4, **selected)


def test_the_page_stands_by_itself_and_says_what_the_run_says(folder: Path) -> None:
    text = report(folder).read_text()
    algo = str(RunFolder.open(folder).experiment["algo"])
    check(text, names("algorithms")[algo].url)  # the card cites it, as text
    summary = json.loads((folder / "summary.json").read_text())
    for number in (
        f"{summary['bytes_down']:,}",
        f"{summary['bytes_up']:,}",
        f"{100 * summary['test_accuracy']:.1f} %",
    ):
        assert number in text
    assert "prefers-color-scheme: dark" in text and text.count("<svg") >= 4


def test_names_from_outside_are_escaped(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["experiment"]["dataset"] = "<script>alert(1)</script>"
    del manifest["experiment_sha256"]
    path.write_text(json.dumps(manifest))
    text = page_of(RunFolder.open(folder)).html()
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_a_run_that_failed_has_a_page_that_says_so(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    failed = {"status": "failed", "error": "worker 1 died", "files": {}}
    (folder / "summary.json").write_text(json.dumps(summary | failed))
    (folder / "metrics.jsonl").write_text("")
    text = page_of(RunFolder.open(folder)).html()
    assert "failed" in text and "worker 1 died" in text


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "not a run folder" in result.output and "Traceback" not in result.output


def embedded(page: str, name: str) -> pandas.DataFrame:
    """A CSV file that the page has."""
    match = re.search(rf'<a download="{name}" href="data:text/csv;base64,([^"]*)"', page)
    assert match is not None
    return pandas.read_csv(BytesIO(base64.b64decode(match[1])))


def without_summary(folder: Path, lines: int) -> RunFolder:
    """As after kill -9 before the first checkpoint, with so many lines of metrics.jsonl."""
    (folder / "summary.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    return RunFolder.open(folder)


def tile(page: str, name: str) -> str:
    match = re.search(rf"<b>([^<]*)</b><span>{name}</span>", page)
    assert match is not None
    return match[1]


def test_the_tiles_of_a_run_that_has_not_ended_are_of_its_last_evaluated_round(folder: Path) -> None:
    run = without_summary(folder, 3)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    page = page_of(run).html()
    assert tile(page, "accuracy") == f"{100 * last['test_accuracy']:.1f} %" and tile(page, "rounds") == "2"
    down = sum(line["bytes_down"] for line in run.lines)
    assert tile(page, "MB down") == f"{down / 1e6:,.3f}"
    assert "This run was killed, after 2 of 4 rounds" in page


def test_a_finished_run_says_so_with_its_command_and_date(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | {
        "commit": "0123abc",
        "command": ["/x/fedsim", "launch", "--set", "a b"],
    }
    path.write_text(json.dumps(manifest))
    page = page_of(RunFolder.open(folder)).html()
    for text in (
        "done after 4 rounds",
        "fedsim launch --set &#39;a b&#39;",
        manifest["started"],
        "0123abc",
    ):
        assert text in page


def test_every_number_of_the_metrics_is_drawn_or_stated(launched: Callable[..., Path]) -> None:
    folder = launched("admm", algo="ivon_admm", model="logistic", clients=3, rounds=2, eval_samples=4)
    run = RunFolder.open(folder)
    page = page_of(run).html()
    drawn = ("primal residual", "dual residual", "dual slack", "train loss")
    for name in drawn:
        assert f'aria-label="{name} against round"' in page, name
    assert "The same in every round: capped 0, rho 6.66667." in page
    assert "Dual mismatch at the end (the server&#39;s" in page
    summary = run.summary
    assert tile(page, "accuracy, posterior samples") == f"{100 * summary['ensemble_accuracy']:.1f} %"
    assert page.count(">averaged over posterior samples</text>") >= 4
    described = {*run.metrics.columns} - {"participants", *LISTS}
    assert described == set(embedded(page, "metrics.csv").columns)


def part(page: str, title: str) -> str:
    """A section of the page."""
    return page.partition(f"<h2>{title}</h2>")[2].partition("<h2>")[0]


def test_calibration_and_scores_by_client_are_drawn(launched: Callable[..., Path]) -> None:
    folder = launched("admm", algo="ivon_admm", model="logistic", clients=3, rounds=2, eval_samples=4)
    run = RunFolder.open(folder)
    page, summary = page_of(run).html(), run.summary
    for name, key in {
        "ECE": "test_ece",
        "Brier score": "test_brier",
        "ECE, posterior samples": "ensemble_ece",
        "Brier, posterior samples": "ensemble_brier",
    }.items():
        assert tile(page, name) == f"{summary[key]:.4f}"
    assert tile(page, "accuracy, worst client") == f"{100 * summary['client_accuracy_worst']:.1f} %"
    calibration, clients = part(page, "Calibration"), part(page, "Scores by client")
    for label in ("ECE against round", "Brier score against round", "accuracy against confidence"):
        assert f'aria-label="{label}"' in calibration
    diagram = calibration.partition('aria-label="accuracy against confidence"')[2]
    assert all(f">{name}</text>" in diagram for name in ("at the mean", "averaged over posterior samples"))
    of_clients = "accuracy of clients against round", "NLL (nats) of clients against round"
    for label in (*of_clients, "clients by accuracy"):
        assert f'aria-label="{label}"' in clients
    for line in run.lines:  # the table is what ECE is computed from
        bins = np.array(line["reliability"])
        ece = np.abs(bins[:, 2] - bins[:, 1]).sum() / bins[:, 0].sum()
        assert ece == pytest.approx(line["test_ece"], rel=1e-12)
        assert bins[:, 2].sum() / bins[:, 0].sum() == pytest.approx(line["test_accuracy"], rel=1e-12)
        assert sum(line["client_accuracy_histogram"]) == 3


def test_a_run_of_an_earlier_fedsim_has_a_page_without_calibration(make: Callable[..., Path]) -> None:
    page = page_of(RunFolder.open(make("old", participation="full"))).html()
    assert tile(page, "accuracy") == "60.0 %"
    for name in ("Calibration", "Scores by client", "ECE"):
        assert f"<h2>{name}" not in page and f"<span>{name}" not in page


def test_a_run_that_an_earlier_fedsim_began_has_what_its_later_lines_have(folder: Path) -> None:
    """It was resumed: the lines before have no calibration."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    new = {key for key in lines[0] if key.startswith(("client_", "test_ece", "test_brier", "reliability"))}
    assert len(new) == 12
    for line in lines[:3]:
        for key in new:
            del line[key]
    run = without_summary(folder, 0)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run).html()
    assert 'aria-label="ECE against round"' in page and 'aria-label="clients by accuracy"' in page
    lines[-1] |= dict.fromkeys(("test_ece", "test_brier", "client_nll_mean"))  # it has diverged
    del lines[-1]["reliability"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(RunFolder.open(folder)).html()
    assert "accuracy against confidence" not in page and 'aria-label="clients by accuracy"' in page


def test_the_ledger_is_in_the_page_or_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(RunFolder.open(folder)).html()
    assert embedded(page, "ledger.csv").bytes.sum() == RunFolder.open(folder).ledger.bytes.sum()
    monkeypatch.setattr(page_module, "EMBEDDED", 100)
    page = page_of(RunFolder.open(folder)).html()
    assert f"{folder / 'ledger.csv'}: every byte" in page and 'download="ledger.csv"' not in page


def test_the_bill_has_codecs_and_what_dense_would_be(launched: Callable[..., Path]) -> None:
    codecs = {"up.precision": "csr:0.1"}
    folder = launched("csr", algo="fedlap_cov", model="logistic", clients=3, rounds=2, codecs=codecs)
    rows = RunFolder.open(folder).ledger
    rows = rows[rows.kind == "algorithm"]
    bill = page_of(RunFolder.open(folder)).html().partition("<h2>Bytes")[2].partition("<h2>")[0]
    cells = [re.findall(r"<td[^>]*>(?:<b>)?([^<]*)", line) for line in bill.split("<tr>")]
    csr = next(line for line in cells if line[:3] == ["precision", "values", "csr:0.1"])
    mine = rows[(rows.field == "precision") & (rows.codec == "csr:0.1")]
    assert csr[5] == f"{mine[mine.layer == 'values'].bytes.sum():,}"
    assert csr[6] == f"{mine.dense_bytes.sum():,}" == f"{2 * 3 * 4 * 640:,}"
    assert "times as much" in bill and "Per client and round: 2." in bill


def test_the_table_of_clients_is_the_summary_and_the_ledger(folder: Path) -> None:
    run = RunFolder.open(folder)
    section = page_of(run).html().partition("<h2>Clients")[2].partition("<h2>")[0]
    lines = [re.findall(r"<td[^>]*>([^<]*)", line) for line in section.split("<tr>")[2:]]
    own = run.ledger[run.ledger.kind == "algorithm"]
    for k, line in enumerate(lines):
        down = own.bytes[(own.client == k) & (own.direction == "down")].sum()
        summary = run.summary
        sizes = run.experiment["client_sizes"][k], summary["took_part"][k], summary["folded"][k], down
        assert line[:5] == [str(k), *(f"{n:,}" for n in sizes)]
        scores = run.lines[-1]["client_accuracies"][k], run.lines[-1]["client_nlls"][k]
        assert line[6:8] == [f"{100 * scores[0]:.1f} %", f"{scores[1]:.4f}"]
    assert len(lines) == 4


def test_a_figure_has_its_numbers_below_it(folder: Path) -> None:
    run = RunFolder.open(folder)
    page, drawn = page_of(run).html(), [line["test_accuracy"] for line in run.lines]
    rows = below(page, "accuracy against round")
    assert rows == [["at the mean", str(n), f"{100 * y:.1f} %"] for n, y in enumerate(drawn)]
    spent = [float(row[1]) for row in below(page, "NLL (nats) against megabytes, both directions")]
    assert spent == pytest.approx(list(run.metrics["MB"]), rel=1e-3)


def test_the_participation_of_every_round_is_stated(folder: Path) -> None:
    run = RunFolder.open(folder)
    rows = below(page_of(run).html(), "participation")
    took = {r: set(line["participants"]) for r, line in enumerate(run.lines) if r}
    assert [int(row[0]) for row in rows] == sorted(took)
    for number, count, folded, silent, lost in rows:
        dropped = took[int(number)] - set(run.commits[int(number)]["folded"])
        assert (int(count), silent) == (len(took[int(number)]), "") and lost == ranges(list(dropped))
        assert folded == ranges(list(run.commits[int(number)]["folded"]))


def test_a_run_with_edge_servers_has_the_bytes_of_each_hop(launched: Callable[..., Path]) -> None:
    run = RunFolder.open(launched("tree", algo="fedavg", model="logistic", clients=4, rounds=2, tree="2x2"))
    page, rows = page_of(run).html(), run.ledger
    for name, kind in (("clients and edge servers", "algorithm"), ("edge servers and server", "edge")):
        own = rows[rows.kind == kind]
        down, up = (int(own.bytes[own.direction == side].sum()) for side in ("down", "up"))
        bill = re.sub(r' data-head="[^"]*"', "", part(page, "Bytes"))
        cells = "".join(f'<td class="n">{n:,}</td>' for n in (down, up, down + up))
        assert f"<td>{name}</td>{cells}" in bill and down
    assert "edge bytes" not in page


def test_a_field_has_one_colour_in_every_bar_whatever_its_size() -> None:
    down, up = (
        styles(["mean values", "precision values", "header"]),
        styles(["precision values", "precision indices", "mean values", "header"]),
    )
    assert down.items() <= up.items() and list(up) == [
        "mean values",
        "precision values",
        "precision indices",
        "header",
    ]
    assert up["precision indices"]["hatch"] and not up["precision values"]["hatch"]
    across = styles(["mean", "precision", "gradient", "mine"])
    assert (across["mean"], across["precision"]) == (down["mean values"], down["precision values"])
    looks = [(look["color"], look["alpha"]) for look in across.values()]
    assert len(set(looks)) == 4 and list(across) == ordered(across)


def test_neighbours_are_one_bar_where_bars_are_too_many() -> None:
    places = np.arange(2 * MOST_BARS, dtype=np.float64)
    (figure,) = bar_chart("", ("client", "bytes"), (places, 1.0), {"up": places, "down": places})
    bars = figure.drawing().axes[0].patches
    assert len(bars) == 2 * MOST_BARS
    assert [(b.get_x(), b.get_width(), b.get_height(), b.get_y()) for b in bars[-2:-1]] == [
        (1995.5, 2.0, 1996.5, 1996.5)
    ]


def test_bars_beside_a_table_format_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.results.figures.number", None)
    (figure,) = bar_chart("", ("client", "bytes"), (np.ones(1), 1.0), {"up": np.ones(1)}, tabulated=False)
    assert figure.numbers is None


def test_the_participation_of_many_clients_and_rounds_is_one_figure(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.open(make("run", clients=1000, client_sizes=[1] * 1000, participation="full"))
    commit = {"participants": tuple(range(1000)), "folded": tuple(range(999))}
    commits = dict.fromkeys(range(1, 301), commit)
    monkeypatch.setattr(RunFolder, "commits", property(lambda run: commits))
    figure, table = participation(run)
    assert "client, of 1,000" in figure.svg and "round, of 300" in figure.svg  # type: ignore[attr-defined]
    assert table.parts[0].rows[-1] == ["200", "1,000", "0–998", "", "999"]  # type: ignore[attr-defined]


def test_an_exported_ledger_prints_only_where_it_was_written(folder: Path, tmp_path: Path) -> None:
    command = ["ledger", str(folder), "--csv", str(tmp_path / "l.csv")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0 and len(result.output.splitlines()) == 1, result.output
    assert str(tmp_path / "l.csv") in result.output and (tmp_path / "l.csv").is_file()
    result = CliRunner().invoke(main, [*command, "--by", "round"])
    assert "by round" in result.output and "by client" not in result.output


@pytest.mark.parametrize("options", [(), ("--by", "round"), ("--all", "--by", "kind")], ids=str)
def test_a_ledger_of_a_run_without_a_round_says_that_nothing_is_recorded(
    make: Make, options: tuple[str, ...]
) -> None:
    folder = make("new", status=None)
    (folder / "ledger.csv").write_text(COLUMNS + "\n")
    result = CliRunner().invoke(main, ["ledger", str(folder), *options])
    assert result.exit_code == 0 and len(result.output.splitlines()) == 1, result.output
    assert "4 clients, nothing is recorded yet: no round is committed" in result.output


def test_the_page_says_which_steps_were_not_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker's log has what Recordings.refuse prints, once a worker."""
    Recordings(lambda work, generators: work, torch.device("cpu")).refuse(
        "its forward pass asks <the device>"
    )
    (folder / "processes.json").write_text(
        '[{"role": "worker", "index": 0, "device": "cuda:0", "gpu": "H100"}]'
    )
    (folder / "logs").mkdir(exist_ok=True)
    for worker, text in enumerate(2 * [f"something else\n{capsys.readouterr().out}"]):
        (folder / "logs" / f"worker-{worker:03d}.log").write_text(text)
    why = "Training steps that were not recorded on a GPU: its forward pass asks &lt;the device&gt;."
    assert page_of(RunFolder.open(folder)).html().count(why) == 1
