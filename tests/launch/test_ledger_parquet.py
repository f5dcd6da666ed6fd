"""fedsim ledger --parquet: the rows of ledger.csv with their types."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas
import pyarrow
import pytest

from launch.results import ledger as ledger_module
from launch.results.ledger import LARGE
from launch.runs.tables import TEXT
from tests.support.kept_runs import command, flip, kept_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    codecs = {"up.precision": "best:0.1", "up.mean": "delta+zstd"}
    return kept_run(tmp_path / "run", algo="fedlap_cov", codecs=codecs)


@pytest.mark.parametrize("batch", [1 << 16, 7])
def test_the_file_has_the_rows_of_the_ledger_in_their_order(
    batch: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    monkeypatch.setattr(ledger_module, "BATCH", batch)
    output = command("ledger", run, "--parquet")
    assert output.code == 0 and output.out == f"all ledger rows in {run / 'ledger.parquet'}\n"
    table = parquet.read_table(run / "ledger.parquet")
    for field in table.schema:
        if field.name in TEXT:
            assert pyarrow.types.is_dictionary(field.type)
        else:
            assert field.type == (pyarrow.int64() if field.name in LARGE else pyarrow.int32())
    csv = pandas.read_csv(run / "ledger.csv", keep_default_na=False)
    assert table.column_names == list(csv.columns) and table.num_rows == len(csv) > 7
    assert table.to_pylist() == csv.to_dict("records")


def test_a_run_that_goes_on_gives_its_whole_rows(run: Path) -> None:
    from pyarrow import parquet

    (run / "summary.json").unlink()
    rows = (run / "ledger.csv").read_text().count("\n") - 1
    with (run / "ledger.csv").open("a") as growing:
        growing.write("algorithm,3,1")
    assert command("ledger", run, "--parquet").code == 0
    assert parquet.read_metadata(run / "ledger.parquet").num_rows == rows


def test_a_table_and_json_go_with_it(run: Path) -> None:
    assert "by kind" in command("ledger", run, "--parquet", "--by", "kind").out
    (run / "ledger.parquet").unlink()
    assert command("ledger", run, "--parquet", "--json").out == command("ledger", run, "--json").out
    assert (run / "ledger.parquet").is_file()


def test_a_changed_ledger_is_refused_and_nothing_is_written(run: Path) -> None:
    flip(run / "ledger.csv")
    output = command("ledger", run, "--parquet")
    assert output.code == 2 and f"{run / 'ledger.csv'} was changed" in output.err
    assert not [path for path in run.iterdir() if "parquet" in path.name]


def test_without_pyarrow_the_message_names_the_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    output = command("ledger", run, "--parquet")
    assert output.code == 2 and "pip install 'fedsim-wire[parquet]'" in output.err
    assert len(output.err.splitlines()) == 1
