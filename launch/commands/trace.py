"""fedsim trace: a run's timeline as a file for ui.perfetto.dev."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import fedsim
from fedsim import plugins
from fedsim.errors import DataError, UsageError
from launch.results.trace import Committed, TracedRun, events
from launch.runs.file_checks import check_experiment, check_file, known_files
from launch.runs.manifest import StoredManifest
from launch.runs.process_rows import process_rows
from launch.runs.run_state import rows_until
from launch.runs.streamed_rows import ledger_rows, timeline_rows
from launch.terminal import output_file
from workers.storage.growing_file import JOURNAL, LEDGER, TIMELINE
from workers.storage.journal import journal_records

STDOUT = Path("-")


def trace(folder: Path, out: Path | None = None) -> Path | None:
    """Write the trace; returns its path, None for standard output. The run may be running.

    Raises:
        UsageError: if the folder is no run, or no round of it is committed.
        DataError: if a file of the run is damaged or was changed.
        DiskError: if the disk cannot be read or written.
    """
    opened = StoredManifest.read(folder)
    known = known_files(folder)
    check_experiment(opened, known)
    for name in (TIMELINE, LEDGER, JOURNAL):
        check_file(folder, name, known)
        if not (folder / name).is_file():
            raise UsageError(f"{folder} has no {name}: its run did not get so far, or the file was removed")
    described = opened.described
    run = TracedRun(
        folder.resolve().name,
        plugins.short(str(described["algo"])),
        plugins.short(str(described["dataset"])),
        _workers(folder),
        _committed(folder / JOURNAL),
    )
    last = rows_until(folder)
    spans = timeline_rows(folder / TIMELINE, last)
    first = next(spans, None)
    if first is None:
        raise UsageError(f"{folder} has no task in {TIMELINE} yet: trace it after its first round")
    lines = _lines(run, events(run, chain([first], spans), ledger_rows(folder / LEDGER, last)))
    if out == STDOUT:
        for line in lines:
            sys.stdout.write(line)
        return None
    path = out or folder / "trace.json"
    with output_file(path) as file:
        file.writelines(line.encode() for line in lines)
    return path


def _committed(journal: Path) -> Mapping[int, Committed]:
    """The rounds that a journal has as committed; of one that was committed again, the last time counts.

    Raises:
        DataError: if a record is not what it is called.
        DiskError: if the journal cannot be read.
    """
    rounds: dict[int, Committed] = {}
    start = 0
    try:
        for record in journal_records(journal):
            if record["what"] == "start":
                start += 1
            elif record["what"] == "commit":
                commit = record["about"]
                dropped = frozenset(commit["participants"]).difference(commit["folded"])
                rounds[int(record["round"])] = Committed(max(start, 1), dropped)
    except (LookupError, TypeError, ValueError):
        raise DataError(f"{journal} is damaged: a record of a commit does not say who took part") from None
    return rounds


def _workers(folder: Path) -> Mapping[int, str]:
    """Machine and device of the workers of the last start, as far as processes.json has them."""
    known = {}
    for row in process_rows(folder):
        index, places = row.get("index"), [str(row[key]) for key in ("node", "device") if row.get(key)]
        if str(row.get("role", "")).endswith("worker") and isinstance(index, int):
            known[index] = ", ".join(places)
    return known


def _lines(run: TracedRun, written: Iterator[Mapping[str, object]]) -> Iterator[str]:
    """The file, an event a line."""
    other = {"run": run.name, "algorithm": run.algorithm, "dataset": run.dataset}
    other["written_by"] = f"fedsim {fedsim.__version__}"
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n'
    for number, event in enumerate(written):
        yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"
