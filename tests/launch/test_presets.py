"""Presets: what they say is what the recipes behind their result pages ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import fedsim
from fedsim.errors import UsageError
from fedsim.experiment import Experiment, build_algorithm
from launch.cli import main
from launch.configuration.config import Overrides
from launch.configuration.presets import Preset, names, remark, remarks, step_remark
from launch.sweep.from_options import recipe_of, seed_list
from launch.sweep.recipe import Recipe, Trial
from protocols import find

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = [(name, algo) for name in names() for algo in Preset.read(name).algorithm]


def only(recipe: Recipe) -> Trial:
    (trial,) = recipe.trials()
    return trial


@pytest.mark.parametrize(("name", "algo"), ENTRIES)
def test_a_preset_is_the_variant_whose_results_its_page_shows(name: str, algo: str) -> None:
    """Equal identifiers: the sweep would take the runs of one for those of the other."""
    preset = Preset.read(name)
    settings = preset.algorithm[algo]
    recipe = Recipe.read(ROOT / (settings.recipe or preset.recipe))
    shown = [t for t in recipe.trials() if t.row.variant.label == settings.variant]
    assert {t.experiment.algo for t in shown} == {algo}
    seeds = ",".join(str(t.seed) for t in shown)
    selected = list(recipe_of({"algo": algo, "preset": name}, {}, seed_list(seeds)).trials())
    assert [t.id for t in selected] == [t.id for t in shown]


@pytest.mark.parametrize("name", names())
def test_a_preset_names_pages_that_are_there(name: str) -> None:
    preset = Preset.read(name)
    for settings in preset.algorithm.values():
        assert (ROOT / (settings.results or preset.results)).is_file()
        cited = settings.source.partition("(docs/")[2].partition(")")[0]
        assert not cited or (ROOT / "docs" / cited).is_file()


def test_the_command_line_goes_over_the_preset_key_by_key() -> None:
    options = {"algo": "ivon_admm", "preset": "fashion_mnist", "rounds": 7}
    experiment, _ = Overrides.of({**options, "hyperparameters": ("local.lr=0.5",)}).resolve()
    assert (experiment.rounds, experiment.clients, experiment.model) == (7, 10, "mlp")

    built = build_algorithm(find("ivon_admm"), experiment.hyperparameters)
    assert built.local.lr == 0.5 and built.local.h0 == 1e-3 and built.gamma == 2e-4


def test_python_has_the_experiment_of_the_command_line() -> None:
    here = fedsim.preset("fashion_mnist", "fedlap_cov", seed=3, hyperparameters={"delta": 0.1})
    options = {"algo": "fedlap_cov", "preset": "fashion_mnist", "seed": 3, "hyperparameters": ("delta=0.1",)}
    assert here == Overrides.of(options).resolve()[0]
    assert here.hyperparameters == {"local.epochs": 10, "delta": 0.1}


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown preset 'fashon_mnist'; did you mean 'fashion_mnist'"):
        Overrides.of({"preset": "fashon_mnist"})


@pytest.mark.parametrize(
    ("experiment", "preset", "words"),
    [
        (Experiment(algo="ivon_admm"), "", ""),
        (
            Experiment(algo="ivon_admm", dataset="fashion_mnist"),
            "",
            "digits; --preset fashion_mnist",
        ),
        (
            Experiment(algo="ivon_admm", dataset="cifar10"),
            "",
            "chosen on digits; there is no preset for cifar10",
        ),
        (Experiment(algo="fedavg", dataset="mnist"), "", "--preset mnist has settings for mnist"),
        (Experiment(dataset="uci_credit"), "", "--preset uci_credit_het or --preset uci_credit_hom"),
        (Experiment(dataset="mnist", hyperparameters={"lr": 1.0}), "", ""),
        (Experiment(algo="ivon_admm"), "fashion_mnist", "released configuration"),
        (Experiment(algo="pvi"), "fashion_mnist", "no hyperparameters for pvi"),
    ],
)
def test_a_remark_names_the_source(experiment: Experiment, preset: str, words: str) -> None:
    result = remark(experiment, preset)
    assert words in result if words else not result


FEWER = Experiment(algo="ivon_pvi", participation="0.3")


@pytest.mark.parametrize("algo", ["pvi", "ivon_pvi", "fedep", "fedgvi"])
def test_a_step_that_counts_all_clients_is_named_where_a_round_asks_fewer(algo: str) -> None:
    line = step_remark(replace(FEWER, algo=algo))
    assert "--set 'damping=1/|S|'" in line
    assert "all 10 clients" in line and "--participation 0.3" in line
    assert line in remarks(replace(FEWER, algo=algo))


@pytest.mark.parametrize(
    "participation", ["3", "0.3", "coin:0.9", "robin:3", "size:9", "markov:.1,.2", "f.py:F"]
)
def test_schedules_that_ask_fewer(participation: str) -> None:
    assert step_remark(replace(FEWER, participation=f"{participation}+lost:0.1"))


@pytest.mark.parametrize(
    "changes",
    [
        *({"participation": text} for text in ("full", "10", "1.0", "coin:1", "robin:10", "full+lost:0.5")),
        {"hyperparameters": {"damping": "1/K"}},
        {"algo": "fedlap_cov"},  # it counts those asked
        {"algo": "ivon_admm"},  # its step is one number for all clients and rounds
        {"algo": "fedavg"},
        {"asynchronous": "fedbuff:3", "compute": "1ms"},
    ],
    ids=str,
)
def test_nothing_is_said_of_a_step_that_fits_or_was_chosen(changes: dict[str, Any]) -> None:
    assert not step_remark(replace(FEWER, **changes))


def test_a_client_column_without_the_natural_partition_is_not_used() -> None:
    table = Experiment(dataset="rows.csv,label=y,client=site")
    assert "client=site is not used, because --partition is two_dirichlet" in remarks(table)[-1]
    for changes in ({"partition": "natural"}, {"dataset": "rows.csv,label=y"}, {"dataset": "digits"}):
        assert not any("is not used" in line for line in remarks(replace(table, **changes)))


def test_launch_plan_and_sweep_say_it_unless_they_are_quiet(tmp_path: Path) -> None:
    options = ["--algo", "ivon_pvi", "--clients", "4", "--participation", "2", "--rounds", "1"]
    run = ["--workers", "0", "--set", "epochs=1", "--out", str(tmp_path / "run")]
    words = "--set 'damping=1/|S|' counts those"

    def mentions(*arguments: str, words: str = words) -> bool:
        result = CliRunner().invoke(main, [*arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return words in " ".join(result.output.split())

    assert mentions("launch", *options, *run)
    assert not mentions("launch", *options, *run[:-1], str(tmp_path / "quiet"), "--quiet")
    assert mentions("plan", *options)
    sweep = ["sweep", *options, "--seeds", "0,1", "--runs", str(tmp_path / "runs"), "--dry-run"]
    words = "hyperparameters = {damping = '1/|S|'} in its [[variant]] of a recipe counts those"
    assert mentions(*sweep, words=words) and not mentions(*sweep, "--set", "damping=1/K", words=words)
