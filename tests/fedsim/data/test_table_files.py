"""Tables in one file: what is read, what is refused, and how names are numbered."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedsim
from fedsim import plugins
from fedsim.data.datasets import Dataset, load_dataset
from fedsim.errors import DataError, FedsimError, UsageError
from launch.configuration.config import absolute_paths
from workers.worker.local_files import LocalFiles

CSV = "a,b,kind,site\n" + "".join(f"{i},{i / 4},{['cat', 'bee', 'ape'][i % 3]},s{i % 2}\n" for i in range(30))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def load(text: str, options: str = "label=y", name: str = "t.csv", **files: str) -> Dataset:
    for file, content in {name: text, **{f"{k}.csv": v for k, v in files.items()}}.items():
        Path(file).write_text(content)
    return load_dataset(f"{name},{options}")


def column(*values: Any, name: str = "y") -> str:
    """A table of a feature, from 0, and this column."""
    return f"x,{name}\n" + "".join(f"{i},{value}\n" for i, value in enumerate(values))


def refused(text: str, options: str = "label=y", error: type[FedsimError] = DataError, **files: str) -> str:
    with pytest.raises(error) as caught:
        load(text, options, **files)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is read


@pytest.mark.parametrize("form", ["csv", "csv.gz", "tsv", "CSV", "TSV", "PARQUET", "bom.csv", "crlf.csv"])
def test_the_same_table_in_every_form(form: str) -> None:
    path, frame = Path(f"t.{form}"), pd.read_csv(__import__("io").StringIO(CSV))
    if form == "PARQUET":
        frame.to_parquet(path)
    elif form == "csv.gz":
        path.write_bytes(gzip.compress(CSV.encode()))
    else:
        text = {
            "tsv": CSV.replace(",", "\t"),
            "TSV": CSV.replace(",", "\t"),
            "bom.csv": "\ufeff" + CSV,
            "crlf.csv": CSV.replace("\n", "\r\n"),
        }
        path.write_bytes(text.get(form, CSV).encode())
    dataset = load_dataset(f"t.{form},label=kind,client=site")
    test = np.array([i % 15 in (12, 13, 14) for i in range(30)])  # each fifth row of each class
    features = np.stack([np.arange(30), np.arange(30) / 4], axis=1).astype(np.float32)
    np.testing.assert_array_equal(dataset.train_inputs, features[~test])
    np.testing.assert_array_equal(dataset.test_inputs, features[test])
    classes = np.array([2, 1, 0])[np.arange(30) % 3]  # ape, bee, cat
    np.testing.assert_array_equal(dataset.train_targets, classes[~test])
    np.testing.assert_array_equal(dataset.test_targets, classes[test])
    np.testing.assert_array_equal(dataset.centres, (np.arange(30) % 2)[~test])
    assert (dataset.classes, dataset.scale, dataset.likelihood) == (3, 1.0, "categorical")


def test_columns_that_are_named_are_the_inputs() -> None:
    assert load(CSV, "label=kind,input=b").train_inputs.shape == (24, 1)
    both = load(CSV, "label=kind,input=b,input=a").train_inputs
    np.testing.assert_array_equal(both[:, 0] * 4, both[:, 1])


def test_a_file_of_test_rows_lies_beside_the_other() -> None:
    folder = Path("data")
    folder.mkdir()
    (folder / "t.csv").write_text(column("b", "a", "b"))
    (folder / "test.csv").write_text("y,more,x\na,9,7\nb,9,8\n")
    dataset = load_dataset("t.csv,label=y,test=test.csv", folder)
    assert dataset.train_targets.tolist() == [1, 0, 1]
    assert dataset.test_targets.tolist() == [0, 1]
    assert dataset.test_inputs.tolist() == [[7], [8]]


def test_the_working_directory_comes_before_the_data_folder() -> None:
    folder = Path("data")
    folder.mkdir()
    (folder / "t.csv").write_text(column(*"ab" * 5))
    assert load_dataset("t.csv,label=y", folder).classes == 2
    assert load(column(*"abc" * 5)).classes == 3
    assert load_dataset("t.csv,label=y", folder).classes == 3


def test_numbers_to_predict_are_no_classes() -> None:
    dataset = load(column(*(i / 8 for i in range(10))), "label=y,classes=1")
    assert (dataset.likelihood, dataset.classes) == ("gaussian", 1)
    assert dataset.test_targets.tolist() == [[0.5], [1.125]]  # every fifth row
    mixed = load(column(*range(10)), "label=y,classes=1,test=u.csv", u=column(0.5, 1))
    assert mixed.test_targets.tolist() == [[0.5], [1.0]]


@pytest.mark.parametrize(
    ("values", "numbered", "count"),
    [
        *((["True", "False"], [1, 0], 2), ([0, 2], [0, 1], 2), ([10, 9, 900], [1, 0, 2], 3)),
        *((["01", "1"], [0, 1], 2), (["1E5", "100000"], [1, 0], 2), ([1, -1], [1, 0], 2)),
        *((["no", "No"], [1, 0], 2), (["None", "NA"], [1, 0], 2), (["10", "9", "b"], [0, 1, 2], 3)),
    ],
)
def test_classes_are_the_names_in_the_file(values: list[Any], numbered: list[int], count: int) -> None:
    dataset = load(column(*values * 5), f"label=y,classes={count}")
    assert dataset.train_targets[: len(values)].tolist() == numbered
    assert dataset.classes == count


# ---- what is refused

OTHERS = (
    *("1,234,567", "1.234,50", "1,5", "5%", "$5", "EUR 5", "2020-01-31", "Jan 5", "0x10", "1_000"),
    *("01234", "00", "-07"),
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x,y\n1,0\n\n2,1\n,0\n,1\n", "--dataset t.csv: line 5 of t.csv, column x has no value (the"),
        ('x,z,y\n1,"a\nb",0\n2,c,1\n3,d,\n', "line 5 of t.csv, column y has no value (the first of 1)"),
        ("x,y\n1,0\n2,1\n-inf,0\n", "line 4 of t.csv, column x is -inf, which float32 does not hold"),
        ("x,y\n1,0\n16777217,1\n", "line 3 of t.csv, column x is 16777217, which float32 does not hold;"),
        ("y,x\r\n0,1\r\n1,01\r\n", "line 3 of t.csv, column x is '01', no plain number"),
        ("x,y\n1,0\n?,1\n3,0\n", "line 3 of t.csv, column x is '?', no plain number such as 1234.5 (the"),
        *(
            (f'x,y\n"{n}",0\n"{n}",1\n', f"line 2 of t.csv, column x is {n!r}, no plain number")
            for n in OTHERS
        ),
        ("x,s,t,y\n" + "".join(f"1,m{i},{i},0\n" for i in range(9)), "column s is text of 9 values in 9"),
        (",x,y\n0,1,0\n1,2,1\n", "a column has no name (pandas writes row numbers so, without"),
        ("x,y,\n1,0,\n2,1,\n", "its first line ends with ',', and no name follows; remove it from all lines"),
        ("x,y\n1,0,\n2,1,\n", "line 2 has 3 cells, and the first line 2 names"),
        ("x,y\n1,0\n2,1,3\n", "cannot be read: Error tokenizing data. C error: Expected 2 fields in"),
        ("x,x,y\n1,2,0\n", "its first line has the name 'x' twice"),
        ("1,2.5,-3\n1,2,0\n", "its first line must have the names of the columns"),
        ("x;y\n1;0\n", "its columns are separated by semicolons; save it with commas between them"),
        (column("cat", "cat ", "dog"), "column y has 'cat' with and without spaces"),
        (column(*[0.5, 1.0] * 4), "column y has 2 values in 8 rows, such as '1.0': say classes=1 if"),
        (column("a", "b", "a"), "no class has as many; name a file of test rows: test=FILE"),
    ],
)
def test_what_a_table_must_not_have(text: str, words: str) -> None:
    assert words in refused(text)


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        ("cat dog", "dog cow", "line 3 of u.csv, column y is 'cow', which t.csv has not: 'cat', 'dog'"),
        ("cat dog", "Cat dog", "line 2 of u.csv, column y is 'Cat', which t.csv has not: 'cat', 'dog'"),
        ("1 2", "0 1", "column y is '0', which t.csv has not: '1', '2'"),
        ("1 2", "1.0 2.0", "column y is '1.0', which t.csv has not"),
        ("0 1", "0 ", "line 3 of u.csv, column y has no value"),
    ],
)
def test_both_files_mean_the_same_classes(train: str, test: str, words: str) -> None:
    text, other = (column(*part.split(" ")) for part in (train, test))
    assert words in refused(text, "label=y,test=u.csv", u=other)


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        ("m f", "f x", "line 3 of u.csv, column s is 'x', which t.csv has not: 'f', 'm'"),
        ("m f", "1 2", "line 2 of t.csv, column s is 'm', no plain number"),
        ("1 2", "m f", "line 2 of u.csv, column s is 'm', no plain number"),
        ("m m_", "m m", "column s has 'm' with and without spaces"),
        ("m ", "f m", "line 3 of t.csv, column s has no value (the first of 1); missing=drop leaves such"),
    ],
)
def test_categories_that_do_not_fit(train: str, test: str, words: str) -> None:
    text, other = (
        "x,s,y\n" + "".join(f"{i},{v.replace('_', ' ')},{i}\n" for i, v in enumerate(part.split(" ")))
        for part in (train, test)
    )
    assert words in refused(text, "label=y,test=u.csv", u=other)


SEX = "age,sex,code,y\n" + "".join(f"{20 + i},{'mfm'[i % 3]},{i % 2 + 9},{i % 2}\n" for i in range(14))


@pytest.mark.parametrize(
    ("options", "names", "first"),
    [("", ("age", "sex=f", "sex=m", "code"), [20, 0, 1, 9]), (",input=sex", ("sex=f", "sex=m"), [0, 1])],
)
def test_text_of_few_values_is_a_feature_for_each(
    options: str, names: tuple[str, ...], first: list[int]
) -> None:
    dataset = load(SEX, f"label=y{options}")
    assert dataset.features == names
    assert dataset.train_inputs[0].tolist() == first
    assert load_dataset(f"t.csv,label=y{options}").features == names  # from the cache
    assert load(SEX.replace("f", "T2a").replace("m", "stage4")).features[1:3] == ("sex=T2a", "sex=stage4")


def test_rows_without_a_value_are_left_out_on_request() -> None:
    text = SEX.replace("21,f,10,1", "?,f,10,1").replace("22,m", "22,").replace("9,0", "9,NA", 1)
    assert "line 3 of t.csv, column age is '?', no plain number" in refused(
        text.replace("NA", "0"), "label=y,input=age"
    )
    assert "line 2 of t.csv, column y has no value" in refused(text, "label=y,na=?,na=NA")
    dataset = load(text, "label=y,na=?,na=NA,missing=drop")
    assert dataset.dropped == 3
    assert dataset.train_inputs[:, 0].tolist() == [23, 24, 25, 26, 27, 28, 29, 30, 33]
    part = load(text, "label=y,input=code,na=NA,missing=drop")  # a column that is not used may lack values
    assert part.dropped == 1
    assert load(SEX.replace(",m,", ",,", 1), "label=y,input=age,client=sex,missing=drop").dropped == 1
    wide = SEX.replace("20,", ",").replace("24,", "1e39,")
    assert "line 6 of t.csv, column age is 1e+39" in refused(wide, "label=y,missing=drop")
    assert "every row of a file lacks a value" in refused("x,y\n,1\n2,\n", "label=y,missing=drop")


def test_how_many_classes_there_are_may_be_said() -> None:
    assert load(column(*[0.0, 1.0] * 5), "label=y,classes=2").likelihood == "categorical"
    assert "classes=2, but it has 3: '0', '1', '2'" in refused(column(0, 1, 2), "label=y,classes=2")
    assert "column y is 'a', which is no number" in refused(column("a", "b"), "label=y,classes=1")


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (["s", "", "t", ""], "line 3 of t.csv, column c has no value (the first of 2)"),
        (["s", "  ", "t"], "line 3 of t.csv, column c has no value"),
        (["s", "s ", "t"] * 4, "column c has 's' with and without spaces"),
        ([1, "", 2], "line 3 of t.csv, column c has no value"),
    ],
)
def test_every_row_has_a_client(clients: list[Any], words: str) -> None:
    lines = [f"{i},{i % 2},{client}" for i, client in enumerate(clients)]
    assert words in refused("\n".join(["x,y,c", *lines, ""]), "label=y,client=c")


def clients(train: str, test: str) -> tuple[str, dict[str, str]]:
    """Tables of the same rows, and clients in them."""
    one, other = (
        "x,y,c\n" + "".join(f"{i},{i % 2},{client}\n" for i, client in enumerate(part.split(" ")))
        for part in (train, test)
    )
    return one, {"u": other}


@pytest.mark.parametrize(
    ("train", "test", "trained", "tested"),
    [
        ("1 2 3 2", "1 2 3 B1", [0, 1, 2, 1], [0, 1, 2, -1]),
        ("01 1 02 2", "1 01 2", [0, 1, 2, 3], [1, 0, 3]),
        ("1E5 100000", "1E5", [1, 0], [1]),
        ("10 9 900", "900 7", [1, 0, 2], [2, -1]),
    ],
)
def test_clients_are_the_names_in_the_file(
    train: str, test: str, trained: list[int], tested: list[int]
) -> None:
    text, other = clients(train, test)
    dataset = load(text, "label=y,client=c,test=u.csv", **other)
    assert dataset.centres is not None and dataset.centres.tolist() == trained
    assert dataset.test_centres is not None and dataset.test_centres.tolist() == tested


@pytest.mark.parametrize(
    ("train", "test"),
    [("1 2", "1.0 2.0"), ("1 2", "01 02"), ("ulm bonn", "ulm_ bonn"), ("1E5 7", "100000 7")],
)
def test_clients_have_one_spelling_in_both_files(train: str, test: str) -> None:
    text, other = clients(train, test.replace("_", "\u00a0"))
    words = refused(text, "label=y,client=c,test=u.csv", **other)
    assert "column c has" in words and "u.csv; write them alike" in words


def test_test_rows_without_a_column_of_clients_belong_to_none() -> None:
    text, _ = clients("a b", "")
    dataset = load(text, "label=y,client=c,test=u.csv", u=column(0, 1))
    assert dataset.test_centres is not None and dataset.test_centres.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": pd.array([1, None, 3], "Int64")}, "row 1 of t.parquet (counted from 0), column x has no"),
        ({"x": pd.to_datetime(["2020-01-01"] * 3)}, "row 0 of t.parquet (counted from 0), column x is"),
        ({"x": ["1", "2", "3"]}, "row 0 of t.parquet (counted from 0), column x is '1', no plain number"),
        ({"x": [[1], [2], [3]]}, "column x is array([1]), no plain number"),
        ({"x": [None, None, None]}, "row 0 of t.parquet (counted from 0), column x has no value"),
    ],
)
def test_kinds_of_columns_that_only_parquet_has(columns: Mapping[str, Any], words: str) -> None:
    pd.DataFrame({"y": ["a", "b", "a"], "c": [1, 2, 3], **columns}).to_parquet("t.parquet")
    with pytest.raises(DataError) as caught:
        load_dataset("t.parquet,label=y,client=c")
    assert words in str(caught.value)


def test_nullable_columns_and_categories_without_missing_values_are_read() -> None:
    frame = {"x": pd.array([1, 2, 3] * 5, "Int64"), "z": pd.array([True, False, True] * 5, "boolean")}
    frame |= {
        "y": pd.Categorical(["b", "c", "b"] * 5, categories=["c", "b", "a"]),
        "c": pd.Categorical([7, 8, 9] * 5),
    }
    pd.DataFrame(frame).to_parquet("t.parquet")
    dataset = load_dataset("t.parquet,label=y,client=c")
    assert dataset.train_inputs[:2].tolist() == [[1, 1], [2, 0]]
    assert dataset.train_targets[:2].tolist() == [0, 1]
    assert dataset.classes == 2
    assert dataset.centres is not None and dataset.centres[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("none.csv,label=y", DataError, "none.csv does not exist; relative files lie in the working"),
        ("d.csv,label=y", DataError, "d.csv is a folder, not a file"),
        ("t.csv", UsageError, "unknown column of t.csv (label=): 'label' (known: kind, x)"),
        ("t.csv,label=kinds", UsageError, "unknown column of t.csv (label=): 'kinds'; did you mean 'kind'"),
        ("t.csv,label=kind,input=z", UsageError, "unknown column of t.csv (input=): 'z'"),
        ("t.csv,label=kind,label=x", UsageError, "label is given twice; give it once"),
        ("t.csv,labl=kind", UsageError, "unknown key of data set 't.csv,labl=kind': 'labl'; did you"),
        ("t.csv,label=kind,classes=x", UsageError, "write FILE.csv,label=COLUMN"),
        ("t.csv,label=kind,input=kind", UsageError, "features are columns beside the label and the client"),
        ("t.csv,label=kind,category=x", UsageError, "category= left in 0.2: a column of text with few"),
        ("text.parquet,label=y,na=x", UsageError, "na= is for csv and tsv files"),
        ("text.npz,label=y", UsageError, ".npz left in 0.2: write FILE.py:NAME that reads it"),
        ("text.csv.gz,label=y", DataError, "text.csv.gz cannot be read: Not a gzipped file"),
    ],
)
def test_what_is_wrong_with_a_spec_is_said(spec: str, error: type[FedsimError], words: str) -> None:
    Path("d.csv").mkdir()
    Path("t.csv").write_text(column(*"abc" * 5, name="kind"))
    for name in ("text.parquet", "text.csv.gz"):
        Path(name).write_text("no such thing")
    with pytest.raises(error) as caught:
        load_dataset(spec)
    assert words in str(caught.value)


def test_the_unknown_data_set_is_told_how_its_own_are_written() -> None:
    with pytest.raises(UsageError, match=r"yours: FILE.csv,label=COLUMN or FILE.py:NAME"):
        load_dataset("my.csvx")


# ---- in a run


def test_a_run_names_the_file_by_its_path_and_shows_its_name() -> None:
    Path("t.csv").write_text(CSV)
    values = absolute_paths({"dataset": "t.csv,label=kind,client=site"})
    assert values["dataset"] == f"{Path.cwd()}/t.csv,label=kind,client=site"
    assert absolute_paths({"dataset": "elsewhere.csv,label=y"})["dataset"] == "elsewhere.csv,label=y"
    assert plugins.short(values["dataset"]) == "t.csv,label=kind,client=site"
    experiment = values | {"algo": "fedavg", "codecs": {}}
    assert LocalFiles().localised(experiment)["dataset"] == values["dataset"]
    moved = LocalFiles(choices={"dataset": Path("other/t.csv")}).localised(experiment)
    assert moved["dataset"] == f"{Path.cwd()}/other/t.csv,label=kind,client=site"


def test_a_run_of_a_table_has_the_same_bits_with_and_without_workers() -> None:
    Path("t.csv").write_text(CSV)
    options: dict[str, Any] = {
        "algo": "fedavg",
        "model": "logistic_bias",
        "rounds": 2,
        "clients": 2,
        "quiet": True,
    }
    options |= {"dataset": "t.csv,label=kind,client=site", "partition": "natural"}
    one, other = (fedsim.run(**options, workers=workers) for workers in (0, 1))
    assert one.summary["model_sha256"] == other.summary["model_sha256"]
    assert one.manifest["experiment"]["client_sizes"] == [12, 12]
    again = fedsim.run(**options, seed=5)
    assert again.manifest["experiment"]["data"] == one.manifest["experiment"]["data"]
