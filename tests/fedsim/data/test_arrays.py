"""A user's data set of any likelihood: what fits is taken, what does not is one clear sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedsim.data import load_dataset
from fedsim.data.arrays import rounded
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
        "bernoulli": (x, tags, 5), "token_classes": (words, following, 9), "gaussian": (x, x, 2),
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


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "token_classes", "gaussian"])
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
        ("made('token_classes', train_inputs=words.astype('f4'))", "must be int32 or int64, not float32"),
        ("made('token_classes', train_targets=following - 1)", "train labels reach from -2 to 7, not -1"),
        ("made('token_classes', scale=255)", "tokens are ids, so scale must be 1"),
        ("made('gaussian', test_targets=x + np.nan)", "test_targets: row 0, column 0 (counted from 0)"),
        ("made('categorical', train_inputs=np.where(x == 7, np.inf, x))", "train_inputs: row 3, column"),
        ("made('categorical', train_inputs=np.ma.masked_array(x, x > 4))", "train_inputs is a masked"),
        ("made('categorical', train_inputs=words + 2**24, test_inputs=words)", "train inputs reach from"),
        ("made('categorical', train_inputs=__import__('torch').zeros(12, 2))", "train_inputs must be a"),
        ("made('categorical', train_inputs=__import__('pandas').DataFrame(x))", "it with .to_numpy()"),
        ("made('categorical', train_inputs=__import__('scipy').sparse.csr_matrix(x))", "it with .toarray()"),
        *(
            (
                f"made('categorical', train_inputs=x.astype({kind!r}))",
                "must be float32 or uint8 or int32, not",
            )
            for kind in ("i2", "u2", "?", "c8", "O", "f2", "g", ">f4", ">i4")
        ),
        ("made('categorical', test_inputs=x[:0], test_targets=np.arange(0))", "there are no test"),
        ("made('categorical', test_inputs=x[:0])", "0 test inputs but 12 labels"),
        ("made('categorical', classes=True)", "at least 2, not True"),
        ("made('categorical', scale=np.float32('nan'))", "scale must be a positive number, not nan"),
        ("made('gaussian', centres=np.arange(11))", "11 centres but 12 training rows"),
        ("made('categorical', train_inputs=x.tolist())", "train_inputs must be a numpy array, not a list"),
        ("made('categorical', test_inputs=x.astype('u1'))", "train_inputs are float32 but test_inputs uint8"),
        ("made('categorical', train_inputs=x[:, 0])", "train_inputs must have the shape (examples, ...)"),
        ("made('categorical', centres=[0] * 12)", "centres must be a numpy array"),
    ],
)
def test_what_does_not_fit_is_refused(call: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, call)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--dataset mine:it")


@pytest.mark.parametrize("number", ["x.shape[1] + 1", "np.int64(3)", "np.uint8(3)", "np.array(3)"])
def test_numbers_of_numpy_are_numbers(number: str, tmp_path: Path) -> None:
    dataset = load(tmp_path, f"made('categorical', classes={number}, scale=np.float32(2))")
    assert (dataset.classes, dataset.scale) == (3, 2.0)  # type: ignore[attr-defined]
    assert type(dataset.classes) is int and type(dataset.scale) is float  # type: ignore[attr-defined]


def test_a_masked_array_without_masked_values_and_parts_of_arrays_are_taken(tmp_path: Path) -> None:
    plain = load(tmp_path, "made('categorical')")
    masked = load(tmp_path, "made('categorical', train_inputs=np.ma.masked_array(x, False))")
    parts = load(
        tmp_path, "made('categorical', train_inputs=np.repeat(x, 2, 0)[::2], test_inputs=x.T.copy().T)"
    )
    for dataset in (masked, parts):
        for name in ("train_inputs", "test_inputs"):
            array = getattr(dataset, name)
            assert type(array) is np.ndarray and array.flags.c_contiguous
            np.testing.assert_array_equal(array, getattr(plain, name))


def test_float32_rounds_whole_numbers_that_it_cannot_hold() -> None:
    values = [2**24, 2**24 + 1, 2**24 + 2, -(2**24) - 1, 2**62, 2**62 + 1, 2**63 - 1, -(2**63), 0]
    expected = [False, True, False, True, False, True, True, False, False]
    assert rounded(np.array(values)).tolist() == expected
    assert rounded(np.array([2**64 - 1, 2**63], dtype=np.uint64)).tolist() == [True, False]


def test_an_unknown_likelihood_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"unknown likelihood of --dataset mine:it 'poisson'.*known: bernoulli"
    ):
        load(tmp_path, "made('poisson')")


def test_a_likelihood_that_left_names_its_replacement(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--dataset mine:it: tokens left in 0.2: token_classes"):
        load(tmp_path, "made('gaussian', likelihood='tokens')")


def test_arrays_of_another_likelihood_are_left_alone(tmp_path: Path) -> None:
    dataset = load(tmp_path, "made('token_classes')")
    np.testing.assert_array_equal(dataset.train_inputs.ravel(), np.arange(48) % 9)  # type: ignore[attr-defined]
    assert dataset.train_inputs.dtype == np.int32  # type: ignore[attr-defined]
