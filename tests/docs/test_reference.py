"""The site's docs/reference.md has every option, file, column, key, exit code and environment variable."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fedsim import errors
from fedsim.algorithm import Algorithm
from fedsim.wire.schema import all_fields
from launch.cli import main
from launch.sweep.recipe import Differences, Plot, Recipe, Table, Variant
from protocols import REGISTRY
from tests.support.pages import reference
from workers.storage.metrics_file import RESERVED

ROOT = Path(__file__).resolve().parents[2]
PAGE = reference()
SWEEPS = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
PACKAGES = ("fedsim", "protocols", "workers", "launch")


def section(title: str, page: str = PAGE) -> str:
    """The text under a heading, up to the next of its level or above; without code blocks."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    level = re.search(rf"^(#+) {re.escape(title)}\n", text, re.MULTILINE)
    assert level is not None, f"the page has no heading {title!r}"
    rest = text[level.end() :]
    end = re.search(rf"^#{{1,{len(level[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def names(text: str) -> set[str]:
    """What stands in backticks in the first cells of the tables."""
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs: one with all that adds files, columns and keys, begun by the page's configuration file, and
    one of an algorithm with duals in worker processes, which is resumed."""
    folder = tmp_path_factory.mktemp("runs")
    (example,) = re.findall(r"```toml\n# experiment.toml\n(.*?)```", PAGE, re.DOTALL)
    (folder / "experiment.toml").write_text(example, encoding="utf-8")
    clock = "--link up=10mbit,down=50mbit,rtt=40ms --compute 1ms --deadline 10s --eval-samples 2"
    kept = "--participation coin:0.8+lost:0.3 --bad-uploads skip"
    first = f"launch --config {folder}/experiment.toml --workers 0 {clock} {kept} --out {folder}/first"
    second = f"launch --algo ivon_admm --workers 2 --clients 2 --rounds 1 --out {folder}/second"
    more = f"resume {folder}/second --rounds 2"
    for job in (first, second, more, f"report {folder}/second"):
        done = CliRunner(catch_exceptions=False).invoke(main, job.split())
        assert done.exit_code == 0, done.output
    return [folder / "first", folder / "second"]


def keys(value: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    """Dotted keys, down to `depth` levels below the first."""
    for key, inner in value.items():
        yield prefix + key
        if depth and isinstance(inner, dict):
            yield from keys(inner, f"{prefix}{key}.", depth - 1)


@pytest.mark.process
def test_every_file_of_a_run_is_on_the_page(runs: list[Path]) -> None:
    listed = names(section("Files of a run").partition("### ")[0])
    for run in runs:
        assert {path.name for path in run.iterdir()} <= listed


@pytest.mark.process
def test_every_key_of_a_runs_json_files_is_on_the_page(runs: list[Path]) -> None:
    options = names(section("The configuration file")) | set(
        re.findall(r"`(\w+)`", section("The configuration file"))
    )
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        assert set(keys(summary)) <= names(section("summary.json"))
        for process in json.loads((run / "processes.json").read_text()):
            assert set(process) <= names(section("processes.json"))
        manifest = json.loads((run / "manifest.json").read_text())
        listed = names(section("manifest.json"))
        configured = {f"{table}.{key}" for table in ("experiment", "execution") for key in options}
        libraries = {f"versions.{name}" for name in manifest["versions"]}
        assert set(keys(manifest, depth=1)) <= listed | configured | libraries
        assert set(manifest["seeds"]) == {"run", "streams"}


@pytest.mark.process
def test_every_column_of_a_runs_tables_is_on_the_page(runs: list[Path]) -> None:
    for run in runs:
        for name in ("ledger.csv", "timeline.csv"):
            with (run / name).open(newline="") as file:
                assert set(next(csv.reader(file))) <= names(section(name))
        listed = names(section("metrics.jsonl"))
        for line in (run / "metrics.jsonl").read_text().splitlines():
            assert set(json.loads(line)) <= listed


def test_every_metric_of_the_coordinator_and_of_the_algorithms_is_on_the_page() -> None:
    listed = names(section("metrics.jsonl"))
    assert listed >= RESERVED
    for algorithm in REGISTRY:
        built = algorithm()
        for exchange in (*built.setup, *built.exchanges):
            for field in all_fields(exchange.up):
                scalars = field.members or ((field,) if field.kind.name == "scalar" else ())
                assert {s.name for s in scalars} <= listed, algorithm.name
    reporting = {a for a in REGISTRY if a.report is not Algorithm.report}
    text = "\n".join(
        (ROOT / "protocols" / f).read_text() for f in ("bcm.py", "fedlap_cov.py", "fedlap_func.py")
    )
    assert reporting and {"heard", "floored", "memory_points"} <= listed & set(re.findall(r'"(\w+)": ', text))


def test_every_option_of_every_command_is_on_the_page() -> None:
    for name, command in main.commands.items():
        text = section(f"fedsim {name}")
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert any(f"`{o}" in text or f", {o}" in text for o in parameter.opts), (
                    name,
                    parameter.opts,
                )


def test_every_exit_code_is_on_the_page() -> None:
    table = section("Exit codes")
    kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.FedsimError)]
    assert len(kinds) > 8
    for kind in kinds:
        row = next(line for line in table.splitlines() if f"`{kind.__name__}`" in line)
        assert row.startswith(f"| {kind.exit_code} |")


def test_every_environment_variable_that_is_read_is_on_the_page() -> None:
    sources = (f.read_text(encoding="utf-8") for p in PACKAGES for f in (ROOT / p).rglob("*.py"))
    read = {name for text in sources for name in re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text)}
    assert {"FEDSIM_DATA", "FEDSIM_CACHE"} <= read <= names(section("Environment variables"))


def test_every_key_of_a_recipe_is_on_the_page_of_sweeps() -> None:
    assert SWEEPS.count("```toml") == 1
    kinds = {"variant": Variant, "table": Table, "plot": Plot, "differences": Differences}
    for title, kind in {f"`[[{key}]]`": kind for key, kind in kinds.items()}.items():
        assert names(section(title, SWEEPS)) == set(kind.__dataclass_fields__), title
    listed = names(section("Keys of a recipe", SWEEPS).partition("### ")[0])
    assert {re.sub(r"[\[\]]", "", name) for name in listed} == set(Recipe.__dataclass_fields__)


@pytest.mark.process
@pytest.mark.slow
def test_the_recipe_of_the_page_of_sweeps_runs(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n# small.toml\n(.*?)```", SWEEPS, re.DOTALL)
    short = text.replace("rounds = 10", "rounds = 5").replace("@10", "@5").replace("[0, 1, 2]", "[0]")
    assert tomllib.loads(text)["experiment"]["rounds"] == 10
    (tmp_path / "small.toml").write_text(short, encoding="utf-8")
    job = f"sweep {tmp_path}/small.toml --runs {tmp_path}/runs --out {tmp_path}/out"
    done = CliRunner(catch_exceptions=False).invoke(main, job.split())
    assert done.exit_code == 0, done.output
    assert {"small.md", "small_runs.jsonl.zst", "accuracy.png"} == {
        path.name for path in (tmp_path / "out").iterdir()
    }
