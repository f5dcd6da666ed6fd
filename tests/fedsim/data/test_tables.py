"""The tables with all the quirks that published numbers depend on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedsim.data import load_dataset
from fedsim.data.readers.credit import read_credit
from fedsim.errors import DataError


def test_credit_quirks_on_a_small_file(tmp_path: Path) -> None:
    # 1 lost row, 20 complete rows, 1 with a missing value; A4 has three values, the rest two.
    row = "{a},{age},1.5,{u},g,c,v,1.25,t,f,01,f,g,00202,{money},{label}"
    lines = [row.format(a="z", age=1, u="l", money=0, label="+")]
    for i in range(20):
        lines.append(
            row.format(a="ab"[i % 2], age=f"{20 + i}.5", u="uyz"[i % 3], money=i, label="+-"[i // 5 % 2])
        )
    lines.insert(5, row.format(a="?", age=99, u="q", money=0, label="+"))
    path = tmp_path / "UCICredit/crx.data"
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"have shape \(17,\) each, not \(42,\)"):
        load_dataset("uci_credit", tmp_path)
    arrays = read_credit(path)
    inputs = np.concatenate([arrays["train_inputs"], arrays["test_inputs"]])
    targets = np.concatenate([arrays["train_targets"], arrays["test_targets"]])
    assert inputs.shape == (20, 17) and inputs.dtype == np.float32
    assert len(arrays["test_targets"]) == 4 and arrays["test_targets"].sum() == 2
    rows = inputs[:, -1].astype(int)  # A15 numbers the rows
    np.testing.assert_array_equal(np.sort(rows), np.arange(20))
    np.testing.assert_array_equal(inputs[:, 0], rows % 2)  # binary A1: one column, 1 = "b"
    for value in range(3):  # A4: three columns in alphabetical order
        np.testing.assert_array_equal(inputs[:, 1 + value], rows % 3 == value)
    np.testing.assert_array_equal(inputs[:, -6], 20.5 + rows)  # raw A2
    np.testing.assert_array_equal(targets, 1 - rows // 5 % 2)  # 1 = "+"


def test_malformed_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "UCICredit/crx.data"
    path.parent.mkdir()
    path.write_text("b,1,2\n")
    with pytest.raises(DataError, match=r"crx.data: row 1 is not 15 attributes"):
        load_dataset("uci_credit", tmp_path)
    folder = tmp_path / "HeartDisease"
    folder.mkdir()
    for centre in ("cleveland", "hungarian", "switzerland", "va"):
        (folder / f"processed.{centre}.data").write_text("1,2,3\n")
    with pytest.raises(DataError, match=r"cleveland.data: a row does not have 14 fields"):
        load_dataset("flamby_heart", tmp_path)
    (folder / "processed.cleveland.data").write_text(",".join(["1"] * 13 + ["yes"]) + "\n")
    with pytest.raises(DataError, match="neither a number"):
        load_dataset("flamby_heart", tmp_path)


def test_real_credit_matches_the_release(real_data: Callable[[str], Path]) -> None:
    folder = real_data("uci_credit")
    dataset = load_dataset("uci_credit", folder)
    assert len(dataset.train_targets) == 521 and len(dataset.test_targets) == 131
    assert dataset.scale == 1 and dataset.train_inputs.dtype == np.float32
    assert int(dataset.train_targets.sum()) == 236
    # scikit-learn's own encoder and splitter, as the release calls them.
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import OneHotEncoder

    lines = (folder / "UCICredit/crx.data").read_text().splitlines()[1:]
    table = np.array([line.split(",") for line in lines if line and "?" not in line], object)
    onehot = OneHotEncoder(drop="if_binary").fit_transform(table[:, [0, 3, 4, 5, 6, 8, 9, 11, 12]])
    numeric = table[:, [1, 2, 7, 10, 13, 14]].astype(np.float32)
    inputs = np.concatenate([onehot.toarray().astype(np.float32), numeric], axis=1)
    targets = (table[:, 15] == "+").astype(np.int64)
    train, test = train_test_split(inputs, test_size=0.2, random_state=1, stratify=targets)
    np.testing.assert_array_equal(dataset.train_inputs, train)
    np.testing.assert_array_equal(dataset.test_inputs, test)


def test_real_heart_matches_flamby(real_data: Callable[[str], Path]) -> None:
    dataset = load_dataset("flamby_heart", real_data("flamby_heart"))
    assert dataset.train_inputs.shape == (486, 13) and dataset.test_inputs.shape == (254, 13)
    assert dataset.centres is not None
    assert np.bincount(dataset.centres).tolist() == [199, 172, 30, 85]
    assert (np.diff(dataset.centres) >= 0).all()
    inputs = dataset.train_inputs
    assert inputs[:, 0].min() >= 28 and inputs[:, 0].max() <= 77  # age, not standardised
    assert set(np.unique(inputs[:, 8:])) == {0.0, 1.0}
    assert (inputs[:, 8:11].sum(axis=1) <= 1).all() and (inputs[:, 11:].sum(axis=1) <= 1).all()
