"""The data sets of TensorFlow Federated, on small files of the same formats."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fedsim.data import DATASETS, load_dataset, partition, vocabulary
from fedsim.data.cache import cache_root
from fedsim.data.readers import stackoverflow
from fedsim.errors import DataError, UsageError
from tests.fedsim.data.federated_files import (
    many_posts,
    post,
    write_cifar100,
    write_emnist,
    write_h5,
    write_stackoverflow,
)

# ---- images


def test_emnist_by_writer(tmp_path: Path) -> None:
    written = write_emnist(tmp_path)
    dataset = load_dataset("emnist62", tmp_path)
    train, test = written["train"], written["test"]
    assert dataset.train_inputs.shape == (80, 1, 28, 28) and dataset.train_inputs.dtype == np.uint8
    assert (dataset.classes, dataset.scale, dataset.likelihood) == (62, 255.0, "categorical")
    pixels = np.concatenate([train[c]["pixels"] for c in sorted(train)])
    np.testing.assert_array_equal(dataset.train_inputs[:, 0] / np.float32(255), pixels)  # to the bit
    np.testing.assert_array_equal(
        dataset.test_targets, np.concatenate([test[c]["label"] for c in sorted(test)])
    )
    assert dataset.centres is not None
    np.testing.assert_array_equal(dataset.centres, np.repeat(np.arange(4), 20))
    split = partition(
        "natural", targets=dataset.train_targets, classes=62, clients=3, seed=0, centres=dataset.centres
    )
    assert [rows.tolist() for rows in split] == [list(range(k, k + 20)) for k in (0, 20, 40)]


def test_cifar100_as_divided_among_clients(tmp_path: Path) -> None:
    written = write_cifar100(tmp_path, clients=12)
    dataset = load_dataset("cifar100_lda", tmp_path)
    assert dataset.train_inputs.shape == (120, 3, 32, 32) and dataset.train_inputs.dtype == np.uint8
    order = sorted(written["train"])
    assert order[:4] == ["0", "1", "10", "11"]  # as strings
    images = np.concatenate([written["train"][c]["image"] for c in order])
    np.testing.assert_array_equal(dataset.train_inputs.transpose(0, 2, 3, 1), images)
    labels = np.concatenate([written["train"][c]["label"] for c in order])
    np.testing.assert_array_equal(dataset.train_targets, labels)
    assert len(dataset.test_targets) == 20


def test_labels_of_shape_n_1_and_clients_without_examples(tmp_path: Path) -> None:
    written = write_emnist(tmp_path)["train"]
    path = tmp_path / "fed_emnist/fed_emnist_train.h5"
    columns = {c: {**v, "label": v["label"][:, None]} for c, v in written.items()}
    empty = {"pixels": np.zeros((0, 28, 28), "f4"), "label": np.zeros((0,), np.int32)}
    write_h5(path, {**columns, "a_first": empty})
    dataset = load_dataset("emnist62", tmp_path)
    assert dataset.centres is not None
    assert np.unique(dataset.centres).tolist() == [0, 1, 2, 3]
    assert dataset.train_targets[:20].tolist() == written["f0000_0"]["label"].tolist()


Columns = dict[str, Any]


def _with(**changes: Any) -> Callable[[Columns], Columns]:
    return lambda columns: {**columns, **changes}


def _without(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {k: v for k, v in columns.items() if k != name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("pixels"), "has no examples/f0001_1/pixels"),
        (_without("label"), "has no examples/f0001_1/label"),
        (
            _with(pixels=np.zeros((20, 28, 27), "f4")),
            r"pixels has images of shape \(28, 27\), not \(28, 28\)",
        ),
        (_with(pixels=np.zeros((19, 28, 28), "f4")), "19 pixels, 20 label; they do not belong together"),
        (_with(pixels=np.full((20, 28, 28), 255, "f4")), "f0001_1/pixels are not grey values from 0 to 1"),
        (_with(pixels=np.full((20, 28, 28), np.nan, "f4")), "f0001_1/pixels are not grey values"),
        (_with(pixels=np.zeros((20, 28, 28), np.uint8)), "f0001_1/pixels are not grey values"),
        (_with(label=np.zeros(20, "f4")), "f0001_1/label is not one whole number"),
        (_with(label=np.zeros((20, 2), np.int32)), "f0001_1/label is not one whole number"),
        (_with(label=np.full(20, 62, np.int32)), "train labels reach from .* to 62, not 0 to 61"),
        (_with(label=np.int32(3)), "examples/f0001_1/label cannot be read"),
    ],
)
def test_a_file_that_is_not_emnist_is_refused(
    tmp_path: Path, change: Callable[[Columns], Columns], words: str
) -> None:
    written = write_emnist(tmp_path)["train"]
    path = tmp_path / "fed_emnist/fed_emnist_train.h5"
    write_h5(path, {c: change(v) if c == "f0001_1" else v for c, v in written.items()})
    with pytest.raises(DataError, match=words) as caught:
        load_dataset("emnist62", tmp_path)
    assert str(path) in str(caught.value) or "data set 'emnist62'" in str(caught.value)
    assert not list(cache_root().glob("*")), "nothing of a refused file is cached"


def test_other_images_are_refused(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    path = tmp_path / "fed_cifar100/fed_cifar100_test.h5"
    write_h5(path, {"0": {"image": np.zeros((2, 32, 32, 3), "f4"), "label": np.zeros(2, int)}})
    with pytest.raises(DataError, match=f"{path}: examples/0/image holds float32, not bytes"):
        load_dataset("cifar100_lda", tmp_path)


def test_a_damaged_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    write_emnist(tmp_path)
    path = tmp_path / "fed_emnist/fed_emnist_test.h5"
    whole = path.read_bytes()
    for rejected in (whole[: len(whole) // 2], b"", b"not HDF5"):
        path.write_bytes(rejected)
        with pytest.raises(DataError, match=f"{path} cannot be read as HDF5"):
            load_dataset("emnist62", tmp_path)
    with h5py.File(path, "w") as file:
        file.create_dataset("examples", data=[1, 2])
    with pytest.raises(DataError, match=f"{path} has no group 'examples'"):
        load_dataset("emnist62", tmp_path)
    write_h5(path, {"a": {"pixels": np.zeros((0, 28, 28), "f4"), "label": np.zeros(0, int)}})
    with pytest.raises(DataError, match=f"{path} has no examples"):
        load_dataset("emnist62", tmp_path)
    with h5py.File(path, "w") as file:
        file.create_group("examples").create_dataset("a", data=[1, 2])  # a column where a client is due
    with pytest.raises(DataError, match=f"{path}: examples/a/pixels cannot be read"):
        load_dataset("emnist62", tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"{path} is missing.*fed_emnist.tar.bz2"):
        load_dataset("emnist62", tmp_path)


def test_damaged_bytes_inside_a_file_are_an_error_that_names_the_key(tmp_path: Path) -> None:
    """A compressed column whose bytes do not unpack."""
    write_emnist(tmp_path)
    path = tmp_path / "fed_emnist/fed_emnist_train.h5"
    with h5py.File(path, "a") as file:
        client = file["examples/f0002_2"]
        pixels = client["pixels"][()]
        del client["pixels"]
        created = client.create_dataset("pixels", data=pixels, chunks=(20, 28, 28), compression="gzip")
        position = created.id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[position : position + 64] = bytes(64)
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=f"{path}: examples/f0002_2/pixels cannot be read"):
        load_dataset("emnist62", tmp_path)


def test_without_h5py_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_emnist(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UsageError, match=r"fed_emnist_train.h5 .*pip install h5py$"):
        load_dataset("emnist62", tmp_path)


# ---- Stack Overflow: next words

OOV, BOS, EOS, NONE = (
    vocabulary.oov(10_004),
    vocabulary.bos(10_004),
    vocabulary.eos(10_004),
    vocabulary.NO_TARGET,
)


def test_the_special_ids_are_those_of_tff() -> None:
    assert (vocabulary.PAD, vocabulary.words(10_004), OOV, BOS, EOS) == (0, 10_000, 10_001, 10_002, 10_003)


def test_sentences_as_ids(tmp_path: Path) -> None:
    twenty, more = " ".join(f"w{i}" for i in range(20)), " ".join(f"w{i}" for i in range(30, 55))
    rows = [post("w0 w9999 w10000 what w3"), post(twenty), post(more), post(" ".join(["w7"] * 19)), post("")]
    write_stackoverflow(tmp_path, {"u": rows}, {"v": [post("w1")]})
    dataset = load_dataset("stackoverflow_nwp", tmp_path)
    assert dataset.train_inputs.shape == dataset.train_targets.shape == (5, 20)
    assert (dataset.train_inputs.dtype, dataset.train_targets.dtype) == (np.int32, np.int64)
    assert (dataset.classes, dataset.scale, dataset.likelihood) == (10_004, 1.0, "tokens")
    assert dataset.train_inputs[0].tolist() == [BOS, 1, 10_000, OOV, OOV, 4, EOS, *[0] * 13]
    assert dataset.train_targets[0].tolist() == [1, 10_000, OOV, OOV, 4, EOS, *[NONE] * 14]
    # twenty words or more leave no room for EOS, as in TFF
    assert dataset.train_inputs[1].tolist() == [BOS, *range(1, 20)]
    assert dataset.train_targets[1].tolist() == list(range(1, 21))
    assert dataset.train_targets[2].tolist() == list(range(31, 51))
    assert dataset.train_targets[3].tolist() == [*[8] * 19, EOS]
    assert dataset.train_inputs[4].tolist() == [BOS, EOS, *[0] * 18]
    assert dataset.train_targets[4].tolist() == [EOS, *[NONE] * 19]
    assert dataset.test_targets[0].tolist() == [2, EOS, *[NONE] * 18]


def test_only_so_many_users_and_sentences_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posts = {f"{k:03d}": [post(f"w{i}") for i in range(130 if k == 1 else 3)] for k in (5, 1, 3)}
    write_stackoverflow(tmp_path, posts, posts)
    full = load_dataset("stackoverflow_nwp", tmp_path)
    assert full.centres is not None
    assert np.bincount(full.centres).tolist() == [128, 3, 3]  # users in order of their ids
    two = load_dataset("stackoverflow_nwp:2", tmp_path)
    assert two.name == "stackoverflow_nwp:2"
    assert two.centres is not None
    assert np.bincount(two.centres).tolist() == [128, 3]
    assert len(two.test_targets) == 134  # test users are pooled whatever is asked for
    assert len(list(cache_root().iterdir())) == 2
    monkeypatch.setattr(stackoverflow, "TEST_ROWS", 130)
    assert len(load_dataset("stackoverflow_nwp:1", tmp_path).test_targets) == 130
    with h5py.File(tmp_path / "stackoverflow/stackoverflow_train.h5", "a") as file:
        del file["examples/005"]["tokens"]  # a user that is not read may be anything
    load_dataset("stackoverflow_nwp:2", tmp_path)
    with pytest.raises(DataError, match=r"stackoverflow_train\.h5 has no examples/005/tokens"):
        load_dataset("stackoverflow_nwp:3", tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "stackoverflow_nwp:0",
            "write stackoverflow_nwp:CLIENTS or just stackoverflow_nwp, the number of clients",
        ),
        ("stackoverflow_nwp:", "'stackoverflow_nwp:': write stackoverflow_nwp:CLIENTS or just"),
        ("stackoverflow_lr:all", "'stackoverflow_lr:all': write stackoverflow_lr:CLIENTS or just"),
        ("emnist62:10", "'emnist62:10': write emnist62, which is always read whole"),
        ("stackoverflow:10", "did you mean 'stackoverflow_"),
    ],
)
def test_a_wrong_number_of_clients_is_a_usage_error(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        load_dataset(name, tmp_path)


# ---- Stack Overflow: tags


def test_bags_of_words_and_tags(tmp_path: Path) -> None:
    rows = [
        post("w0 w0 w5 unknown w10000", title="w5 w7 w7 what", tags="tag0|tag499|tag500|c++"),
        post("nothing known", title="", tags="c++"),
    ]
    write_stackoverflow(tmp_path, {"u": rows}, {"v": rows[:1]})
    dataset = load_dataset("stackoverflow_lr", tmp_path)
    assert dataset.train_inputs.shape == (2, 10_000) and dataset.train_inputs.dtype == np.float32
    assert dataset.train_targets.shape == (2, 500) and dataset.train_targets.dtype == np.uint8
    assert (dataset.classes, dataset.likelihood) == (500, "bernoulli")
    bag = dataset.train_inputs[0]
    assert np.flatnonzero(bag).tolist() == [0, 5, 7]  # six known words
    np.testing.assert_array_equal(bag[[0, 5, 7]], np.float32([2 / 6, 2 / 6, 2 / 6]))
    assert not dataset.train_inputs[1].any()
    assert np.flatnonzero(dataset.train_targets[0]).tolist() == [0, 499]  # by frequency, not by place
    assert not dataset.train_targets[1].any()
    assert dataset.centres is not None and dataset.centres.tolist() == [0, 0]


def test_equally_frequent_tags_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tags"
    path.write_text('{"b": 1, "c": 2, "a": 1, "d": 2}')
    assert stackoverflow.most_frequent_tags(path, 3) == [b"c", b"d", b"b"]


def test_fixed_width_strings_are_read_too(tmp_path: Path) -> None:
    base = write_stackoverflow(tmp_path, many_posts(), many_posts())
    plain = load_dataset("stackoverflow_nwp", tmp_path)
    columns = {c: {"tokens": np.array([p[0] for p in rows])} for c, rows in many_posts().items()}
    write_h5(base / "stackoverflow_train.h5", columns)
    np.testing.assert_array_equal(
        load_dataset("stackoverflow_nwp", tmp_path).train_inputs, plain.train_inputs
    )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("stackoverflow.word_count", "w0 12\nw1\n", "word_count: line 2 is not a word and its count"),
        ("stackoverflow.word_count", "w0 x\n", "line 1 is not a word"),
        ("stackoverflow.word_count", "w0 2\nw1 1\n", "has 2 different words where 10000 are needed"),
        ("stackoverflow.word_count", "w0 2\n" * 10_000, "has 1 different words where 10000"),
        ("stackoverflow.tag_count", "tag0 12\n", "tag_count is not a JSON object of tag counts"),
        ("stackoverflow.tag_count", "[1, 2]", "tag_count is not a JSON object"),
        ("stackoverflow.tag_count", '{"a": "x"}', "tag_count is not a JSON object"),
        ("stackoverflow.tag_count", '{"a": 2}', "has 1 different tags where 500 are needed"),
    ],
)
def test_wrong_counts_are_refused(tmp_path: Path, file: str, content: str, words: str) -> None:
    base = write_stackoverflow(tmp_path, many_posts(), many_posts())
    (base / file).write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        load_dataset("stackoverflow_lr", tmp_path)
    assert str(base / file) in str(caught.value)


def test_columns_that_are_no_sentences_are_refused(tmp_path: Path) -> None:
    base = write_stackoverflow(tmp_path, many_posts(), many_posts())
    path = base / "stackoverflow_test.h5"
    write_h5(path, {"u": {"tokens": np.arange(3)}})
    with pytest.raises(DataError, match=f"{path}: examples/u/tokens is not a column of byte strings"):
        load_dataset("stackoverflow_nwp", tmp_path)
    write_h5(path, {"u": {"tokens": [b"w1", b"w2"], "title": [b"w1"], "tags": [b"tag1"]}})
    with pytest.raises(DataError, match=f"{path}: examples/u has 2 tokens, 1 title, 1 tags"):
        load_dataset("stackoverflow_lr", tmp_path)
    write_h5(path, {"u": {"tokens": np.array([], "S1")}})
    with pytest.raises(DataError, match=f"{path} has no sentences"):
        load_dataset("stackoverflow_nwp", tmp_path)


def test_the_catalogue_says_what_is_read() -> None:
    assert {name for name, info in DATASETS.items() if info.clients} == {
        "stackoverflow_lr",
        "stackoverflow_nwp",
    }
    assert DATASETS["stackoverflow_lr"].shape == (stackoverflow.WORDS,)
    assert DATASETS["stackoverflow_nwp"].classes == stackoverflow.WORDS + vocabulary.SPECIALS
    # what README and about promise: 128 sentences of a user and 10,000 for testing
    row = 4 * 10_000 + 500
    assert stackoverflow.SENTENCES * row < 5.2e6
    assert (
        DATASETS["stackoverflow_lr"].clients * stackoverflow.SENTENCES + stackoverflow.TEST_ROWS
    ) * row < 1.5e9
