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


# ---- classes of both splits


def labelled(folder: Path, train: tuple[list[Any], Any], test: tuple[list[Any], Any]) -> None:
    """Splits with a feature and labels, each of its own type (None: as inferred)."""
    parts = {}
    for title, (labels, kind) in (("train", train), ("test", test)):
        rows = datasets.Dataset.from_dict({"x": [0.5] * len(labels), "label": labels})
        parts[title] = rows.cast_column("label", kind) if kind else rows
    datasets.DatasetDict(parts).save_to_disk(folder)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (([0, 1, 2], "abc"), ([0, 1], "bc")),  # a class that is missing among the test rows
        (([0, 1, 2], "abc"), ([1, 2], "abcz")),  # a name that no row has
        (([0, 1, 2], "abc"), ([1, 0], "cb")),  # in another order
        (([0, 1, 2], "abc"), (["b", "c"], "")),
        ((["a", "b", "c"], ""), ([1, 0], "cb")),
        ((["a", "b", "c"], ""), (["b", "c"], "")),
    ],
)
def test_classes_are_matched_by_name(tmp_path: Path, train: tuple[Any, str], test: tuple[Any, str]) -> None:
    kinds = [datasets.ClassLabel(names=[*names]) if names else None for _, names in (train, test)]
    labelled(tmp_path / "d", (train[0], kinds[0]), (test[0], kinds[1]))
    dataset = load_dataset("hf:d", tmp_path)
    assert dataset.train_targets.tolist() == [0, 1, 2]
    assert dataset.test_targets.tolist() == [1, 2]
    assert dataset.classes == 3


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (
            ([0, 1], "ab"),
            ([0, 1], "bz"),
            "label of test has classes that train has not: 'z'; those of train are 'a', 'b'",
        ),
        (
            (["a", "b"], ""),
            (["b", "B "], ""),
            "label of test has classes that train has not: 'B '; those of train",
        ),
        ((["a", "a "], ""), (["a"], ""), "column label has both 'a' and 'a '"),
        (([0, 1], "ab"), ([0, 1], ""), "column label has names in train, numbers in test"),
        (
            ([0, 1], ""),
            ([1, 2], ""),
            "label of test has classes that train has not: 2; those of train are 0, 1. If both",
        ),
        (
            ([0, 1], "ab"),
            ([0, -1], "ab"),
            "row 1 of test (counted from 0), column label has no value (the first of 1)",
        ),
        (
            ([0, 1], ""),
            ([0, -1], ""),
            "row 1 of test (counted from 0), column label is -1; classes are numbered from 0",
        ),
        (([0, 1, None], ""), ([0, 1], ""), "row 2 of train (counted from 0), column label has no value"),
        ((["a", "", "b"], ""), (["a"], ""), "row 1 of train (counted from 0), column label has no value"),
        (
            ([0.0, 1.0], ""),
            ([0.0], ""),
            "column label has 0.0, 1.0: say classes=2 if these are classes, or classes=1",
        ),
        (
            ([0.5, float("nan")], ""),
            ([0.5], ""),
            "row 1 of train (counted from 0), column label has no value",
        ),
        (
            ([0.5, float("inf")], ""),
            ([0.5], ""),
            "row 1 of train (counted from 0), column label is inf, no finite",
        ),
    ],
)
def test_classes_that_do_not_match_are_refused(
    tmp_path: Path, train: tuple[Any, str], test: tuple[Any, str], words: str
) -> None:
    kinds = [datasets.ClassLabel(names=[*names]) if names else None for _, names in (train, test)]
    labelled(tmp_path / "d", (train[0], kinds[0]), (test[0], kinds[1]))
    with pytest.raises(DataError) as caught:
        load_dataset("hf:d", tmp_path)
    assert words in str(caught.value)
    assert str(caught.value).startswith("data set hf:d: ")


def test_numbers_with_a_point_in_one_split_are_numbers_in_both(tmp_path: Path) -> None:
    labelled(tmp_path / "d", ([1, 2], None), ([0.5, 3.0], None))
    dataset = load_dataset("hf:d", tmp_path)
    assert (dataset.likelihood, dataset.test_targets.tolist()) == ("gaussian", [[0.5], [3.0]])
    labelled(tmp_path / "e", ([True, False], None), ([False], None))
    assert load_dataset("hf:e", tmp_path).train_targets.tolist() == [1, 0]
    labelled(tmp_path / "f", ([0.0, 1.0], None), ([1.0], None))
    assert load_dataset("hf:f,classes=2", tmp_path).train_targets.tolist() == [0, 1]
    assert load_dataset("hf:f,classes=1", tmp_path).likelihood == "gaussian"


def test_classes_of_every_place_are_matched_by_name(tmp_path: Path) -> None:
    def split(names: str, labels: list[list[int]]) -> Any:
        features = datasets.Features(
            {
                "input_ids": datasets.List(datasets.Value("int64")),
                "labels": datasets.List(datasets.ClassLabel(names=[*names])),
            }
        )
        return datasets.Dataset.from_dict(
            {"input_ids": [[1, 2]] * len(labels), "labels": labels}, features=features
        )

    parts = {"train": split("abc", [[0, 1], [2]]), "test": split("cb", [[0, 1], [1]])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    dataset = load_dataset("hf:d", tmp_path)
    assert dataset.test_targets.tolist() == [[2, 1], [1, -1]]
    assert dataset.classes == 3
    datasets.DatasetDict(parts | {"test": split("cbz", [[0, 2]])}).save_to_disk(tmp_path / "e")
    with pytest.raises(
        DataError, match="column labels of test has the classes 'c', 'b', 'z'; those of train are"
    ):
        load_dataset("hf:e", tmp_path)
    rows = {"input_ids": [[1, 2]], "labels": [[0.5, 1.5]]}
    saved(tmp_path / "f", rows, rows)
    with pytest.raises(DataError, match="column labels of train has rows that are no lists of whole numbers"):
        load_dataset("hf:f", tmp_path)


# ---- columns


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (
            {"s": ["1,5", "2"]},
            "",
            "no features: s ('1,5' in row 0 of train (counted from 0) is no number). St",
        ),
        ({"s": ["1,5", "2,5"], "t": ["1", "2"]}, "", "no features: s (text, such as '1,5'); t (text, such"),
        ({"s": [[1], [2]]}, "", "no features: s (neither numbers nor names)"),
        ({"s": ["1", "?"]}, "", "no features: s ('?' in row 1 of train (counted from 0) is no number)"),
        ({"Unnamed: 0": [0, 1]}, "", "no features: Unnamed: 0 (the row numbers that pandas writes"),
        ({"s": [1.0, None]}, "", "row 1 of train (counted from 0), column s has no value (the first of 1)"),
        (
            {"s": [2**24 + 1, 3]},
            "",
            "row 0 of train (counted from 0), column s is 16777217, which float32 rounds",
        ),
        ({"who": ["ann", None]}, "client=who", "row 1 of train (counted from 0), column who has no value"),
        ({"who": ["ann", " "]}, "client=who", "row 1 of train (counted from 0), column who has no value"),
        ({"who": [1.0, None]}, "client=who", "row 1 of train (counted from 0), column who has no value"),
        ({"who": [[1], [2]]}, "client=who", "column who (client=) has values of several or other types"),
        ({"ids": [[1, 2**40], [3, 4]]}, "input=ids", "column ids: its ids reach 1099511627776"),
        ({"ids": [[1, 2], None]}, "input=ids", "row 1 of train (counted from 0), column ids has no value"),
    ],
)
def test_no_column_is_left_out_in_silence(
    tmp_path: Path, columns: dict[str, Any], options: str, words: str
) -> None:
    rows = {"x": [0.5, 1.5], "label": [0, 1], **columns}
    saved(tmp_path / "d", rows, rows)
    with pytest.raises(DataError) as caught:
        load_dataset(f"hf:d,{options}" if options else "hf:d", tmp_path)
    assert words in str(caught.value)


def test_columns_that_are_named_are_the_features(tmp_path: Path) -> None:
    rows = {"x": [0.5, 1.5], "s": ["m", "f"], "z": [1, 2], "label": [0, 1]}
    saved(tmp_path / "d", rows, rows)
    assert load_dataset("hf:d,input=z,input=x", tmp_path).train_inputs.tolist() == [[1, 0.5], [2, 1.5]]
    assert load_dataset("hf:d,input=z", tmp_path).train_inputs.tolist() == [[1], [2]]
    both = load_dataset("hf:d,category=z", tmp_path)
    assert both.features == ("x", "s=f", "s=m", "z=1", "z=2")
    assert both.train_inputs.tolist() == [[0.5, 0, 1, 1, 0], [1.5, 1, 0, 0, 1]]
    for spec in ("hf:d,label=x,label=label", "hf:d,input=x,input=x"):
        with pytest.raises(UsageError, match="is given twice"):
            load_dataset(spec, tmp_path)


def test_classes_as_features_have_the_same_names_in_both_splits(tmp_path: Path) -> None:
    for name, order in (("d", "ab"), ("e", "ba")):
        parts = {}
        for title, names in (("train", "ab"), ("test", order)):
            rows = datasets.Dataset.from_dict({"x": [0, 1], "label": [0, 1]})
            parts[title] = rows.cast_column("x", datasets.ClassLabel(names=[*names]))
        datasets.DatasetDict(parts).save_to_disk(tmp_path / name)
    assert load_dataset("hf:d", tmp_path).train_inputs.tolist() == [[0], [1]]
    with pytest.raises(
        DataError, match="column x is numbered in another way in each split: 'a', 'b' in train, 'b'"
    ):
        load_dataset("hf:e", tmp_path)


def test_a_split_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    for column in ("x", "label"):
        rows = {"x": [0.5, 1.5], "label": [0, 1]}
        saved(tmp_path / column, rows, {k: v for k, v in rows.items() if k != column} | {"other": [1, 2]})
        with pytest.raises(DataError, match=f"its test split has no column {column}"):
            load_dataset(f"hf:{column}", tmp_path)


# ---- files


def texts(folder: Path, text: str, encoding: str = "utf-8") -> None:
    folder.mkdir()
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_bytes(text.encode(encoding))


def test_texts_in_other_encodings_are_read_or_refused_by_name(tmp_path: Path) -> None:
    text = "x,label\n1,0\n2,1\n"
    texts(tmp_path / "bom", text, "utf-8-sig")
    assert load_dataset("hf:bom", tmp_path).train_inputs.tolist() == [[1], [2]]
    texts(tmp_path / "wide", text, "utf-16")
    with pytest.raises(DataError, match=r"test\.csv: this is a text in UTF-16; save it as UTF-8"):
        load_dataset("hf:wide", tmp_path)
    texts(tmp_path / "latin", text + "3,\xe9\n", "latin-1")
    with pytest.raises(
        DataError, match="latin cannot be read as a data set: UnicodeDecodeError: 'utf-8' codec"
    ):
        load_dataset("hf:latin", tmp_path)
    texts(tmp_path / "semicolons", text.replace(",", ";"))
    with pytest.raises(UsageError, match="its columns are separated by semicolons; save it with commas"):
        load_dataset("hf:semicolons", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"hf:file': .*/file is a file, not a folder"):
        load_dataset("hf:file", tmp_path)


def pictures(folder: Path, **classes: list[int]) -> None:
    """Train and test pictures of one grey each, by class."""
    from PIL import Image

    for part in ("train", "test"):
        for name, greys in classes.items():
            (folder / part / name).mkdir(parents=True)
            for i, grey in enumerate(greys):
                Image.new("L", (2, 2), grey).save(folder / part / name / f"{i}.png")


def test_a_picture_that_moves_to_another_class_is_read_anew(tmp_path: Path) -> None:
    pictures(tmp_path / "d", a=[10, 20, 30], b=[40])
    before = load_dataset("hf:d", tmp_path)
    assert before.train_targets.tolist() == [0, 0, 0, 1]
    # the same bytes in the same order
    (tmp_path / "d/train/a/2.png").rename(tmp_path / "d/train/b/-.png")
    after = load_dataset("hf:d", tmp_path)
    assert after.train_targets.tolist() == [0, 0, 1, 1]
    assert before.train_targets.tolist() == [0, 0, 0, 1]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # datasets leaves the file open
def test_pictures_of_sixteen_bits_and_a_broken_one(tmp_path: Path) -> None:
    from PIL import Image

    pictures(tmp_path / "d", a=[10], b=[20])
    for path in (tmp_path / "d").rglob("*.png"):
        Image.fromarray(np.full((2, 2), 300, np.uint16)).save(path)
    dataset = load_dataset("hf:d", tmp_path)
    assert (dataset.train_inputs.dtype, dataset.scale) == (np.float32, 65535.0)
    assert set(dataset.train_inputs.ravel().tolist()) == {300.0}
    path = tmp_path / "d/train/b/0.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(
        DataError, match=r"hf:d: the image of row 1 of train \(counted from 0\) cannot be read"
    ):
        load_dataset("hf:d", tmp_path)


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    from PIL import Image

    pictures(tmp_path / "d", a=[10], b=[20])
    for path in (tmp_path / "d").rglob("*.png"):
        image = Image.new("RGB", (4, 2))
        exif = image.getexif()
        exif[Image.ExifTags.Base.Orientation] = 6
        image.save(path, exif=exif)
    assert load_dataset("hf:d", tmp_path).train_inputs.shape == (2, 3, 4, 2)


def test_token_classes_count_every_place() -> None:
    import torch

    measure = likelihood("token_classes")
    outputs = torch.full((1, 4, 5), -9.0, dtype=torch.float64)
    targets = torch.tensor([[0, 4, 3, -1]])
    for place, predicted in enumerate([0, 4, 1, 2]):
        outputs[0, place, predicted] = 9.0
    numbers = measure.numbers(measure.tally(outputs, targets))
    assert numbers["test_accuracy"] == pytest.approx(2 / 3)
