"""fedsim sweep: recipes, columns, and runs that are carried out once."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas
import pytest
from click.testing import CliRunner

from fedsim.errors import DiskError, UsageError
from launch.cli import main
from launch.configuration.config_files import read_config
from launch.configuration.execution import AUTO
from launch.results.columns import column
from launch.results.groups import Group
from launch.runs.folder import RunFolder
from launch.runs.tables import metrics_table
from launch.sweep.command import _with_sections
from launch.sweep.finished import FinishedRun, Number, read_archive
from launch.sweep.from_options import recipe_of, seed_list, select_recipe
from launch.sweep.pool import Pool
from launch.sweep.recipe import Recipe
from launch.sweep.runner import leave_summary
from launch.sweep.table import Results, key_of
from tests.support.commands import DEADLINE
from tests.support.kept_runs import kept_run
from tests.support.process_tree import alive, children_of
from tests.support.snapshots import at, snapshot
from workers.scratch import remove_left
from workers.storage.client_states import ClientStates

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
title = "A small sweep"
seeds = [0, 1]
[experiment]
clients = 3
rounds = 2
model = "logistic"
[grid]
"experiment.partition" = ["iid", "two_dirichlet"]
[[variant]]
label = "fedavg"
experiment = {algo = "fedavg"}
[[variant]]
label = "prox"
experiment = {algo = "fedprox"}
grid = {"hyperparameters.local.epochs" = [1, 2]}
published = {"test_accuracy@2" = "50.0±1.0"}
[[table]]
columns = ["test_accuracy@2", "MB@end"]
best = true
[[table]]
title = "Pivoted"
columns = ["test_nll@end"]
pivot = "experiment.partition"
[[plot]]
file = "lines.png"
y = "test_accuracy"
x = "MB"
at = {"experiment.partition" = "iid"}
"""


def recipe(tmp_path: Path, text: str = RECIPE) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(text)
    return path


def curve(*lines: dict[str, float | None]) -> pandas.DataFrame:
    whole = [{"round": r, "bytes_down": 10**6, "bytes_up": 10**6, **line} for r, line in enumerate(lines)]
    return metrics_table(whole)


def value(expression: str, run: pandas.DataFrame, window: int = 1) -> float:
    return column(expression).of(run, window)


def shown(expression: str, values: list[float]) -> str:
    return column(expression).shown(values)


# ---- columns


def test_columns_read_what_they_say() -> None:
    c = curve(
        *(
            {"test_accuracy": a, "test_nll": n}
            for a, n in [(0.9, 9), (0.1, 3), (0.5, 2), (0.3, 1), (0.7, None)]
        )
    )
    assert value("test_accuracy@3", c) == 0.3
    assert value("test_accuracy@3", c, window=2) == pytest.approx(0.4)
    assert value("test_accuracy@2", c, window=9) == pytest.approx(0.3)  # round 0 is the start, not a result
    assert value("max test_accuracy@3", c, window=2) == 0.5
    assert value("best test_accuracy@end", c) == 0.7
    assert value("rounds to 0.5", c) == 2
    assert math.isnan(value("rounds to 0.8", c))
    assert value("rounds to test_accuracy 0.5", c) == 2 == value("rounds to mean test_accuracy 0.5", c)
    assert value("rounds to mean test_accuracy 0.45", c, window=2) == 4  # (.3 + .7) / 2
    assert value("rounds to test_nll 2", c) == 2 and value("MB to test_nll 1.5", c) == 8  # lower is better
    assert math.isnan(value("rounds to mean test_nll 1", c, window=3))
    assert value("MB@2", c) == 6 and value("MB up@2", c) == 3 and value("MB to 0.5", c) == 6
    assert value("MB edge up@2", c) == 0  # without a tree
    assert math.isnan(value("test_nll@end", c))
    with pytest.raises(UsageError, match="round 9 was not evaluated"):
        value("test_accuracy@9", c)
    with pytest.raises(UsageError, match="no metric 'loss'"):
        value("loss@2", c)
    with pytest.raises(UsageError, match="write METRIC@ROUND"):
        value("accuracy", c)


def test_the_best_of_what_is_better_when_it_is_lower_is_the_least() -> None:
    names = ("test_nll", "test_ece", "ensemble_brier", "train_loss", "client_accuracy_spread")
    c = curve(*(dict.fromkeys((*names, "client_accuracy_worst"), v) for v in (0.0, 0.4, 0.1, 0.3)))
    for name in names:
        assert value(f"best {name}@end", c) == 0.1, name
        assert value(f"max {name}@end", c, window=2) == 0.3, name
    assert value("best client_accuracy_worst@end", c) == 0.4


def test_a_list_is_no_column() -> None:
    lines = [{"reliability": [[1, 0.5, 1]]}, {"reliability": [[1, 0.5, 0]]}]
    with pytest.raises(UsageError, match="no metric 'reliability'"):
        value("reliability@end", curve(*lines))  # type: ignore[arg-type]


def test_a_run_without_a_metric_has_not_diverged() -> None:
    """Of two runs of a row, of which one is older than the metric."""
    group = Group("", [curve({}, {"test_ece": 0.1}), curve({}, {})], [(0, ""), (1, "")])
    with pytest.raises(UsageError, match="no metric 'test_ece' in this run"):
        group.values("test_ece@end")
    assert not group.has("test_ece") and group.known("test_ece@end") == []


def test_cells_have_mean_and_population_deviation() -> None:
    assert shown("test_accuracy@2", [0.5, 0.7]) == "60.0±10.0"
    assert shown("test_nll@2", [1.0, 2.0]) == "1.50±0.50"
    assert shown("test_ece@2", [0.0312, 0.0352]) == "0.033±0.002"
    assert shown("client_accuracy_worst@2", [0.5]) == "50.0"
    assert (column("test_ece@2").heading, column("received@2").heading) == ("ECE@2", "received@2")
    assert shown("test_nll@2", [1.0, math.nan]) == "diverged (1)"
    assert shown("rounds to 0.5", [3, math.nan]) == "1 of 2"
    assert shown("rounds to 0.5", [math.nan]) == "-"
    assert shown("MB@2", [1234.5, 1234.5]) == "1,234.5"


# ---- recipes


def test_a_recipe_is_its_grid(tmp_path: Path) -> None:
    trials = list(Recipe.read(recipe(tmp_path)).trials())
    assert len(trials) == 2 * (2 + 4)
    assert len({t.id for t in trials}) == len(trials)
    assert {
        t.experiment.hyperparameters["local.epochs"] for t in trials if t.row.variant.label == "prox"
    } == {1, 2}


def test_repetitions_are_averaged_over(tmp_path: Path) -> None:
    text = RECIPE.replace("[grid]", '[repeat]\n"experiment.evaluate_on" = ["fold:1/2", "fold:2/2"]\n[grid]')
    read = Recipe.read(recipe(tmp_path, text))
    trials = list(read.trials())
    assert len(trials) == 2 * len(list(Recipe.read(recipe(tmp_path)).trials()))
    assert len(list(read.rows())) == 2 + 4
    first = [t for t in trials if t.row == trials[0].row]
    assert {(t.seed, t.experiment.evaluate_on) for t in first} == {
        (s, f) for s in (0, 1) for f in ("fold:1/2", "fold:2/2")
    }
    metrics: dict[str, list[Number]] = {
        "round": [0, 1],
        "test_accuracy": [0.1, 0.5],
        "test_nll": [2.0, 1.0],
        "bytes_down": [0, 8],
        "bytes_up": [0, 4],
    }
    finished = {t.id: FinishedRun(t.id, t.row.name, t.seed, 1.0, "", "", {}, metrics) for t in trials}
    assert len(finished) == len(trials)
    results = Results(read, tuple(trials), finished)
    assert all(len(group.values("test_accuracy@1")) == 2 * 2 for _, group in results.groups)
    first_row = results.groups[0][1].scores("test_accuracy@1")
    assert first_row.keys() == {key_of(t) for t in trials[:4]} and len(first_row) == 2


def test_a_variants_group_does_not_replace_the_recipes(tmp_path: Path) -> None:
    """[hyperparameters] local.batch_size = 4 stays when a variant says local.epochs = 2; the variant wins
    where both speak, and the grid over both."""
    text = RECIPE.replace("[grid]", "[hyperparameters]\nlocal.batch_size = 4\nlocal.epochs = 7\n[grid]", 1)
    text = text.replace('{algo = "fedavg"}', '{algo = "fedavg"}\nhyperparameters = {local.epochs = 2}', 1)
    created = [t.experiment for t in Recipe.read(recipe(tmp_path, text)).trials()]
    epochs = {(e.algo, e.hyperparameters["local.epochs"]) for e in created}
    assert epochs == {("fedavg", 2), ("fedprox", 1), ("fedprox", 2)}
    assert {e.hyperparameters["local.batch_size"] for e in created} == {4}


def test_options_are_a_recipe() -> None:
    first = {"algo": ["fedavg", "fedlap_cov"], "participation": ["full", "0.3"]}
    more = {"participation": ["full", "0.3"], "delta": ["0.1", "1"], "codec.mean": ["dense", "bf16"]}
    created = recipe_of({"rounds": 3, "algo": None, "codecs": ()}, first, seed_list("0-1,5"))
    assert created.seeds == (0, 1, 5)
    trials = list(created.trials())
    assert len(trials) == 2 * 2 * 3
    assert {t.experiment.participation for t in trials} == {"full", "0.3"}
    assert {t.experiment.rounds for t in trials} == {3}
    whole = recipe_of({"algo": "fedlap_cov", "hyperparameters": ("lr=0.5",)}, more, (0,))
    assert {(t.experiment.hyperparameters["delta"], t.experiment.codecs["mean"]) for t in whole.trials()} == {
        (d, c) for d in (0.1, 1) for c in ("dense", "bf16")
    }
    assert {t.experiment.hyperparameters["local.lr"] for t in whole.trials()} == {0.5}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "name a recipe"),
        ("--over algo", "write KEY=VALUE,VALUE"),
        ("--over algo=fedavg,fedavg", "a value is given twice"),
        ("--over seed=0,1", "write --seeds 0,1,2"),
        ("--over algo=fedavg,fedlop", "did you mean 'fedlap'"),
        ("--seeds 0,x", "write 0,1,2 or 0-2"),
        ("--over algo=fedavg --workers 4", "--jobs N is how many runs are computed side by side"),
        ("docs/recipes/comparison.toml --rounds 3", "--rounds is for a sweep without one"),
        ("docs/recipes/comparison.toml --only fedavgg", "did you mean 'fedavg'"),
        ("docs/recipes/comparison.toml --only fedavg --out x", "--out writes the page and archive of all"),
        ("--only fedavg", "name the file"),
    ],
)
def test_mistakes_of_a_sweep_are_one_line(arguments: str, words: str) -> None:
    done = CliRunner(catch_exceptions=False).invoke(main, ["sweep", "--dry-run", *arguments.split()])
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_only_and_seeds_select_a_part_of_a_recipe() -> None:
    file = Path("docs/recipes/comparison.toml")
    part = select_recipe(file, {}, (), "0-1", ["fedavg"])
    assert [t.name for t in part.trials()] == ["fedavg, seed 0", "fedavg, seed 1"]


def test_the_command_under_a_table_names_a_row_of_its_recipe() -> None:
    commands = [
        shlex.split(command)
        for page in sorted(Path("docs/results").glob("*.md"))
        for command in re.findall(r"^One row of it: `fedsim (.*)`$", page.read_text(), re.MULTILINE)
    ]
    assert len(commands) == 61
    for verb, *words in commands:
        options = dict(itertools.pairwise(words))
        path, _, label = options.get("--config", f"{words[0]}:{options.get('--only')}").partition(".toml:")
        recipe = Recipe.read(Path(f"{path}.toml"))
        (variant,) = [v for v in recipe.variant if v.label == label]
        assert (verb == "sweep") == bool({**recipe.grid, **variant.grid})
        assert int(options.get("--seed") or options["--seeds"]) in recipe.seeds


def test_what_is_said_and_what_is_the_default_is_one_configuration(tmp_path: Path) -> None:
    plain = Recipe.read(
        recipe(tmp_path, 'title = "a"\n[[variant]]\nlabel = "x"\nexperiment = {algo = "fedavg"}')
    )
    printed = Recipe.read(
        recipe(
            tmp_path,
            'title = "b"\n[experiment]\nrounds = 20\n[[variant]]\nlabel = "y"\n'
            'experiment = {algo = "fedavg", model = "mlp_small"}\nhyperparameters = {lr = 0.001}',
        )
    )
    assert [t.id for t in plain.trials()] == [t.id for t in printed.trials()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("title =", "titel ="), "did you mean 'title'"),
        (('label = "prox"', 'label = "fedavg"'), "labels tell rows apart"),
        (('algo = "fedprox"', 'algo = "fedprx"'), "did you mean 'fedprox'"),
        (("hyperparameters.local.epochs", "hyperparameters.local.epoch"), "epoch"),
        (('"experiment.partition" = ["iid"', '"partition" = ["iid"'), "grid key"),
        (('pivot = "experiment.partition"', 'pivot = "experiment.model"'), "experiment.model"),
        (("seeds = [0, 1]", "seeds = [1, 1]"), "seeds 1, 1: a seed is given twice"),
        (('at = {"experiment.partition"', 'only = ["none"]\nat = {"experiment.partition"'), "none"),
        (('columns = ["test_nll@end"]', 'columns = ["bytes"]'), "'bytes': write METRIC@ROUND, max METRIC"),
        (('columns = ["test_nll@end"]', 'columns = ["test_nl@end"]'), "did you mean 'test_nll'"),
        (('columns = ["test_nll@end"]', 'columns = ["rho@end"]'), "has no metric 'rho' (it has"),
        (
            ('"test_accuracy@2", "MB', '"test_accuracy@3", "MB'),
            "fedavg (partition iid) has no evaluated round 3",
        ),
        (("rounds = 2", "rounds = 3\neval_every = 3"), "round 2 (3 rounds, one in 3 evaluated)"),
        (('y = "test_accuracy"', 'y = "test_accuracy@2"'), "a line needs a METRIC, such as test_nll"),
        (('file = "lines.png"', 'file = "acc"'), "file = 'acc': give every picture a name of its own"),
        (('file = "lines.png"', 'file = "acc.foo"'), "that ends in .png, .svg, .pdf"),
        (('file = "lines.png"', 'file = "../a.png"'), "without folder"),
        (('x = "MB"', 'x = "round"\nlimits = ["prox"]'), "its x must be MB, not round"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    assert change[0] in RECIPE
    path = recipe(tmp_path, RECIPE.replace(*change))
    result = CliRunner().invoke(main, ["sweep", str(path), "--runs", str(tmp_path / "runs"), "--dry-run"])
    assert result.exit_code == 2 and says in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()  # said before anything is run


def test_files_beside_a_recipe_or_a_configuration_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, in every kind of value; a file of the working folder goes first."""
    folder, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    algorithm = "from protocols.fedavg import FedAvg as Mine\n"
    (folder / "mine.py").write_text(algorithm)
    (folder / "d.csv").write_text("x,y\n" + "1,a\n2,b\n" * 10)
    (folder / "r.toml").write_text(
        'title = "about mine.py"\n[experiment]\nclients = 2\nparticipation = 0.5\n'
        'dataset = "d.csv,label=y,test=d.csv"\n'
        '[grid]\n"experiment.algo" = ["mine.py:Mine"]\n"experiment.participation" = [1, 0.5]\n'
        '[[variant]]\nlabel = "a"\n'
    )
    (folder / "c.toml").write_text('[experiment]\nalgo = "mine.py:Mine"\nparticipation = 2\nclients = 2\n')
    monkeypatch.chdir(elsewhere)
    read = Recipe.read(Path("../recipes/r.toml"))
    assert read.title == "about mine.py"
    assert [row.name for row in read.rows()] == [
        "a (algo mine:Mine, participation 1)",
        "a (algo mine:Mine, participation 0.5)",
    ]
    first = next(read.trials()).experiment
    data = folder.resolve() / "d.csv"
    assert (first.algo, first.dataset) == (f"{folder.resolve()}/mine.py:Mine", f"{data},label=y,test={data}")
    assert first.participation == "1"
    tables = read_config("../recipes/c.toml")["experiment"]
    assert (tables["algo"], tables["participation"]) == (f"{folder.resolve()}/mine.py:Mine", "2")
    (elsewhere / "mine.py").write_text(algorithm)
    assert read_config("../recipes/c.toml")["experiment"]["algo"] == "mine.py:Mine"


def test_a_metric_that_only_a_run_tells_is_no_mistake(tmp_path: Path) -> None:
    """fedlap_cov reports `floored` itself; what an upload's scalars are called is known before."""
    text = RECIPE.replace('algo = "fedprox"', 'algo = "fedlap_cov"').replace(
        'algo = "fedavg"', 'algo = "fedlap"'
    )
    text = text.replace('columns = ["test_nll@end"]', 'columns = ["floored@end"]\nonly = ["prox"]')
    text = text.replace('"test_accuracy@2", "MB', '"train_loss@2", "MB')
    path = recipe(tmp_path, text)
    result = CliRunner().invoke(main, ["sweep", str(path), "--runs", str(tmp_path / "runs"), "--dry-run"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_of_the_repository_is_in_order(path: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["sweep", str(path), "--runs", str(tmp_path / "runs"), "--dry-run"])
    assert result.exit_code == 0, result.output


# ---- running


@pytest.mark.process
def test_a_sweep_runs_once_and_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    path, runs, out = recipe(tmp_path), tmp_path / "runs", tmp_path / "out"
    command = ["sweep", str(path), "--runs", str(runs), "--out", str(out), "--jobs", "2"]
    nothing = CliRunner().invoke(main, [*command, "--no-run"])
    assert nothing.exit_code == 0 and "not run" in nothing.output and not list(runs.glob("fed*"))
    first = CliRunner().invoke(main, command)
    assert first.exit_code == 0, first.output
    trials, pool = list(Recipe.read(path).trials()), Pool(runs)
    assert all(pool.done(t) for t in trials)
    stamps = {t.id: (pool.folder(t) / "summary.json").stat().st_mtime_ns for t in trials}
    page, archive = (out / "small.md").read_text(), read_archive(out / "small_runs.jsonl.zst")
    assert all(text in page for text in ("| published |", "50.0±1.0", "### Pivoted", "seeds 0, 1"))
    assert "**" not in page
    assert {tuple(run.metrics["round"]) for run in archive.values()} == {(0, 1, 2)}
    assert len(archive) == len(trials)
    assert (out / "lines.png").stat().st_size > 10_000
    accuracy = [pool.run(t).summary["test_accuracy"] for t in trials[:2]]
    assert shown("test_accuracy@2", accuracy) in page

    shutil.rmtree(pool.folder(trials[0]))  # one is missing: only that one runs again
    second = CliRunner().invoke(main, command)
    assert second.exit_code == 0 and "1 runs to do" in second.output
    for t in trials[1:]:
        assert (pool.folder(t) / "summary.json").stat().st_mtime_ns == stamps[t.id]
    scores = {run.id: run.metrics["test_nll"] for run in read_archive(out / "small_runs.jsonl.zst").values()}
    assert scores == {run.id: run.metrics["test_nll"] for run in archive.values()}


def test_a_page_keeps_the_sections_that_other_recipes_wrote(tmp_path: Path) -> None:
    page, marker = tmp_path / "main.md", "<!-- section: pilot -->"
    for text, section in (
        ("# Main", ""),
        ("## Pilot", marker),
        ("# Main again", ""),
        ("## Pilot again", marker),
    ):
        page.write_text(_with_sections(page, section, text))
    assert page.read_text() == f"# Main again\n\n{marker}\n\n## Pilot again\n"


@pytest.mark.process
def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    text = RECIPE.replace(
        '["iid", "two_dirichlet"]', '["iid", "natural"]'
    )  # digits has no clients of its own
    path, runs = recipe(tmp_path, text.replace("seeds = [0, 1]", "seeds = [0]")), tmp_path / "runs"
    result = CliRunner().invoke(main, ["sweep", str(path), "--runs", str(runs)])
    assert result.exit_code == 1
    assert "3 of 6 runs failed" in result.output and "partition natural" in result.output
    assert "not run" in result.output
    assert sum(Pool(runs).done(t) for t in Recipe.read(path).trials()) == 3


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, of a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.process
def test_no_run_outlives_a_killed_sweep(tmp_path: Path, temporary: Path) -> None:
    text = RECIPE.replace("rounds = 2", "rounds = 100000").replace("seeds = [0, 1]", "seeds = [0]")
    path, runs = recipe(tmp_path, text), tmp_path / "runs"
    command = [sys.executable, "-m", "launch", "sweep", str(path), "--runs", str(runs), "--jobs", "2"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    sweep = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        wait_until(lambda: len(list(runs.glob("*/metrics.jsonl"))) == 2, "two runs to start")
        running = [p for p in children_of(sweep.pid) if p != sweep.pid]
        assert len(running) >= 2 and list(temporary.glob("fedsim-sweep-*"))
    finally:
        sweep.kill()
        sweep.wait(timeout=10)
    wait_until(lambda: not any(alive(p) for p in running), "the runs and their fork server to end")
    pool = Pool(runs)
    assert len(list(runs.glob(".*.lock"))) == 2
    pool.remove_left()
    assert not list(runs.glob(".*.lock"))
    remove_left(parents=[str(temporary)])  # what the next run of fedsim does
    assert not list(temporary.iterdir())


@pytest.mark.process
@pytest.mark.parametrize("imports", [0.0, 0.4])
def test_an_interrupted_sweep_ends_and_leaves_no_lock(
    imports: float, tmp_path: Path, temporary: Path
) -> None:
    """While its fork server, which a terminal's Ctrl-C reaches too, still imports."""
    path, runs = recipe(tmp_path, RECIPE.replace("rounds = 2", "rounds = 100000")), tmp_path / "runs"
    command = [sys.executable, "-m", "launch", "sweep", str(path), "--runs", str(runs), "--jobs", "2"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    sweep = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        wait_until(lambda: bool(list(runs.glob(".*.lock"))), "the first run to be claimed")
        time.sleep(imports)
        below = children_of(sweep.pid)
        os.killpg(sweep.pid, signal.SIGINT)
        _, says = sweep.communicate(timeout=120)
    finally:
        sweep.kill()
    assert sweep.returncode == 130 and says.count("\n") == 1 and "interrupted: 0 runs are done" in says
    wait_until(lambda: not any(alive(p) for p in below), "its processes to end")
    assert not list(runs.glob(".*.lock")) and not list(temporary.iterdir())


def wait_until(true: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


@pytest.mark.process
def test_two_sweeps_do_not_take_each_others_runs(tmp_path: Path) -> None:
    text = RECIPE.replace("seeds = [0, 1]", "seeds = [0]").replace('["iid", "two_dirichlet"]', '["iid"]')
    path, runs = recipe(tmp_path, text), tmp_path / "runs"
    trials, pool = list(Recipe.read(path).trials()), Pool(runs)
    claim = pool.claim(trials[0])
    assert claim is not None and pool.claim(trials[0]) is None
    command = [sys.executable, "-m", "launch", "sweep", str(path), "--runs", str(runs), "--jobs", "1"]
    other = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: all(pool.done(t) for t in trials[1:]), "the others")
        assert other.poll() is None and not pool.folder(trials[0]).exists()
        pool.release(trials[0], claim)
        assert other.wait(timeout=60) == 0
        assert pool.done(trials[0]) and not list(runs.glob(".*.lock"))
    finally:
        other.kill()
        other.wait(timeout=DEADLINE)


def test_a_run_that_cannot_leave_a_summary_ends_without_a_traceback(tmp_path: Path) -> None:
    """As on a full disk: the sweep says that no summary was written."""
    (tmp_path / "file").touch()
    leave_summary(tmp_path / "file" / "run", "the disk is full")
    leave_summary(tmp_path / "run", "the disk is full")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["error"] == "the disk is full"


@pytest.mark.process
def test_states_of_finished_runs_are_removed_if_one_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    job = f"sweep --over algo=fedprox --clients 2 --rounds 1 --model logistic --runs {folder} --quiet"
    for more, kept in (("--remove-states", []), ("--seeds 1", ["state"])):
        before = set(folder.glob("*/"))
        done = CliRunner(catch_exceptions=False).invoke(main, [*job.split(), *more.split()])
        assert done.exit_code == 0, done.output
        (run,) = set(folder.glob("*/")) - before
        assert [p.name for p in run.glob("state")] == kept
        assert list(RunFolder(run).curve.index) == [0, 1]
    states = ClientStates(folder / "gone" / "state", object)
    with pytest.raises(DiskError, match="fedsim sweep --remove-states"):
        states.load(0, 1)


@pytest.mark.process
@pytest.mark.slow
def test_a_sweep_that_stops_is_continued_on_another_machine(tmp_path: Path) -> None:
    """Each attempt has twice the time of the one before it, in a folder that has only the packed runs."""
    text = 'title = "t"\n[experiment]\nclients = 3\nrounds = 40\nmodel = "mlp_small"\n'
    text += '[[variant]]\nlabel = "a"\nexperiment = {algo = "fedlap_cov"}\n'
    path, minutes, stops, pool = recipe(tmp_path, text), 0.01, 0, tmp_path / "0"
    while True:
        done = CliRunner().invoke(main, ["sweep", str(path), "--runs", str(pool), "--minutes", str(minutes)])
        assert done.exit_code == 0, done.stderr
        if "not done" not in done.output:
            break
        packed = list(pool.glob("*.tar"))
        assert f"stopped after {minutes:g} minutes with 1 run not done" in done.output
        minutes, stops = 2 * minutes, stops + 1
        pool = tmp_path / str(stops)
        pool.mkdir()
        for file in packed:
            shutil.copy(file, pool)
    assert stops
    whole = CliRunner().invoke(main, ["sweep", str(path), "--runs", str(tmp_path / "whole")])
    assert whole.exit_code == 0, whole.stderr
    pieces, single = (RunFolder.open(next(p.glob("fedlap_cov-*"))) for p in (pool, tmp_path / "whole"))
    for key in ("model_sha256", "clients_sha256", "experiment_sha256"):
        assert pieces.summary[key] == single.summary[key]
    assert not list(pool.glob("*.tar"))


@pytest.mark.process
def test_a_stopped_run_that_cannot_be_resumed_is_kept(tmp_path: Path) -> None:
    text = 'title = "t"\n[experiment]\nclients = 3\nrounds = 3\n[[variant]]\nlabel = "a"\n'
    path, pool = recipe(tmp_path, text + 'experiment = {algo = "fedavg"}\n'), Pool(tmp_path / "runs")
    (trial,) = Recipe.read(path).trials()
    with at("evaluated", 2, lambda: snapshot(tmp_path / "run", pool.folder(trial))):
        kept_run(tmp_path / "run", algo="fedavg", rounds=3)
    (pool.folder(trial) / "summary.json").write_text('{"status": "interrupted"}')
    (pool.folder(trial) / "manifest.json").write_text("{}")
    done = CliRunner().invoke(main, ["sweep", str(path), "--runs", str(pool.path)])
    assert done.exit_code == 1 and "manifest.json" in done.stderr and done.stderr.count("\n") == 1
    assert f"remove {pool.folder(trial)} to begin this run anew" in done.stderr
    assert pool.run(trial).status == "interrupted" and (pool.folder(trial) / "checkpoints").is_dir()


def test_a_packed_run_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    text = 'title = "t"\n[[variant]]\nlabel = "a"\nexperiment = {algo = "fedavg", rounds = 1, clients = 2}\n'
    path, pool = recipe(tmp_path, text), Pool(tmp_path / "runs")
    (trial,) = Recipe.read(path).trials()
    pool.path.mkdir()
    (pool.path / f"{trial.id}.tar").write_bytes(b"no archive")
    done = CliRunner().invoke(main, ["sweep", str(path), "--runs", str(pool.path)])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert (
        f"{trial.id}.tar cannot be unpacked" in done.stderr
        and "remove it to begin the run anew" in done.stderr
    )
    assert not list(pool.path.glob(".*.lock"))


def test_committed_rounds_outlive_an_attempt_that_fails(tmp_path: Path) -> None:
    """A run that was killed has no summary; that it could not be resumed is not its end."""
    text = 'title = "t"\n[[variant]]\nlabel = "a"\nexperiment = {algo = "fedavg", rounds = 1, clients = 2}\n'
    pool = Pool(tmp_path / "runs")
    (trial,) = Recipe.read(recipe(tmp_path, text)).trials()
    folder = pool.folder(trial)
    with at("evaluated", 1, lambda: snapshot(tmp_path / "run", folder)):
        kept_run(tmp_path / "run", algo="fedavg", rounds=2)
    (folder / "summary.json").unlink(missing_ok=True)
    assert pool.begun(trial)
    leave_summary(folder, "no data here")
    assert pool.error(trial) == "no data here" and pool.begun(trial) and not pool.done(trial)
    pool.pause(trial, 2.5)
    pool.pause(trial, 4.0)
    carried = Pool(tmp_path / "elsewhere")
    carried.path.mkdir()
    shutil.copy(pool.path / f"{trial.id}.tar", carried.path)
    (carried.path / f".{trial.id}.unpacking").mkdir()  # of an attempt that was killed
    assert carried.begun(trial) and not list(carried.path.glob("*.tar"))
    carried.sign(trial, 1.0)
    assert carried.signed(trial)["seconds"] == 7.5
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    assert not pool.begun(trial) and not folder.exists()


@pytest.mark.parametrize(
    ("execution", "says"),
    [("lanes = 0", "lanes = 0 in [execution] of the recipe: give a number of at least 1, or auto"),
     ('workers = "auto"\nlanes = "auto"', "")],
)  # fmt: skip
def test_the_execution_of_a_recipe_is_read_as_that_of_a_run(
    execution: str, says: str, tmp_path: Path
) -> None:
    text = (
        f'title = "t"\n[execution]\n{execution}\n[[variant]]\nlabel = "a"\nexperiment = {{algo = "fedavg"}}\n'
    )
    read = Recipe.read(recipe(tmp_path, text))
    if not says:
        assert (read.how(None).workers, read.how(None).lanes) == (AUTO, AUTO)
        return
    with pytest.raises(UsageError) as refused:
        read.how(None)
    assert says in str(refused.value)
