"""fedsim ledger --parquet: the ledger with typed columns, for DuckDB, polars and others."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from fedsim.extras import needed
from fedsim.wire.ledger_rows import COLUMNS, TREE_COLUMNS
from launch.runs.folder import RunFolder
from launch.terminal import output_file
from workers.storage.growing_file import LEDGER

NAME = "ledger.parquet"
TEXTS = ("kind", "direction", "message", "field", "layer", "codec", "hop")
"""Columns of few different texts: stored as a dictionary and indices."""
LARGE = ("dense_bytes", "bytes")
"""Columns of 64 bits; the other numbers have 32."""
BATCH = 1 << 16
"""Rows that are held at once, and of a row group."""


def write_parquet(run: RunFolder) -> Path:
    """Write RUN/ledger.parquet, a batch of rows at a time; returns its path. The run may be running.

    Raises:
        UsageError: if the run has no ledger, or pyarrow is not installed.
        DataError: if the ledger is damaged or was changed.
        DiskError: if the disk cannot be read or written.
    """
    arrow, parquet = (needed(name, "--parquet", "parquet") for name in ("pyarrow", "pyarrow.parquet"))
    run.check_files(LEDGER)
    names = COLUMNS if run.experiment.get("tree", "") == "" else TREE_COLUMNS
    schema = arrow.schema([(name, _type(arrow, name)) for name in names])
    path = run.path / NAME
    with output_file(path) as file, parquet.ParquetWriter(file, schema) as writer:
        entries = run.ledger_rows()
        while rows := list(islice(entries, BATCH)):  # itertools.batched is of Python 3.12
            values = list(zip(*rows, strict=True))[: len(names)]
            columns = zip(schema.types, values, strict=True)
            writer.write_table(
                arrow.table([arrow.array(column, kind) for kind, column in columns], schema=schema)
            )
    return path


def _type(arrow: Any, name: str) -> Any:
    if name in TEXTS:
        return arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.int64() if name in LARGE else arrow.int32()
