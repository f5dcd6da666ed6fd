"""Names and lists without torch: what they say, and that a typo is told before anything is imported."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fedsim.errors import UsageError
from fedsim.experiment import build_algorithm, resolved_hyperparameters
from launch.cli import main
from launch.configuration import names, write_names
from launch.configuration.config import Overrides
from launch.runs.client_costs import sent_once
from launch.sweep.recipe import Recipe, Row, Variant
from protocols import PAPERS, REGISTRY, RELATED


def test_the_file_is_what_the_registries_say() -> None:
    assert names.FILE.read_text(encoding="utf-8") == write_names.text(), (
        "python -m launch.configuration.write_names"
    )


def test_algorithms_of_other_papers_are_a_group_behind_the_papers_own() -> None:
    groups = {name: entry.group for name, entry in names.names("algorithms").items()}
    assert groups == {a.name: "papers" for a in PAPERS} | {a.name: "related" for a in RELATED}
    assert len(RELATED) == 11 and groups["scaffold"] == "related" and groups["mime"] == "papers"
    shown = CliRunner().invoke(main, ["list", "algorithms"]).stdout
    first, heading, second = shown.partition(names.GROUPS["related"])
    assert heading and first.startswith(names.GROUPS["papers"])
    assert [line.split()[0] for line in second.strip().splitlines()[1:]] == [a.name for a in RELATED]


def test_what_a_client_gets_once_does_not_depend_on_switches() -> None:
    tried = 0
    for kind in REGISTRY:
        switches = [key for key, value in resolved_hyperparameters(kind()).items() if isinstance(value, bool)]
        for key in switches:
            built = build_algorithm(kind, {key: not resolved_hyperparameters(kind())[key]})
            tried += len(once := names.names("algorithms")[kind.name].once)
            assert sent_once(built) == set(once), (kind.name, key)
    assert tried  # send_global_labels of fedlap_func, among others


def test_a_sweeps_experiment_is_the_same_whether_a_default_is_named_or_not() -> None:
    recipe, seed = Recipe("", ()), 7
    for algo, known in names.names("algorithms").items():
        assert known.defaults
        left, named = (
            recipe.configure(Row(Variant("", {"algo": algo}, hyperparameters), {}), seed)
            for hyperparameters in ({}, dict(list(known.defaults.hyperparameters.items())[:1]))
        )
        assert left == named and left.hyperparameters


def _printed(*arguments: str) -> str:
    return CliRunner().invoke(main, arguments).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algo", "fedlap_cow"], "unknown algorithm 'fedlap_cow'; did you mean 'fedlap_cov'?"),
        (["--partition", "dirichlt:3"], "unknown partition 'dirichlt'; did you mean 'dirichlet:ALPHA'?"),
        (["--codec", "mean=bf17"], "unknown codec 'bf17'; did you mean 'bf16'?"),
        (["--participation", "robn:2"], "unknown schedule 'robn'; did you mean 'robin:N'?"),
        (["--set", "delt=1"], "'delt'; did you mean 'delta'? (all: fedsim describe fedlap_cov)"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_name_is_told_with_the_nearest(arguments: list[str], words: str) -> None:
    """Before anything heavy is imported: test_without_torch.py."""
    printed = _printed("launch", *arguments)
    assert words in printed and len(printed.splitlines()) == 1


@pytest.mark.parametrize("kind", names.KINDS)
def test_a_list_has_every_name(kind: str) -> None:
    words = _printed("list", kind).split()
    assert all(name.usage.split()[0] in words for name in names.names(kind).values())


def test_good_names_and_users_files_pass() -> None:
    Overrides.of({"participation": "markov:0.2,0.4+lost:0.1", "partition": "two_dirichlet:1,0.5"}).resolve()
    Overrides.of(
        {"participation": "0.3+gone:0.1", "codecs": ("up.precision=csr:0.1", "mean=delta+zstd")}
    ).resolve()
    Overrides.of({"participation": "trace:some+where.csv+lost:0.1", "dataset": "mine.py:data"}).resolve()
    Overrides.of(
        {"algo": "mine.py:Mine", "hyperparameters": ("anything=1",), "model": "net.py:Net"}
    ).resolve()
    Overrides.of({"algo": "fedlap", "hyperparameters": ("local.lr=0.1", "epochs=1")}).resolve()


def test_of_many_names_only_near_ones_are_shown() -> None:
    with pytest.raises(UsageError) as near:
        Overrides.of({"algo": "fedlap_cow"}).resolve()
    assert str(near.value) == (
        "unknown algorithm 'fedlap_cow'; did you mean 'fedlap_cov'? (also near: fedlap_func, fedlap, "
        "fedlap_cov_func; all: fedsim list algorithms)"
    )
    with pytest.raises(UsageError, match=r"unknown algorithm 'zzz' \(all: fedsim list algorithms\)$"):
        Overrides.of({"algo": "zzz"}).resolve()
