"""What --config reads: a configuration, a recipe's variant, a run's manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedsim.errors import DataError, UsageError
from launch.cli import main
from launch.configuration.config import Overrides
from launch.sweep.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
title = "small"
seeds = [7, 8]
[experiment]
clients = 3
rounds = 2
[hyperparameters]
local.batch_size = 4
local.epochs = 9
[[variant]]
label = "a: b, c"
experiment = {algo = "fedprox"}
hyperparameters = {local.epochs = 2, delta = 0.5}
codecs = {"up.mean" = "bf16"}
[[variant]]
label = "grid"
grid = {"hyperparameters.local.epochs" = [1, 2]}
"""


def resolved(**options: object) -> object:
    return Overrides.of(options).resolve()[0]


def test_a_recipes_variant_is_its_first_run(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    experiment, _ = Overrides.of({"config": f"{path}:a: b, c"}).resolve()
    first = next(iter(Recipe.read(path).trials())).experiment
    for key in ("algo", "clients", "rounds", "seed", "codecs"):
        assert getattr(experiment, key) == getattr(first, key)
    assert experiment.seed == 7
    assert experiment.hyperparameters == {"local.batch_size": 4, "local.epochs": 2, "delta": 0.5}
    changed, _ = Overrides.of({"config": f"{path}:a: b, c", "seed": 1, "rounds": 5}).resolve()
    assert (changed.seed, changed.rounds, changed.clients) == (1, 5, 3)


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("", "is a recipe: name one of its variants, such as .*:a: b, c"),
        (":a: b", "did you mean 'a: b, c'"),
        (":grid", "has a grid over hyperparameters.local.epochs"),
    ],
)
def test_a_recipe_needs_one_variant_without_a_grid(tmp_path: Path, suffix: str, words: str) -> None:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    with pytest.raises(UsageError, match=words):
        Overrides.of({"config": f"{path}{suffix}"})


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_every_variant_of_our_recipes_is_read_or_refused_for_its_grid(path: Path) -> None:
    recipe = Recipe.read(path)
    for row in recipe.rows():
        text = f"{path}:{row.variant.label}"
        if row.point:
            with pytest.raises(UsageError, match="has a grid over"):
                Overrides.of({"config": text})
        else:
            experiment, _ = Overrides.of({"config": text}).resolve()
            assert experiment.seed == recipe.seeds[0]


def test_a_manifest_is_the_same_experiment_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    job = "launch --algo fedprox --workers 0 --clients 3 --rounds 1 --seed 4 --set delta=0.3"
    run = CliRunner(catch_exceptions=False)
    assert run.invoke(main, [*job.split(), "--out", str(first)]).exit_code == 0
    again = ["launch", "--workers", "0", "--config", str(first / "manifest.json"), "--out", str(second)]
    done = run.invoke(main, again)
    assert done.exit_code == 0, done.output
    summaries = [json.loads((f / "summary.json").read_text()) for f in (first, second)]
    assert summaries[0]["model_sha256"] == summaries[1]["model_sha256"]
    assert summaries[0]["bytes"] == summaries[1]["bytes"]
    assert Overrides.of({"config": str(first)}).resolve() == Overrides.of({"config": again[4]}).resolve()


def test_what_is_no_configuration_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": 1}')
    (tmp_path / "b.toml").write_text("[experimant]\nrounds = 2\n")
    (tmp_path / "c.toml").write_text("experiment = 3\n")
    for name, kind, words in (
        ("a.json", DataError, "is no manifest of a run"),
        ("b.toml", UsageError, "did you mean 'experiment'"),
        ("c.toml", UsageError, "is no table; write \\[experiment\\]"),
        ("c.toml:x", UsageError, "has no \\[\\[variant\\]\\]"),
        ("d.json", UsageError, "No such file"),
    ):
        with pytest.raises(kind, match=words):
            Overrides.of({"config": str(tmp_path / name)})
