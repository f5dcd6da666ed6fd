"""A user's own split: rows of clients in a file or a mapping, and the least number of rows of a client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsim
from fedsim import plugins
from fedsim.data import partition
from fedsim.errors import DataError, FedsimError, UsageError
from fedsim.partition_specs import PartitionSpec, absolute, fingerprint
from launch.configuration.config import absolute_paths
from workers.worker.local_files import LocalFiles

TARGETS = np.arange(60) % 3
CENTRES = np.repeat(np.arange(4), [30, 5, 20, 5])


def divided(spec: str, clients: int, **changes: Any) -> tuple[np.ndarray, ...]:
    values = {"targets": TARGETS, "classes": 3, "clients": clients, "seed": 0, "centres": CENTRES}
    return partition(spec, **values | changes)


def lists(split: tuple[np.ndarray, ...]) -> list[list[int]]:
    assert all(rows.dtype == np.int64 for rows in split)
    return [rows.tolist() for rows in split]


def test_rows_of_clients_are_read_from_json_and_npz(tmp_path: Path) -> None:
    numbered = {str(k): [59 - k, k] for k in range(11)}  # 10 is behind 9
    (tmp_path / "a+b.json").write_text(json.dumps(dict(sorted(numbered.items()))))
    assert lists(divided(f"rows:{tmp_path / 'a+b.json'}", 11)) == [[59 - k, k] for k in range(11)]
    np.savez(tmp_path / "c.npz", **{"ward 2": np.uint8([7, 1]), "ward 1": np.array([4])})  # type: ignore[arg-type]
    assert lists(divided(f"rows:{tmp_path / 'c.npz'}", 2)) == [[4], [7, 1]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"0": [1], "2": [3]}',
            "has no client 1: its clients are whole numbers up to 2, so they must be 0 to 1",
        ),
        ('{"a": [1, 2], "b": [2]}', "row 2 has two clients, a and b; only a function (FILE.py:NAME)"),
        ('{"a": [1, 1], "b": [2]}', "client a has a row twice: 1"),
        ('{"a": [1, 60], "b": [2]}', "client a has rows outside 0 .. 59, such as 60"),
        ('{"a": [1.0], "b": [2]}', "client a needs at least one row, as a row of whole numbers"),
        ('{"a": [], "b": [2]}', "client a needs at least one row, as a row of whole numbers"),
        ('{"a": [[1], [2, 3]], "b": [2]}', "client a needs its rows as one list of whole numbers"),
        ('{"a": [1], "a": [2]}', "client a is given twice"),
        ('{"a": [1],', "cannot be read: Expecting property name"),
        ("[[1], [2]]", 'must have clients and their rows: {"0": [0, 5, 7]'),
        ("{}", "has no clients"),
        ("\ufeff" + '{"a": [1], "b": [2], "c": [3]}', "of 3 clients, and --clients is 2: write --clients 3"),
    ],
)
def test_what_a_file_of_rows_must_not_have(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(FedsimError) as caught:
        divided(f"rows:{tmp_path / 'r.json'}", 2)
    assert str(caught.value).startswith("--partition rows:r.json") and words in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("rows:none.json", DataError, "none.json does not exist"),
        ("rows:r.txt", UsageError, "rows are read from FILE.json or FILE.npz"),
        ("rows:r.npz", DataError, "is no file that numpy.savez wrote"),
        ("rows:", UsageError, "write rows:FILE"),
        ("iid+nosie:0.2", UsageError, "behind a + stands least:N, once"),
        ("iid+least", UsageError, "from 1 on, not ''"),
        (
            "iid+noise:0.1",
            UsageError,
            "+noise left in 0.2: wrong labels are a data set of your own",
        ),
        ("iid+least:31", DataError, "2 clients with 31 rows each need more than the 60 training examples"),
        (
            "rows:few.json+least:2",
            DataError,
            "leaves client 1 of 2 (counted from 0) with 1 of at least 2 rows",
        ),
        ("dirichlet:0.001+least:29", DataError, "of at least 29 rows, in the last of 100 draws; use fewer"),
        (
            "natural+least:25",
            UsageError,
            "1 of 4 centres have at least 25 rows, so there are at most 1 clients",
        ),
    ],
)
def test_partitions_that_are_refused(
    spec: str, error: type[FedsimError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("r.txt", "r.npz"):
        Path(name).write_text("x")
    Path("few.json").write_text('{"a": [1, 2], "b": [3]}')
    with pytest.raises(error) as caught:
        divided(absolute(spec), 2)
    assert words in str(caught.value)


def test_natural_clients_with_too_few_rows_are_left_out() -> None:
    assert lists(divided("natural+least:6", 2)) == [list(range(30)), list(range(35, 55))]
    assert lists(divided("natural+least:5", 4)) == lists(divided("natural", 4))
    half = divided("natural+least:10", 2, fraction=0.5)
    assert [len(rows) for rows in half] == [15, 10]


def test_a_split_is_drawn_again_until_clients_have_enough_rows() -> None:
    first = divided("dirichlet:0.5", 4)
    least = min(map(len, first))
    assert lists(divided(f"dirichlet:0.5+least:{least}", 4)) == lists(first)
    again = divided(f"dirichlet:0.5+least:{least + 3}", 4)
    assert min(map(len, again)) >= least + 3
    assert np.array_equal(np.sort(np.concatenate(again)), np.arange(60))


def test_a_partition_is_known_by_its_files_content_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "there"):
        Path(folder).mkdir()
        np.savez(f"{folder}/r.npz", a=np.array([1, 2]))
    named = absolute_paths({"partition": "rows:here/r.npz+least:2"})["partition"]
    assert named == f"rows:{tmp_path / 'here/r.npz'}+least:2"
    assert PartitionSpec.parse(named) == PartitionSpec(f"rows:{tmp_path / 'here/r.npz'}", 2)
    assert plugins.short(named) == "rows:r.npz+least:2"
    choices = {"algo": "fedavg", "model": "", "dataset": "digits", "partition": named}
    moved = LocalFiles(choices={"partition": Path("there/r.npz")}).localised(choices)["partition"]
    assert moved == f"rows:{tmp_path / 'there/r.npz'}+least:2"
    assert fingerprint(moved) == fingerprint(named) and fingerprint(named).endswith("+least:2")
    assert LocalFiles().localised(choices)["partition"] == named
    Path("here/r.npz").unlink()
    with pytest.raises(UsageError, match=r"say where a copy of the run's --partition lies here"):
        LocalFiles().localised(choices)


def test_python_takes_a_mapping_and_a_file_leaves_its_digest(tmp_path: Path) -> None:
    rows = {"b": np.arange(50), "a": list(range(50, 70))}
    np.savez(tmp_path / "r.npz", **rows)  # type: ignore[arg-type]
    common: dict[str, Any] = {"algo": "fedavg", "model": "logistic", "clients": 2, "rounds": 1, "quiet": True}
    runs = [
        fedsim.run(**common, partition=choice, out=tmp_path / f"run{i}")  # type: ignore[arg-type]
        for i, choice in enumerate((rows, f"rows:{tmp_path / 'r.npz'}"))
    ]
    described = [run.manifest["experiment"] for run in runs]
    assert [e["client_sizes"] for e in described] == [[20, 50]] * 2
    assert described[0]["data"] == described[1]["data"]
    assert list(described[1]["sources"]) == [str(tmp_path / "r.npz")]
    for wrong in ({0: [1], "0": [2]}, {"a": np.ma.masked_array([1, 2], [0, 1]), "b": [3]}):
        with pytest.raises(UsageError, match=r"has a client twice|client a has masked rows"):
            fedsim.run(**common, partition=wrong)  # type: ignore[arg-type]
