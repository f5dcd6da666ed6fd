"""Presets: what they say is what the recipes behind their result pages ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fedsim
from fedsim.errors import UsageError
from fedsim.experiment import Experiment, build_algorithm
from launch.configuration.config import Overrides
from launch.configuration.presets import Preset, names, remark, remarks
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
        (Experiment(algo="ivon_admm", dataset="fashion_mnist"), "", "digits; --preset fashion_mnist"),
        (Experiment(algo="ivon_admm", dataset="cifar10"), "", "chosen on digits; there is no preset for"),
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


def test_a_client_column_without_the_natural_partition_is_not_used() -> None:
    table = Experiment(dataset="rows.csv,label=y,client=site")
    assert "client=site is not used, because --partition is two_dirichlet" in remarks(table)[-1]
    for changes in ({"partition": "natural"}, {"dataset": "rows.csv,label=y"}, {"dataset": "digits"}):
        assert not any("is not used" in line for line in remarks(replace(table, **changes)))
