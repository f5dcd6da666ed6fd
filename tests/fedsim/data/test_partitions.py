"""The splits: published sizes exactly, and what every split promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedsim.data import partition
from fedsim.errors import DataError, UsageError


def _balanced(classes: int, each: int) -> np.ndarray:
    return np.tile(np.arange(classes, dtype=np.int64), each)


def _sizes(split: tuple[np.ndarray, ...]) -> list[int]:
    return [len(rows) for rows in split]


def _check(split: tuple[np.ndarray, ...], clients: int, n: int) -> np.ndarray:
    """In range, disjoint, nobody empty; returns all rows."""
    assert len(split) == clients
    rows = np.concatenate(split)
    assert all(part.dtype == np.int64 and len(part) for part in split)
    assert rows.min() >= 0 and rows.max() < n
    assert len(np.unique(rows)) == len(rows)
    return rows


# ---- the papers' split. Sizes: docs/references/published-numbers.md#splits

_PUBLISHED = {
    ("FMNIST 10 %", 62): [30, 499, 1301, 409, 749, 189, 654, 160, 229, 1789],
    ("FMNIST 10 %", 63): [959, 611, 65, 898, 215, 720, 398, 874, 967, 302],
    ("FMNIST 10 %", 64): [388, 745, 1096, 682, 594, 380, 372, 352, 914, 473],
    ("CIFAR-10", 62): [242, 4154, 10833, 3397, 6243, 1573, 5439, 1329, 1889, 14897],
    ("CIFAR-10", 63): [7975, 5099, 516, 7485, 1792, 5980, 3305, 7283, 8056, 2504],
    ("CIFAR-10", 64): [3233, 6209, 9133, 5693, 4958, 3162, 3111, 2939, 7621, 3936],
    ("CIFAR-100", 62): [273, 4222, 10408, 3254, 5863, 2474, 4974, 1674, 1869, 14960],
    ("CIFAR-100", 63): [7227, 5380, 578, 7187, 2004, 7056, 3080, 7456, 7463, 2548],
    ("CIFAR-100", 64): [4269, 7089, 7254, 5340, 4992, 3473, 3775, 3535, 6012, 4233],
}
_SHAPES = {"FMNIST 10 %": (10, 6000, 0.1), "CIFAR-10": (10, 5000, 1.0), "CIFAR-100": (100, 500, 1)}


@pytest.mark.parametrize(("data", "seed"), _PUBLISHED)
def test_two_dirichlet_has_the_published_sizes(data: str, seed: int) -> None:
    classes, each, fraction = _SHAPES[data]
    targets = _balanced(classes, each)
    split = partition(
        "two_dirichlet", targets=targets, classes=classes, clients=10, seed=seed, fraction=fraction
    )
    assert _sizes(split) == _PUBLISHED[data, seed]
    _check(split, 10, len(targets))
    for rows in split:  # class by class
        assert (np.diff(targets[rows]) >= 0).all()


def test_two_dirichlet_gives_an_empty_client_two_rows() -> None:
    targets = _balanced(10, 6000)
    split = partition("two_dirichlet", targets=targets, classes=10, clients=100, seed=69)
    _check(split, 100, len(targets))
    assert len(split[87]) == 2


def test_two_dirichlet_row_by_row() -> None:
    """Computed from the formula (docs/references/published-numbers.md) on unbalanced classes."""
    targets = np.random.RandomState(5).randint(0, 3, 200).astype(np.int64)
    split = partition("two_dirichlet:2,0.7", targets=targets, classes=3, clients=4, seed=11, fraction=0.5)
    rng = np.random.RandomState(11)
    p = rng.dirichlet([2.0] * 4)
    q = rng.dirichlet([0.7] * 3, 4)
    expected: list[list[int]] = [[], [], [], []]
    for c in range(3):
        members = np.flatnonzero(targets == c)
        rng.shuffle(members)
        deck = members.tolist()
        for k in range(4):
            m = [p[j] * q[j, c] for j in range(4)]
            n = round(len(members) * 0.5 * m[k] / sum(m))
            n = 2 if n == 1 else n
            expected[k] += deck[:n]
            deck = deck[n:]
    assert [rows.tolist() for rows in split] == expected


def test_a_concentration_that_cannot_be_drawn_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot be drawn"):
        partition("two_dirichlet:1e-5,1e-5", targets=_balanced(2, 10), classes=2, clients=2, seed=0)


# ---- the other splits


@pytest.mark.parametrize("seed", range(62, 72))
def test_two_classes(seed: int) -> None:
    targets = _balanced(10, 6000)
    split = partition("two_classes", targets=targets, classes=10, clients=100, seed=seed)
    assert _sizes(split) == [600] * 100
    counts = np.array([np.bincount(targets[rows], minlength=10) for rows in split])
    assert ((counts == 300).sum(axis=1) == 2).all()
    assert counts.sum(axis=0).max() <= 21 * 300
    assert (counts[0, 0], counts[1].sum()) == (300, 600)  # the first class of client 0 is 0


def test_two_classes_repeats_a_class_that_runs_out() -> None:
    targets = np.repeat(np.arange(2, dtype=np.int64), [30, 5])
    split = partition("two_classes:10", targets=targets, classes=2, clients=3, seed=0)
    assert [np.bincount(targets[rows]).tolist() for rows in split] == [[10, 5]] * 3
    assert len(set(np.concatenate([rows[:10] for rows in split]).tolist())) == 30


@pytest.mark.parametrize(("classes", "clients"), [(2, 7), (3, 50), (10, 100), (10, 105), (5, 1)])
def test_two_classes_always_ends(classes: int, clients: int) -> None:
    targets = _balanced(classes, 300)
    for seed in range(20):
        split = partition("two_classes:2", targets=targets, classes=classes, clients=clients, seed=seed)
        assert all(len(np.unique(targets[rows])) == 2 for rows in split)


def test_credit_splits() -> None:
    targets = np.repeat(np.arange(2, dtype=np.int64), [285, 236])
    counts = {}
    for name, clients in (("credit_het", 10), ("credit_hom", 10), ("credit_two", 2)):
        split = partition(name, targets=targets, classes=2, clients=clients, seed=62)
        _check(split, clients, len(targets))
        counts[name] = [tuple(np.bincount(targets[rows]).tolist()) for rows in split]
        assert all((np.diff(targets[rows]) >= 0).all() for rows in split)  # negatives first
    assert counts["credit_het"] == [(34, 2)] * 5 + [(22, 45)] * 5
    assert counts["credit_hom"] == [(28, 23)] * 3 + [(28, 24)] * 6 + [(28, 23)]
    assert counts["credit_two"] == [(142, 118)] * 2
    # The release shuffles the negatives first, straight after seeding.
    rng = np.random.RandomState(62)
    negatives = np.flatnonzero(targets == 0)
    rng.shuffle(negatives)
    split = partition("credit_het", targets=targets, classes=2, clients=10, seed=62)
    np.testing.assert_array_equal(split[1][:34], negatives[34:68])


def test_natural() -> None:
    targets = np.zeros(10, dtype=np.int64)
    centres = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
    kwargs = {"targets": targets, "classes": 2, "seed": 0, "centres": centres}
    split = partition("natural", clients=3, **kwargs)  # type: ignore[arg-type]
    assert [rows.tolist() for rows in split] == [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]]
    half = partition("natural", clients=3, fraction=0.4, **kwargs)  # type: ignore[arg-type]
    assert _sizes(half) == [1, 1, 2]
    assert all((centres[rows] == k).all() for k, rows in enumerate(half))
    first = partition("natural", clients=2, **kwargs)  # type: ignore[arg-type]
    assert [rows.tolist() for rows in first] == [[0, 1, 2], [3, 4]]
    with pytest.raises(UsageError, match="one client per centre, and there are 3: at most 3 clients, not 4"):
        partition("natural", clients=4, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="centres of its own"):
        partition("natural", targets=targets, classes=2, clients=3, seed=0)


# ---- targets that are not classes


@pytest.mark.parametrize(
    "targets", [np.zeros((12, 5), np.uint8), np.full((12, 5), -1), np.ones((12, 5), "f4")]
)
def test_targets_that_are_not_classes_are_divided_by_rows_only(targets: np.ndarray) -> None:
    common = {"classes": 5, "clients": 3, "seed": 0}
    split = partition("iid", targets=targets, **common)  # type: ignore[arg-type]
    assert len(_check(split, 3, 12)) == 12
    by_row = partition("iid", targets=np.zeros(12, np.int64), **common)  # type: ignore[arg-type]
    assert all((a == b).all() for a, b in zip(split, by_row, strict=True))
    centres = np.repeat(np.arange(3), 4)
    natural = partition("natural", targets=targets, centres=centres, **common)  # type: ignore[arg-type]
    assert _sizes(natural) == [4, 4, 4]
    for spec in ("two_dirichlet", "dirichlet:1", "two_classes:2", "credit_two"):
        with pytest.raises(UsageError, match="are not classes; use 'iid', or 'natural'"):
            partition(spec, targets=targets, **common)  # type: ignore[arg-type]


def test_dirichlet_of_extreme_concentrations() -> None:
    targets = _balanced(10, 600)
    for alpha in ("1e-9", "0.01", "1e6"):
        split = partition(f"dirichlet:{alpha}", targets=targets, classes=10, clients=20, seed=1)
        assert len(_check(split, 20, 6000)) == 6000
    assert np.ptp(_sizes(split)) <= 10
    lonely = partition("dirichlet:1e-9", targets=targets, classes=10, clients=20, seed=1)
    assert sum(size == 2 for size in _sizes(lonely)) >= 10  # 10 classes cannot reach 20 clients


def test_dirichlet_proportions_have_the_right_spread() -> None:
    """Var of a share of Dir(a, ..., a) over K clients: (1/K)(1 - 1/K)/(K a + 1)."""
    targets = _balanced(100, 1000)
    for alpha in (0.05, 1.0):
        split = partition(f"dirichlet:{alpha}", targets=targets, classes=100, clients=5, seed=3)
        shares = np.array([np.bincount(targets[rows], minlength=100) for rows in split]) / 1000
        assert shares.var() == pytest.approx(0.16 / (5 * alpha + 1), rel=0.15)


# ---- what every split promises


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(["iid", "two_dirichlet", "two_dirichlet:5,0.1", "dirichlet:0.1"]),
    labels=st.lists(st.integers(0, 4), min_size=60, max_size=300),
    clients=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    fraction=st.sampled_from([1.0, 0.7, 0.5]),
)
def test_splits_are_disjoint_in_range_and_repeatable(
    spec: str, labels: list[int], clients: int, seed: int, fraction: float
) -> None:
    targets = np.array(labels, dtype=np.int64)

    def draw() -> tuple[np.ndarray, ...]:
        return partition(spec, targets=targets, classes=5, clients=clients, seed=seed, fraction=fraction)

    before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    split = draw()
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # type: ignore[index]
    for first, second in zip(split, draw(), strict=True):
        np.testing.assert_array_equal(first, second)
    rows = _check(split, clients, len(targets))
    if spec == "iid":
        assert len(rows) == round(fraction * len(targets))
        assert np.ptp(_sizes(split)) <= 1
    elif spec.startswith("dirichlet"):
        expected = [round(fraction * n) for n in np.bincount(targets, minlength=5)]
        assert np.bincount(targets[rows], minlength=5).tolist() == expected


# ---- errors


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("idd", "did you mean 'iid'"),
        ("two_dirichlett:1", "did you mean 'two_dirichlet:SIZE_ALPHA,CLASS_ALPHA'"),
        ("iid:3", "write iid"),
        ("dirichlet", "write dirichlet:ALPHA"),
        ("dirichlet:", "write dirichlet:ALPHA"),
        ("dirichlet:-1", "positive number"),
        ("dirichlet:nan", "positive number"),
        ("two_dirichlet:1,2,3", "two_dirichlet:SIZE_ALPHA,CLASS_ALPHA or just two_dirichlet"),
        ("two_classes:2.5", "whole number"),
        ("credit_het", "uci_credit"),
    ],
)
def test_a_wrong_spec_is_a_usage_error(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        partition(spec, targets=_balanced(3, 30), classes=3, clients=3, seed=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clients": 0}, "at least 1 client"),
        ({"seed": -1}, "seed"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"classes": 2}, "outside 0 .. 1"),
        ({"spec": "two_classes", "fraction": 0.5}, "fraction must be 1"),
    ],
)
def test_wrong_arguments_are_usage_errors(change: dict[str, object], words: str) -> None:
    arguments = {"targets": _balanced(3, 30), "classes": 3, "clients": 3, "seed": 0, "spec": "iid"}
    with pytest.raises(UsageError, match=words):
        partition(**{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["iid", "two_dirichlet", "dirichlet:1"])
def test_more_clients_than_rows_are_refused_before_rows_are_divided(spec: str) -> None:
    with pytest.raises(DataError, match=r"9 clients cannot divide 8 training examples.*fewer clients"):
        partition(spec, targets=_balanced(2, 4), classes=2, clients=9, seed=0)
