"""Data sets of the `datasets` package from local folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fedsim.data.arrays import Array
from fedsim.data.datasets import Dataset, load_dataset
from fedsim.errors import DataError, UsageError
from fedsim.learning.likelihoods import likelihood

WORDS = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(6))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))


def saved(folder: Path, train: dict[str, Any], test: dict[str, Any] | None = None, **features: Any) -> None:
    described = datasets.Features(features) if features else None
    parts = {"train": datasets.Dataset.from_dict(train, features=described)}
    if test is not None:
        parts["test"] = datasets.Dataset.from_dict(test, features=described)
    datasets.DatasetDict(parts).save_to_disk(folder)


def tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder
    )


def arrays(dataset: Dataset) -> tuple[Array, Array]:
    return dataset.train_inputs, dataset.train_targets


def test_texts_become_ids_of_the_tokenizer_and_a_column_the_clients(tmp_path: Path) -> None:
    tokenizer(tmp_path / "words")
    rows = {"text": ["w0 w1", "w5 new w2 w3"], "stars": ["good", "bad"], "author": ["zoe", "ann"]}
    saved(tmp_path / "texts", rows, rows)
    spec = "hf:texts,input=text,label=stars,client=author,tokenizer=words,length=3"
    dataset = load_dataset(spec, tmp_path)
    inputs, targets = arrays(dataset)
    assert inputs.tolist() == [[2, 3, 0], [7, 1, 4]]
    assert inputs.dtype == np.int32
    assert targets.tolist() == [1, 0]  # bad, good
    assert dataset.centres is not None
    assert dataset.centres.tolist() == [1, 0]
    assert (dataset.classes, dataset.scale, dataset.likelihood) == (2, 1.0, "categorical")


def test_the_next_id_is_the_target_of_a_causal_model(tmp_path: Path) -> None:
    tokenizer(tmp_path / "words")
    rows = {"text": ["w0 w1 w2", "w3"]}
    saved(tmp_path / "texts", rows, rows)
    dataset = load_dataset("hf:texts,label=next,tokenizer=words,length=4", tmp_path)
    inputs, targets = arrays(dataset)
    assert inputs.tolist() == [[2, 3, 4, 0], [5, 0, 0, 0]]
    assert targets.tolist() == [[3, 4, -1, -1], [-1, -1, -1, -1]]
    assert (dataset.classes, dataset.likelihood) == (len(WORDS), "token_classes")


def test_a_class_per_place(tmp_path: Path) -> None:
    rows = {"input_ids": [[3, 1, 2], [4, 2]], "labels": [[0, 2, 1], [1, 1]]}
    saved(tmp_path / "tags", rows, rows)
    dataset = load_dataset(f"hf:{tmp_path / 'tags'}")
    assert dataset.train_targets.tolist() == [[0, 2, 1], [1, 1, -1]]
    assert (dataset.classes, dataset.likelihood) == (3, "token_classes")


def test_images_keep_their_bytes(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    rows = {"image": [Image.fromarray(p) for p in pixels], "label": [0, 2]}
    names = datasets.ClassLabel(names=["a", "b", "c"])
    saved(tmp_path / "images", rows, rows, image=datasets.Image(), label=names)
    dataset = load_dataset("hf:images", tmp_path)
    assert np.array_equal(dataset.train_inputs, pixels[:, None])
    assert (dataset.classes, dataset.scale) == (3, 255.0)


def test_numeric_columns_are_features_and_parquet_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    rows = datasets.Dataset.from_dict({"a": [1.5, 2.0], "b": [3, 4], "label": [0.25, -1.0], "who": [0, 1]})
    for part in ("train", "test"):
        rows.to_parquet(folder / f"{part}.parquet")
    dataset = load_dataset("hf:table,client=who", tmp_path)
    assert dataset.train_inputs.tolist() == [[1.5, 3.0], [2.0, 4.0]]
    assert dataset.train_targets.tolist() == [[0.25], [-1.0]]
    assert dataset.likelihood == "gaussian"


def test_it_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"input_ids": [[1, 2], [3, 4]], "label": [0, 1]}
    saved(tmp_path / "ids", rows, rows)
    first = load_dataset("hf:ids", tmp_path)
    monkeypatch.setattr("fedsim.data.readers.hub.HubDataset.read", None)
    assert np.array_equal(load_dataset("hf:ids", tmp_path).train_inputs, first.train_inputs)


@pytest.mark.parametrize(
    ("spec", "error", "what"),
    [
        ("hf:nowhere", DataError, "there is no folder"),
        ("hf:ids,labels=x", UsageError, r"unknown key .* 'labels'; did you mean 'label'"),
        ("hf:ids,length=x", UsageError, r"write hf:FOLDER"),
        ("hf:ids,label=lable", UsageError, "did you mean 'label'"),
        ("hf:ids,client=who", UsageError, "unknown column of ids"),
        ("hf:texts", UsageError, "column text is text; say tokenizer=FOLDER"),
        ("hf:trainonly", DataError, "it needs train, and test or validation"),
        ("hf:ragged", DataError, "rows of features differ in length"),
    ],
)
def test_what_cannot_be_read_is_an_error(
    tmp_path: Path, spec: str, error: type[Exception], what: str
) -> None:
    ids = {"input_ids": [[1, 2], [3, 4]], "label": [0, 1]}
    saved(tmp_path / "ids", ids, ids)
    saved(tmp_path / "texts", {"text": ["a"], "label": [0]}, {"text": ["a"], "label": [0]})
    saved(tmp_path / "trainonly", ids)
    ragged = {"input_ids": [[1.5, 2.5], [3.5]], "label": [0, 1]}
    saved(tmp_path / "ragged", ragged, ragged)
    with pytest.raises(error, match=what):
        load_dataset(spec, tmp_path)


def test_token_classes_count_every_place() -> None:
    import torch

    measure = likelihood("token_classes")
    outputs = torch.full((1, 4, 5), -9.0, dtype=torch.float64)
    targets = torch.tensor([[0, 4, 3, -1]])
    for place, predicted in enumerate([0, 4, 1, 2]):
        outputs[0, place, predicted] = 9.0
    numbers = measure.numbers(measure.tally(outputs, targets))
    assert numbers["test_accuracy"] == pytest.approx(2 / 3)
    # the layout of TensorFlow Federated has words in the middle only
    tokens = likelihood("tokens")
    assert tokens.numbers(tokens.tally(outputs, targets))["test_accuracy"] is None
