"""A user's data set of any likelihood: what fits is taken, what does not is one clear sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedsim.data import load_dataset
from fedsim.errors import DataError, UsageError

SOURCE = """
import numpy as np
from fedsim.data import Dataset

x = np.arange(24, dtype=np.float32).reshape(12, 2)
tags = (np.arange(60).reshape(12, 5) % 3 == 0).astype(np.uint8)
words = (np.arange(48).reshape(12, 4) % 9).astype(np.int32)
following = np.where(words == 0, -1, words).astype(np.int64)

def made(kind, **changes):
    inputs, targets, classes = {
        "bernoulli": (x, tags, 5), "tokens": (words, following, 9), "gaussian": (x, x, 2),
        "categorical": (x, np.arange(12) % 3, 3), "poisson": (x, x, 2),
    }[kind]
    fields = dict(train_inputs=inputs, train_targets=targets, test_inputs=inputs, test_targets=targets,
                  classes=classes, likelihood=kind)
    return Dataset("made", **(fields | changes))
"""


def load(tmp_path: Path, call: str) -> object:
    path = tmp_path / "mine.py"
    path.write_text(f"{SOURCE}\ndef it(): return {call}\n")
    return load_dataset(f"{path}:it")


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "tokens", "gaussian"])
def test_every_likelihood_is_taken_as_it_is(kind: str, tmp_path: Path) -> None:
    dataset = load(tmp_path, f"made({kind!r}, centres=np.arange(12) // 4)")
    assert dataset.likelihood == kind  # type: ignore[attr-defined]
    assert not dataset.train_targets.flags.writeable  # type: ignore[attr-defined]


def test_one_output_is_enough_where_targets_are_numbers(tmp_path: Path) -> None:
    column = "train_targets=x[:, :1], test_targets=x[:, :1], classes=1"
    assert load(tmp_path, f"made('gaussian', {column})").classes == 1  # type: ignore[attr-defined]
    tag = "train_targets=tags[:, :1], test_targets=tags[:, :1], classes=1"
    assert load(tmp_path, f"made('bernoulli', {tag})").classes == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("made('bernoulli', train_targets=tags.astype(int))", "train_targets must be uint8, not int64"),
        ("made('bernoulli', train_targets=tags * 2)", "train labels reach from 0 to 2, not 0 to 1"),
        ("made('bernoulli', classes=6)", "the train targets have shape (5,) each; bernoulli targets of"),
        ("made('bernoulli', test_targets=tags[:, 0])", "must have the shape (examples, ...), not (12,)"),
        ("made('tokens', train_inputs=words.astype('f4'))", "must be int32 or int64, not float32"),
        ("made('tokens', train_targets=following - 1)", "train labels reach from -2 to 7, not -1 to 8"),
        ("made('tokens', train_targets=following + 1)", "train labels reach from 0 to 9, not -1 to 8"),
        ("made('tokens', train_targets=following[:, :3])", "the train targets have shape (3,) each"),
        ("made('tokens', test_inputs=words + 1)", "test inputs reach from 1 to 9, not 0 to 8"),
        ("made('tokens', scale=255)", "tokens are ids, so scale must be 1"),
        ("made('tokens', classes=4)", "classes must be a whole number of at least 5, not 4"),
        ("made('gaussian', train_targets=x.astype(float))", "train_targets must be float32, not float64"),
        ("made('gaussian', test_targets=x + np.nan)", "a test target is not a finite number"),
        ("made('gaussian', test_targets=x[:, :1])", "the test targets have shape (1,) each"),
        ("made('gaussian', centres=np.arange(11))", "11 centres but 12 training rows"),
        ("made('categorical', classes=1)", "at least 2, not 1"),
    ],
)
def test_what_does_not_fit_is_refused(call: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, call)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--dataset mine:it")


def test_an_unknown_likelihood_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"unknown likelihood of --dataset mine:it 'poisson'.*known: bernoulli"
    ):
        load(tmp_path, "made('poisson')")


def test_arrays_of_another_likelihood_are_left_alone(tmp_path: Path) -> None:
    dataset = load(tmp_path, "made('tokens')")
    np.testing.assert_array_equal(dataset.train_inputs.ravel(), np.arange(48) % 9)  # type: ignore[attr-defined]
    assert dataset.train_inputs.dtype == np.int32  # type: ignore[attr-defined]
