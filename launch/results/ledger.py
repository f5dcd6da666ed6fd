"""fedsim ledger: tables of bytes, a plain export, and typed rows as Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedsim import plugins
from fedsim.errors import UsageError
from fedsim.extras import needed
from fedsim.wire.ledger_rows import COLUMNS, TREE_COLUMNS
from launch import terminal
from launch.numbers import optional
from launch.runs.folder import RunFolder
from launch.runs.tables import TEXT, sides
from launch.table import Table
from launch.terminal import output_file, print_json
from workers.storage.growing_file import LEDGER

if TYPE_CHECKING:
    import pandas

SIDES = ("down", "up")
SHOWN = 12
"""The maximum number of lines of a table; longer tables are cut in the middle."""


def print_ledger(
    folder: Path,
    *,
    by: str = "",
    everything: bool = False,
    cumulative: bool = False,
    export: Path | None = None,
    parquet: bool = False,
    as_json: bool = False,
) -> None:
    """Print the tables. With `export` or `parquet`, write files, and print only the table that `by` names."""
    run = RunFolder.open(folder)
    console = terminal.console()
    if parquet:
        path = write_parquet(run)
        if not as_json:
            console.print(f"all ledger rows in {path}", soft_wrap=True)
            if export is None and not by:
                return None
    rows = run.ledger
    own = rows if everything else rows[rows.kind == "algorithm"]
    if as_json:
        if export is not None:
            _export(own, export)
        return print_json(to_json(run, by=by, everything=everything, cumulative=cumulative))
    experiment = run.experiment
    if export is not None:
        _export(own, export)
        console.print(f"{len(own):,} ledger rows summed up in {export}", soft_wrap=True)
        if not by:
            return None
    dataset, clients = plugins.short(experiment["dataset"]), experiment["clients"]
    what = f"{run.label} on {dataset}: P = {run.params:,}, {clients} clients"
    if not len(rows):
        console.print(f"{what}, nothing is recorded yet: no round is committed", soft_wrap=True)
        return None
    console.print(f"{what}, {rows['round'].max()} rounds", soft_wrap=True)
    for name, table in _tables(rows, own, by, everything, cumulative):
        cut, units = not by and name not in ("kind", "field"), own if name == "field" else None
        summed = not (cumulative and name == "round")
        _table(TABLES[name][0], table, units=units, cut=cut, summed=summed).print(console)
        if name == "field":
            _print_limits(console, limits(run))
    if by == "":
        down = int(rows[(rows.kind == "algorithm") & (rows.direction == "down")].bytes.sum())
        text = f"\nbroadcasts counted once per recipient {down:,} bytes, once per exchange {once(rows):,}"
        console.print(text, soft_wrap=True)
    return None


TABLES: Mapping[str, tuple[str, list[str]]] = {
    "kind": ("by kind", ["kind"]),
    "field": ("by field and layer", ["field", "layer"]),
    "round": ("by round", ["round"]),
    "client": ("by client", ["client"]),
    "hop": ("by hop to the root", ["hop"]),
}
"""The titles of the tables, and the columns by which rows are summed."""


def _tables(
    rows: pandas.DataFrame, own: pandas.DataFrame, by: str, everything: bool, cumulative: bool
) -> Iterator[tuple[str, pandas.DataFrame]]:
    """Yield the table that --by names, or all tables of the run. The table by hop counts broadcasts and sums
    between each edge server and the root or, with `everything`, all bytes between them by kind."""
    has_hops = "hop" in rows.columns
    if by == "hop" and not has_hops:
        raise UsageError("--by hop: this run has no edge servers (launch --tree)")
    for name in [by] if by else [name for name in TABLES if name != "hop" or has_hops]:
        (_, keys), selected = TABLES[name], own
        if name == "kind":
            selected = rows
        elif name == "hop":
            selected = rows[rows.hop != ""] if everything else rows[rows.kind == "edge"]
            keys = [*keys, "kind"] if everything else keys
        elif name in ("round", "client"):
            selected = own[own[name] >= 0]
        table = sides(selected, keys)
        yield name, table.cumsum() if cumulative and name == "round" else table


def to_json(
    run: RunFolder, *, by: str = "", everything: bool = False, cumulative: bool = False
) -> dict[str, object]:
    """Return the tables for --json. Each is a list of objects with the keys and the bytes down and up."""
    rows = run.ledger
    own = rows if everything else rows[rows.kind == "algorithm"]
    tables = {
        f"by_{name}": table.reset_index().to_dict("records")
        for name, table in _tables(rows, own, by, everything, cumulative)
    }
    hops = {"by_hop": tables.pop("by_hop")} if "by_hop" in tables else {}
    down = own[(own.kind == "algorithm") & (own.direction == "down")]
    return {
        "run": run.path,
        "algo": run.experiment["algo"],
        "dataset": run.experiment["dataset"],
        "params": run.params,
        "clients": run.experiment["clients"],
        "rounds": int(rows["round"].max()) if len(rows) else 0,
        **hops,
        **tables,
        "envelopes": {side: messages(own, side) for side in SIDES},
        "limits": limits(run),
        "broadcast_bytes": int(down.bytes.sum()),
        "broadcast_bytes_once": once(own),
    }


def limits(run: RunFolder) -> dict[str, Any]:
    """Return the last measured limits (fedsim.wire.limits), with their round; {} if there are none."""
    for line in reversed(run.lines):
        if line.get("limits"):
            return {"round": line["round"], **line["limits"]}
    return {}


def _print_limits(out: Console, measured: Mapping[str, Any]) -> None:
    """Print bits per value, entropies, and the KL divergence of an upload. measured: result of `limits`."""
    rows = [
        (
            side,
            name,
            *(optional(numbers.get(key), ".3g", "") for key in ("bits", "entropy", "step", "rounding")),
        )
        for side in SIDES
        for name, numbers in measured.get(side, {}).items()
    ]
    heads = ("", "field", "bits a value", "entropy", "step (deviations)", "rounding / change")
    if rows:
        Table(heads, rows, 2, f"what round {measured['round']} could have cost").print(out)
    if "kl" in measured:
        kl = f"{measured['kl']:.3g} bits a parameter"
        out.print(f"KL(q_k || q_g) of an upload in round {measured['round']}: {kl}")


def messages(rows: pandas.DataFrame, direction: str) -> int:
    """Count the algorithm's envelopes in one direction: one per round, exchange and client."""
    sent = rows[(rows.kind == "algorithm") & (rows.direction == direction)]
    return len(sent[["round", "exchange", "client"]].drop_duplicates())


def once(rows: pandas.DataFrame) -> int:
    """Return the bytes down if each exchange sent its largest broadcast once, to all recipients together."""
    down = rows[(rows.kind == "algorithm") & (rows.direction == "down")]
    envelopes = down.groupby(["round", "exchange", "client"])["bytes"].sum()
    return int(envelopes.groupby(["round", "exchange"]).max().sum())


def exported(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return the columns round, sender, receiver and bytes. The server is -1, and clients count from 0. In
    traffic without a client, the other end is a worker: workers 0, 1, ... are -2, -3, ..."""
    other = rows.client.where(rows.client >= 0, -2 - rows.worker)
    down = rows.direction == "down"
    frame = rows.assign(sender=other.where(~down, -1), receiver=other.where(down, -1))
    return frame.groupby(["round", "sender", "receiver"], as_index=False)["bytes"].sum()


def _export(rows: pandas.DataFrame, path: Path) -> None:
    with output_file(path) as file:
        exported(rows).to_csv(file, index=False)


def _table(
    title: str, sent: pandas.DataFrame, *, units: pandas.DataFrame | None, cut: bool, summed: bool
) -> Table:
    """Return a table of bytes. units: rows whose envelopes are counted, to state bytes per envelope. cut:
    leave out lines in the middle of a long table. summed: state shares and the total."""
    keys = [str(name) for name in sent.index.names]
    totals = {side: int(sent[side].sum()) for side in SIDES}
    envelopes = {side: messages(units, side) for side in SIDES} if units is not None else {}

    def cells(row: Mapping[str, int], last: bool = False) -> Iterator[str]:
        for side in SIDES:
            yield f"{row[side]:,}"
            if summed:
                yield f"{row[side] / totals[side]:.1%}" if row[side] and not last else ""
            if units is not None:
                yield f"{row[side] / envelopes[side]:,.1f}" if row[side] and envelopes[side] else ""

    rows = [
        [
            *(str(part) if part != "" else "-" for part in (key if isinstance(key, tuple) else (key,))),
            *cells(row),
        ]
        for key, row in zip(sent.index, sent.to_dict("records"), strict=True)
    ]
    heads = [
        head for side in SIDES for head in (side, *["share"] * summed, *["per envelope"] * bool(envelopes))
    ]
    if cut and len(rows) > SHOWN:
        more = [f"... {len(rows) - SHOWN + 1:,} more", *[""] * (len(keys) + len(heads) - 1)]
        rows = [*rows[: SHOWN - 4], more, *rows[-3:]]
    if summed:
        rows.append(["total", *[""] * (len(keys) - 1), *cells(totals, last=True)])
    best = {(len(rows) - 1, n) for n in range(len(rows[-1]))} if summed else ()
    return Table([*keys, *heads], rows, len(keys), title, best)


# ---- typed rows, for DuckDB, polars and others

NAME = "ledger.parquet"
LARGE = ("dense_bytes", "bytes")
"""Columns of 64 bits; other numbers have 32 bits."""
BATCH = 1 << 16
"""The number of rows of a row group; only one row group is in memory at a time."""


def write_parquet(run: RunFolder) -> Path:
    """Write RUN/ledger.parquet, a batch of rows at a time; return its path. The run may still be running."""
    arrow, parquet = (needed(name, "--parquet", "parquet") for name in ("pyarrow", "pyarrow.parquet"))
    run.check_files(LEDGER)
    names = COLUMNS if run.experiment.get("tree", "") == "" else TREE_COLUMNS
    schema = arrow.schema([(name, _type(arrow, name)) for name in names])
    path = run.path / NAME
    with output_file(path) as file, parquet.ParquetWriter(file, schema) as writer:
        entries = run.ledger_rows()
        while rows := list(islice(entries, BATCH)):  # itertools.batched needs Python 3.12
            values = list(zip(*rows, strict=True))[: len(names)]
            columns = zip(schema.types, values, strict=True)
            writer.write_table(
                arrow.table([arrow.array(column, kind) for kind, column in columns], schema=schema)
            )
    return path


def _type(arrow: Any, name: str) -> Any:
    if name in TEXT:  # few different values
        return arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.int64() if name in LARGE else arrow.int32()
