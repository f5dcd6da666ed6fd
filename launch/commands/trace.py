"""fedsim trace: write a run's timeline as a file for ui.perfetto.dev."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import click

from fedsim import plugins
from fedsim.errors import UsageError
from fedsim.version import __version__
from launch.commands.errors import Command
from launch.commands.shared import FILE, run_argument
from launch.results.trace import TracedRun, committed_rounds, events
from launch.runs.folder import RunFolder
from launch.terminal import output_file
from workers.storage.growing_file import JOURNAL, LEDGER, TIMELINE

STDOUT = Path("-")


@click.command(cls=Command)
@run_argument
@click.option("--out", **FILE, help="Write the trace there; - is standard output.  [RUN/trace.json]")
def trace(run: Path, out: Path | None) -> None:
    """Write the timeline of RUN, which may be running, as a trace that ui.perfetto.dev opens.

    It has a lane per worker, two of the coordinator, arrows from broadcast to task to fold, bytes over time.
    """
    opened = RunFolder.open(run)
    if out != STDOUT:
        click.echo(write_trace(opened, out or run / "trace.json"))
        return
    for line in trace_lines(opened):
        sys.stdout.write(line)


def trace_lines(run: RunFolder) -> Iterator[str]:
    """Return the trace of a run, which may still be running, one event per line."""
    run.check_files(TIMELINE, LEDGER, JOURNAL)
    traced = TracedRun(
        run.path.resolve().name,
        plugins.short(str(run.experiment["algo"])),
        plugins.short(str(run.experiment["dataset"])),
        _workers(run),
        committed_rounds(run),
    )
    spans = run.timeline_rows()
    first = next(spans, None)
    if first is None:
        raise UsageError(f"{run.path} has no task in {TIMELINE} yet: trace it after its first round")
    return _lines(traced, events(traced, chain([first], spans), run.ledger_rows()))


def write_trace(run: RunFolder, path: Path) -> Path:
    """Write the trace of a run to a file; return the path of the file."""
    lines = trace_lines(run)
    with output_file(path) as file:
        file.writelines(line.encode() for line in lines)
    return path


def _workers(run: RunFolder) -> Mapping[int, str]:
    """Return machine and device of the last start's workers, as far as processes.json has them."""
    known = {}
    for row in run.processes:
        index, places = row.get("index"), [str(row[key]) for key in ("node", "device") if row.get(key)]
        if str(row.get("role", "")).endswith("worker") and isinstance(index, int):
            known[index] = ", ".join(places)
    return known


def _lines(run: TracedRun, written: Iterator[Mapping[str, object]]) -> Iterator[str]:
    other = {"run": run.name, "algorithm": run.algorithm, "dataset": run.dataset}
    other["written_by"] = f"fedsim {__version__}"
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n'
    for number, event in enumerate(written):
        yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"
