"""The recipes run in their quick form and write their page and picture."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedsim
from tests.support.commands import DEADLINE

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes"
STUDIES = {
    "events": ("events.md", "events.png"),
    "few_bits": ("few_bits.md", "few_bits.png"),
    "fedpa_figure_1": ("fedpa_figure_1.png", "fedpa.md"),
    "fedpa_table_1": ("fedpa.md",),
    "fedpa_figures_3_4": ("fedpa_figures_3_4.png", "fedpa.md"),
    "estimators": ("estimators.md",),
    "ridge": ("bayesian_admm.md", "ridge.png"),
    "digit_pairs": ("bayesian_admm.md", "digit_pairs.png"),
    "outlier": ("bayesian_admm.md", "outlier.png"),
    "table_twice": ("table_twice.csv", "table_twice.md", "table_twice.png"),
    "fedlap_appendix_d": ("fedlap_appendix_d.md", "fedlap_appendix_d.png"),
}


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder on the path, as when a script in it is run; threads and modules as before afterwards."""
    monkeypatch.syspath_prepend(str(RECIPES))
    threads, before = torch.get_num_threads(), set(sys.modules)
    yield
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == RECIPES:
            del sys.modules[name]


def recipe(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.usefixtures("recipes")
@pytest.mark.parametrize("name", STUDIES)
def test_a_quick_run_writes_its_page(name: str, tmp_path: Path) -> None:
    recipe(name).main(["--quick", "--out", str(tmp_path)])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(STUDIES[name])
    (page,) = (path.read_text() for path in tmp_path.glob("*.md"))
    assert f"python docs/recipes/{name}.py --quick" in page
    for word in ("run time", "commit", "torch", *(["The paper"] if name.startswith("fedpa") else [])):
        assert word in page


@pytest.mark.usefixtures("recipes")
def test_every_recipe_of_this_kind_is_run_here() -> None:
    """A signature that changes breaks the scripts that no test runs."""
    scripts = {path.stem for path in RECIPES.glob("*.py") if "Page(" in path.read_text()}
    assert scripts - {"report"} == STUDIES.keys()


def test_model_and_data_of_many_clients_run(tmp_path: Path) -> None:
    files = RECIPES / "many_clients.py"
    run = fedsim.run(
        algo="fedlap",
        model=f"{files}:Wide",
        dataset=f"{files}:blobs",
        partition="iid",
        clients=20,
        participation=2,
        rounds=1,
        workers=0,
        out=tmp_path / "run",
    )
    assert run.summary["params"] == 79_510


@pytest.mark.usefixtures("recipes")
def test_the_estimators_sizes_of_tensors() -> None:
    """pympler's asizeof does not see a tensor's storage, and neither does ours; plain bytes and .npy do."""
    sizes = recipe("estimators")
    small, large = ({"w": torch.zeros(n)} for n in (10, 1000))
    assert sizes.python_objects(small) == sizes.python_objects(large)
    assert (sizes.plain(small), sizes.plain(large)) == (40, 4000)
    assert sizes.as_npy(large) == 1 + 128 + 4000


@pytest.mark.usefixtures("recipes")
@pytest.mark.parametrize("rho", [0.0, 0.1, 1.0])
def test_the_streamed_recurrence_gives_every_prefixs_delta(rho: float) -> None:
    """Appendix C against one product (which the tests of posterior_averaging hold against a dense solve)."""
    from fedsim.learning.solvers.iasg import posterior_delta

    draws = torch.Generator().manual_seed(0)
    start, x = torch.randn(80, generator=draws).double(), torch.randn(30, 80, generator=draws).double()
    folded = recipe("fedpa_recurrence").Recurrence(start, rho, len(x))
    for t in range(1, len(x) + 1):
        folded.add(x[t - 1])
        exact = posterior_delta(start, x[:t], rho)
        assert (folded.delta - exact).norm() < 1e-13 * exact.norm()


@pytest.mark.usefixtures("recipes")
def test_a_larger_shrinkage_turns_fedpas_deltas_away_from_fedavgs() -> None:
    from fedsim.problem import Problem
    from protocols.fedpa import FedPA

    problem = Problem.build(fedsim.Experiment(algo="fedpa", clients=3, model="logistic"), FedPA(), None)
    deltas = recipe("fedpa_covariance").deltas
    none, strong = (list(deltas(problem, problem.start, rho, 6)) for rho in (0.0, 100.0))
    assert len(none) == 3
    for (weak, _, near), (large, _, far) in zip(none, strong, strict=True):
        assert weak == 0
        assert large > 1
        assert far < near


PARTICIPATION = """
title = "Partial participation: three schedules"
seeds = [0, 1]
[experiment]
dataset = "digits"
model = "logistic"
clients = 4
rounds = 2
eval_samples = 0
[grid]
"experiment.participation" = ["full", "0.3", "0.3+lost:0.5"]
[[variant]]
label = "fedlap, rho 1/|S|"
experiment = {algo = "fedlap"}
hyperparameters = {rho = "1/|S|"}
[[variant]]
label = "fedavg"
experiment = {algo = "fedavg"}
"""


@pytest.mark.usefixtures("recipes")
def test_the_participation_page_is_written_from_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of accuracies, the share of lost bytes, and the invariant of the duals."""
    page, folder = recipe("participation"), tmp_path / "docs" / "recipes"
    folder.mkdir(parents=True)
    (folder / "participation_two.toml").write_text(PARTICIPATION)
    runs, out = tmp_path / "runs", tmp_path / "out"
    two, command = str(folder / "participation_two.toml"), [sys.executable, "-m", "launch", "sweep"]
    command += [two, "--runs", str(runs), "--jobs", "2", "--quiet", "--out", str(out)]
    subprocess.run(command, check=True, timeout=DEADLINE)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "RECIPES", ("two",))
    page.main(["--runs", str(runs), "--out", str(out)])
    text = (out / "participation.md").read_text()
    assert (
        text.startswith("# What partial participation costs")
        and (out / "participation_two.png").stat().st_size > 10_000
    )
    assert text.count(r"| fedlap, rho 1/\|S\| |") == 1
    assert (
        "wasted on gone clients and lost uploads, by algorithm: " in text and " % under 0.3+lost:0.5." in text
    )
    assert "Sum of duals: in 6 runs" in text
    page.main(["--runs", str(tmp_path / "none"), "--out", str(out)])
    assert (out / "participation.md").read_text() == text  # the archive has the scores, the page the rest
    damaged = text.replace("Test accuracy after", "Accuracy of nobody after")
    (out / "participation.md").write_text(damaged)
    page.main(["--runs", str(tmp_path / "none"), "--out", str(out)])
    assert (out / "participation.md").read_text() == text
    (out / "participation_two_runs.jsonl.zst").unlink()
    (out / "participation.md").write_text(damaged)
    page.main(["--runs", str(tmp_path / "none"), "--out", str(out)])
    assert (out / "participation.md").read_text() == damaged  # with neither, a section stays as it is
