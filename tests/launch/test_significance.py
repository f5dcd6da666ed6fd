"""Differences between configurations: intervals, tests, corrections, verdicts, medians with censoring."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings, strategies
from scipy import stats

from launch.cli import main
from launch.numbers import NONE
from launch.results.columns import column
from launch.results.differences import Compared
from launch.results.groups import gather
from launch.results.significance import LEAST, SAME, differences, holm, leaders, median
from launch.results.tables import costs_json
from launch.runs.tables import metrics_table
from launch.sweep.recipe import Differences, Recipe, Table, Variant
from launch.sweep.table import Results
from tests.launch.run_folders import MB, Make

SHARES = strategies.floats(0, 1)


def drawn(seed: int, count: int, means: list[float]) -> list[dict[int, float]]:
    """Scores by seed, with noise that a seed's configurations share and noise of their own."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0, 3, count)
    return [dict(enumerate((mean + shared + rng.normal(0, 1, count)).tolist())) for mean in means]


@pytest.mark.parametrize("count", [5, 6, 9])
def test_intervals_and_p_values_are_those_of_scipy(count: int) -> None:
    scores = drawn(1, count, [80, 81, 78])
    compared = differences(scores, 0, all_pairs=False)
    for n in (1, 2):
        a, b = (np.array(list(scores[m].values())) for m in (n, 0))
        test = stats.ttest_rel(a, b)
        interval = test.confidence_interval(1 - 0.05 / 2)  # of two rows together, by Bonferroni
        assert compared[n].p == pytest.approx(test.pvalue, rel=1e-9)
        assert (compared[n].low, compared[n].high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_the_permutation_test_counts_all_flips_of_sign() -> None:
    scores = drawn(2, 7, [80, 79])
    d = differences(scores, 0, all_pairs=False)[1]
    means = [abs(np.dot(signs, d.values)) for signs in product((-1, 1), repeat=7)]
    expected = np.mean([m >= abs(sum(d.values)) - 1e-9 for m in means])
    assert d.permuted == pytest.approx(expected, abs=1e-12)
    assert math.isnan(differences(drawn(2, 5, [80, 79]), 0, all_pairs=False)[1].permuted)


@settings(deadline=None)
@given(strategies.lists(SHARES, min_size=1, max_size=9))
def test_holm_is_monotone_and_between_p_and_bonferroni(ps: list[float]) -> None:
    result = holm(ps)
    for p, q in zip(ps, result, strict=True):
        assert p <= q <= min(1.0, len(ps) * p) + 1e-12
    ordered = sorted(range(len(ps)), key=lambda n: ps[n])
    assert [result[n] for n in ordered] == sorted(result)


def test_the_best_of_equal_configurations_is_rarely_called_better() -> None:
    """Of six equal configurations, one is distinguishable from the best in at most 5 % of the trials, and an
    interval does not cover 0 in as few, although the data select the reference."""
    trials, wrong, missed = 300, 0, 0
    for seed in range(trials):
        scores = drawn(seed, 5, [80.0] * 6)
        best = max(range(6), key=lambda n: sum(scores[n].values()))
        compared = differences(scores, best, all_pairs=True)
        wrong += any(d.distinguishable for d in compared)
        missed += any(not d.low <= 0 <= d.high for d in compared)
    assert missed <= wrong <= trials * 0.05 + 3 * math.sqrt(trials * 0.05 * 0.95)


def test_fewer_than_five_seeds_are_a_range_and_no_ranking() -> None:
    scores = drawn(3, LEAST - 1, [80, 70])
    d = differences(scores, 0, all_pairs=True)[1]
    assert d.verdict() == "n = 4: no ranking" and not d.distinguishable
    assert (d.low, d.high) == (min(d.values), max(d.values)) and math.isnan(d.p)
    assert leaders(scores) == frozenset()


def test_leaders_are_the_best_and_what_is_not_distinguishable_from_it() -> None:
    scores = drawn(4, 8, [80, 80.1, 60])
    assert leaders(scores) == {0, 1} and leaders(scores, least=True) == {2}
    assert leaders(scores[:2]) == frozenset(), "bold in every row says nothing"
    assert leaders([*scores, {0: math.nan}, {}]) == {0, 1}


def test_a_diverged_seed_is_no_number() -> None:
    scores = [*drawn(5, 5, [80, 70]), dict.fromkeys(range(5), math.nan)]
    compared = Compared.of(column("test_accuracy@end"), ["a", "b", "c"], scores)
    assert compared is not None
    assert [compared.verdict(n) for n in range(3)] == [
        "reference",
        "less accurate",
        "5 of 5 diverged: no ranking",
    ]
    assert compared.table().rows[2][2] == NONE
    assert compared.differences[1].holm == compared.differences[1].p, "a diverged row is no comparison"


@settings(deadline=None)
@given(strategies.lists(strategies.tuples(strategies.integers(1, 30), strategies.booleans()), min_size=1))
def test_the_median_is_kaplan_and_meiers(seeds: list[tuple[int, bool]]) -> None:
    spent, ended = (tuple(n for n, ends in seeds if ends is which) for which in (False, True))
    result = median(spent, ended)
    sample = stats.CensoredData.right_censored([n for n, _ in seeds], [ends for _, ends in seeds])
    sf = stats.ecdf(sample).sf
    at = [q for q, p in zip(sf.quantiles, sf.probabilities, strict=True) if abs(p - 0.5) < 1e-9]
    below = [q for q, p in zip(sf.quantiles, sf.probabilities, strict=True) if p < 0.5 - 1e-9]
    events = [q for q in below if q in spent]
    if not events:
        assert result == math.inf
    else:
        assert result == ((at[0] + events[0]) / 2 if at else events[0])


def five(make: Make) -> Path:
    for seed in range(5):
        make(f"avg{seed}", (0.1, 0.7 + 0.002 * seed), seed=seed, data=f"split {seed}")
        make(f"lap{seed}", (0.1, 0.8 + 0.001 * seed), seed=seed, algo="fedlap", data=f"split {seed}")
        folder = make(f"prox{seed}", (0.1, 0.6), seed=seed, algo="fedprox", data=f"other {seed}")
    return folder.parent


def test_compare_says_which_difference_is_one_and_pairs_only_equal_splits(make: Make, tmp_path: Path) -> None:
    runs = five(make)
    arguments = ["compare", str(runs), "--out", str(tmp_path / "p.html")]
    output = CliRunner().invoke(main, arguments, env={"COLUMNS": "100"}).output
    assert "Differences from fedlap" in output and "less accurate" in output and "no common split" in output
    document = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    accuracy, nll = document["differences"]
    assert accuracy["reference"] == "fedlap" and accuracy["best"] and nll["column"] == "test_nll@end"
    rows = {row["group"]: row for row in accuracy["rows"]}
    assert rows["fedavg"]["n"] == 5 and rows["fedavg"]["holm"] == rows["fedavg"]["p"]
    assert rows["fedavg"]["mean"] == pytest.approx(-0.098) and rows["fedavg"]["verdict"] == "less accurate"
    assert rows["fedprox"]["verdict"] == "no common split" and rows["fedprox"]["mean"] is None
    page = (tmp_path / "p.html").read_text()
    assert "<h2>Differences" in page and "not distinguishable" in page


def test_against_names_the_reference(make: Make, tmp_path: Path) -> None:
    runs = five(make)
    command = ["compare", str(runs), "--out", str(tmp_path / "p.html"), "--json", "--against"]
    document = json.loads(CliRunner().invoke(main, [*command, "fedavg"]).output)
    rows = {row["group"]: row for row in document["differences"][0]["rows"]}
    assert rows["fedlap"]["verdict"] == "more accurate" and not document["differences"][0]["best"]
    assert rows["fedlap"]["family"] == 1, "fedprox has other splits"
    for text, error in (("fed", "is a part of"), ("fedavgg", "did you mean")):
        result = CliRunner().invoke(main, [*command, text])
        assert result.exit_code == 2 and error in result.output and SAME not in result.output


def test_the_reference_is_among_the_configurations_with_enough_seeds() -> None:
    scores = [*drawn(6, 5, [80, 70]), {0: 99.0}]
    compared = Compared.of(column("test_accuracy@end"), ["a", "b", "lucky"], scores)
    assert compared is not None and compared.reference == 0
    assert [compared.verdict(n) for n in range(3)] == ["reference", "less accurate", "n = 1: no ranking"]
    assert leaders(scores) == {0}
    more = {**scores[0], 5: 20.0, 6: 20.0}  # further seeds that the others do not have
    assert leaders([more, scores[1]]) == {0}


class Finished:
    """A run of a sweep with one evaluated round."""

    def __init__(self, score: float, spent: float = 0.0) -> None:
        start = {"round": 0, "test_accuracy": 0.1, "bytes_down": 0, "bytes_up": 0}
        self.curve = metrics_table([start, {**start, "round": 1, "test_accuracy": score, "bytes_up": spent}])


def test_factors_of_bytes_are_compared_and_missing_runs_are_counted() -> None:
    """b needs 1.5 times the bytes of a in every seed, whatever that is; c has no run of seed 0."""
    variants = tuple(
        Variant(name, {"algo": "fedavg"}, {"local.lr": n / 10}) for n, name in enumerate("abc", 1)
    )
    table = Table(("MB to 0.5", "rounds to 0.5"), best=True)
    recipe = Recipe("Bytes", variants, seeds=tuple(range(5)), experiment={"rounds": 1}, table=(table,))
    trials = tuple(recipe.trials())
    factor = {"a": 1.0, "b": 1.5, "c": 4.0}
    finished = {
        t.id: Finished(0.6, MB * factor[t.row.variant.label] * (1, 2, 3, 4, 30)[t.seed])
        for t in trials
        if t.row.variant.label != "c" or t.seed
    }
    results = Results(recipe, trials, finished)  # type: ignore[arg-type]
    raw = [group.scores("MB to 0.5") for _, group in results.groups]
    assert not differences(raw, 0, all_pairs=True)[1].distinguishable
    shown = results.table(table)
    assert [line[:2] for line in shown.rows] == [
        ("a", "8.0±11.0"),
        ("b", "12.0±16.6"),
        ("c (4 of 5 runs)", "39.0±46.9"),
    ]
    assert (0, 1) in shown.best and (1, 1) not in shown.best


def test_folds_of_a_seed_are_one_value() -> None:
    recipe = Recipe(
        "Folds",
        (Variant("a", {"algo": "fedavg"}), Variant("b", {"algo": "fedprox"})),
        seeds=(0, 1),
        experiment={"rounds": 1},
        repeat={"experiment.evaluate_on": ("fold:1/3", "fold:2/3", "fold:3/3")},
    )
    trials = tuple(recipe.trials())
    finished = {t.id: Finished(0.5 + 0.01 * n) for n, t in enumerate(trials)}
    results = Results(recipe, trials, finished)  # type: ignore[arg-type]
    (compared,) = results.compare(Differences(("test_accuracy@end",), against="a"))
    assert compared.differences[1].values == pytest.approx([0.06, 0.06]), "n counts seeds"
    del finished[trials[0].id]
    results = Results(recipe, trials, finished)  # type: ignore[arg-type]
    (compared,) = results.compare(Differences(("test_accuracy@end",), against="a"))
    assert compared.differences[1].n == 1, "a seed counts with all of its folds"


def test_a_run_that_is_not_finished_is_not_compared(make: Make, tmp_path: Path) -> None:
    for seed in range(5):
        make(f"avg{seed}", (0.1, 0.7, 0.7), seed=seed)
        runs = make(f"lap{seed}", (0.1, 0.8), seed=seed, algo="fedlap", status=None).parent
    command = ["compare", str(runs), "--out", str(tmp_path / "p.html")]
    document = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert document["differences"] == []
    result = CliRunner().invoke(main, [*command, "--against", "fedlap"])
    assert result.exit_code == 2 and "not finished" in result.output


def test_bytes_to_an_accuracy_have_factors_with_intervals(make: Make) -> None:
    for seed in range(5):
        make(f"pool{seed}", (0.1, 0.9), seed=seed, algo="pooled", cost=0)
        make(f"avg{seed}", (0.1, 0.9), seed=seed, cost=(2 + seed) * MB)
        folder = make(f"lap{seed}", (0.1, 0.9), seed=seed, algo="fedlap", cost=3 * (2 + seed) * MB)
    (of_level,) = costs_json(gather([folder.parent]), [0.5])
    rows = {row["group"].split()[0]: row for row in of_level["rows"]}  # type: ignore[attr-defined]
    assert of_level["accuracy"] == 0.5 and rows["pooled"]["verdict"] == "sends nothing"
    assert (rows["fedavg"]["verdict"], rows["fedavg"]["ratio"]) == ("least", 1.0)
    lap = rows["fedlap"]
    assert [lap[key] for key in ("ratio", "low", "high")] == pytest.approx([3, 3, 3], rel=1e-9)
    assert lap["verdict"] == "more bytes" and lap["holm"] < 0.05
    assert (lap["reached"], lap["seeds"], lap["n"], lap["family"]) == (5, 5, 5, 1)
