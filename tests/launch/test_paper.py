"""What a paper takes: tables of LaTeX, and figures as SVG and PDF; from the command line and from Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import fedsim
from fedsim.errors import UsageError
from launch.cli import main
from launch.table import Table
from tests.launch.run_folders import Make


def invoke(*arguments: object) -> str:
    result = CliRunner(catch_exceptions=False).invoke(main, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table_of_latex_has_escaped_names_and_a_bold_best_value() -> None:
    names = (r"a_b & 50 % #1 $x$ {y} ~^\ <z>", "plain")
    table = Table(("", "accuracy %"), [(names[0], "71.0±0.5"), (names[1], "–")], best={(0, 1)})
    lines = table.latex().splitlines()
    assert lines[:3] == [r"\begin{tabular}{lr}", r"\toprule", r" & accuracy \% \\"]
    name = r"a\_b \& 50 \% \#1 \$x\$ \{y\} \textasciitilde{}\textasciicircum{}\textbackslash{} "
    assert lines[4] == name + r"\textless{}z\textgreater{} & \textbf{71.0\,$\pm$\,0.5} \\"
    assert lines[5] == r"plain & -- \\"
    floating = table.latex("100 % of it", "tab:it")
    assert floating.startswith("\\begin{table}\n\\centering\n\\caption{100 \\% of it}\n\\label{tab:it}\n")


def test_a_comparison_is_a_table_with_n_deviation_and_the_best_in_bold(make: Make, tmp_path: Path) -> None:
    for seed in range(5):
        make(f"a{seed}", (0.1, 0.7 + 0.001 * seed), seed=seed)
        runs = make(f"b{seed}", (0.1, 0.8 + 0.002 * seed), algo="fed_lap", seed=seed).parent
    out, figures = tmp_path / "t.tex", tmp_path / "figures"
    output = invoke("compare", runs, "--out", tmp_path / "p.html", "--latex", out, "--figures", figures)
    assert f"LaTeX: {out}" in output and f"figures: {figures}" in output
    (line,) = [line for line in out.read_text().splitlines() if line.startswith("fed\\_lap")]
    cells = line.split(" & ")
    assert cells[1] == "5" and cells[3] == r"\textbf{80.4\,$\pm$\,0.3}"
    page = (tmp_path / "p.html").read_text()
    labels = dict.fromkeys(re.findall(r'<figure role="img" aria-label="([^"]*)"', page))
    names = {re.sub(r"\W+", "_", label).strip("_") for label in labels}
    assert {path.name for path in figures.iterdir()} == {
        f"{name}.{form}" for name in names for form in ("svg", "pdf")
    }
    curve = (figures / "accuracy_against_round.svg").read_text()
    assert ">fed_lap</text>" in curve and ">fedavg</text>" in curve, "a figure alone names its lines"

    comparison = fedsim.compare(runs)
    assert comparison.latex() == out.read_text() and set(comparison) > {"groups", "differences"}
    assert comparison.table("Bytes by field").heads == ("", "mean", "total")
    assert comparison.figure("accuracy against round").get_size_inches()[0] == pytest.approx(3.3)
    for missing in (lambda: comparison.figure("accuracy"), lambda: comparison.table("Result")):
        with pytest.raises(UsageError, match=r"unknown (figure|table) "):
            missing()


def test_a_run_has_its_figures_and_its_numbers(launched: Callable[..., Path], tmp_path: Path) -> None:
    folder = launched("run", algo="fedavg", model="logistic", clients=3, rounds=2)
    invoke("report", folder, "--out", tmp_path / "p.html", "--figures", tmp_path / "f")
    written = {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()}
    assert {"accuracy_against_round.svg", "bytes_by_field.pdf"} < set(written)
    invoke("report", folder, "--out", tmp_path / "p.html", "--figures", tmp_path / "again")
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    run = fedsim.open(folder)
    accuracy = f"{100 * run.summary['test_accuracy']:.1f} %"
    assert ("accuracy", accuracy) in run.table().rows and accuracy.replace("%", r"\%") in run.latex()
    assert [axes.get_xlabel() for axes in run.figure("accuracy against round").axes] == ["round"]
    assert f"| accuracy | {accuracy} |" in run.table()._repr_markdown_()


@pytest.mark.process
def test_a_sweep_is_a_table_with_n(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'title = "t"\nseeds = [0, 1]\n[experiment]\nclients = 2\nrounds = 1\nmodel = "logistic"\n'
        '[grid]\n"experiment.partition" = ["iid", "two_dirichlet"]\n'
        '[[variant]]\nlabel = "fed_avg"\nexperiment = {algo = "fedavg"}\n'
        '[[table]]\ncolumns = ["test_accuracy@1"]\n'
        '[[table]]\ncolumns = ["MB@1"]\npivot = "experiment.partition"\n'
        '[[plot]]\nfile = "lines.png"\ny = "test_accuracy"\n'
        '[[differences]]\ncolumns = ["test_nll@1"]\ntitle = "Differences"\n'
    )
    out = tmp_path / "t.tex"
    invoke(*("sweep", recipe, "--runs", tmp_path / "runs", "--latex", out, "--figures", tmp_path / "f"))
    first, second = out.read_text().split("\n\n")
    assert r" & partition & n & accuracy@1 \%" in first and r"fed\_avg & two\_dirichlet & 2 & " in first
    assert r" & n & iid & two\_dirichlet" in second and r"fed\_avg & 2 & " in second
    assert {path.name for path in (tmp_path / "f").iterdir()} == {
        *("lines.svg", "lines.pdf", "Differences.svg", "Differences.pdf")
    }
