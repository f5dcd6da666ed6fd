"""A run's timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

The trace has two processes: the coordinator with one lane for broadcasts and one for folding, and the workers
with one lane each. Times are microseconds. A flow connects the broadcast, the computation and the fold of a
task. The tasks of the run and the sizes of its envelopes are held in memory.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedsim import plugins
from fedsim.errors import UsageError
from fedsim.version import __version__
from fedsim.wire.ledger_rows import Entry
from launch.runs.folder import RunFolder
from launch.terminal import output_file
from workers.coordinator.task_timeline import Span
from workers.storage.growing_file import JOURNAL, LEDGER, TIMELINE
from workers.storage.journal import journal_records

Event = dict[str, Any]
Lane = tuple[int, int]
"""A process and a thread of the trace."""
Key = tuple[int, int, int, int]
"""Round, exchange, client and worker: of a task, and of its envelopes in the ledger."""
Exchange = tuple[int, int]
"""A round and the number of an exchange in it."""
COORDINATOR, WORKERS = 1, 2
"""Process ids in the trace; Perfetto reserves 0 for the idle process. Worker w is thread w + 1."""
BROADCASTS, FOLDS = (COORDINATOR, 1), (COORDINATOR, 2)
OF_TASKS = ("task", "gone", "evaluate", "upload", "score")
"""Messages of a task, whose bytes its slice has."""


@dataclass(frozen=True)
class Committed:
    """A committed round. start: 1 if the launch committed it, 2 if the first resume did, and so on. dropped:
    the clients whose uploads were not folded."""

    start: int
    dropped: frozenset[int]


class _Task(NamedTuple):
    """A span with its times in microseconds of the trace; the worker's slice lasts from begin to end."""

    span: Span
    given: int
    begin: int
    end: int
    arrived: int
    folded: bool


# ---- a run's trace


def write_trace(run: RunFolder, path: Path) -> Path:
    """Write the trace of a run to a file; return the path of the file."""
    lines = trace_lines(run)
    with output_file(path) as file:
        file.writelines(line.encode() for line in lines)
    return path


def trace_lines(run: RunFolder) -> Iterator[str]:
    """Return the trace of a run, which may still be running, one event per line."""
    run.check_files(TIMELINE, LEDGER, JOURNAL)
    rounds, spans = committed_rounds(run), list(run.timeline_rows())
    if not spans:
        raise UsageError(f"{run.path} has no task in {TIMELINE} yet: trace it after its first round")
    algo, dataset = (plugins.short(str(run.experiment[key])) for key in ("algo", "dataset"))
    other = {"run": run.path.resolve().name, "algorithm": algo, "dataset": dataset}
    other["written_by"] = f"fedsim {__version__}"
    return _lines(other, events(spans, run.ledger_rows(), rounds, _places(run)))


def _lines(other: Mapping[str, str], written: Iterator[Event]) -> Iterator[str]:
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n'
    for number, event in enumerate(written):
        yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def _places(run: RunFolder) -> Mapping[int, str]:
    """Return machine and device of the last start's workers, as far as processes.json has them."""
    rows = [row for row in run.processes if str(row.get("role", "")).endswith("worker")]
    known = {row["index"]: row for row in rows if isinstance(row.get("index"), int)}
    return {w: ", ".join(str(row[k]) for k in ("node", "device") if row.get(k)) for w, row in known.items()}


def committed_rounds(run: RunFolder) -> Mapping[int, Committed]:
    """Return the committed rounds of a run. If a round was committed twice, the last commit counts."""
    rounds: dict[int, Committed] = {}
    start = 0
    journal = run.path / JOURNAL
    for record in journal_records(journal) if run.has(JOURNAL) else ():
        if record["what"] == "start":
            start += 1
        elif record["what"] == "commit":
            commit = record["about"]
            dropped = frozenset(commit["participants"]).difference(commit["folded"])
            rounds[int(record["round"])] = Committed(max(start, 1), dropped)
    return rounds


# ---- events


def events(
    spans: Iterable[Span],
    entries: Iterable[Entry],
    rounds: Mapping[int, Committed],
    places: Mapping[int, str] | None = None,
) -> Iterator[Event]:
    """Yield the names of lanes, then slices and flows.

    spans, entries: the rows of timeline.csv and of ledger.csv, in their order. rounds: the committed rounds;
    folds are shown only for these. places: machine and device by worker, as far as known.
    """
    axis = _Axis(spans, rounds)
    sizes = Counter[tuple[Key, str]]()
    for e in entries:
        if e.message in OF_TASKS:
            sizes[(e.round, e.exchange, e.client, e.worker), e.direction] += e.bytes
    lanes = {BROADCASTS: "broadcasts", FOLDS: "folding"}
    for worker in sorted({task.span.worker for task in axis.tasks}):
        place = (places or {}).get(worker)
        lanes[WORKERS, worker + 1] = f"worker {worker}" + (f" ({place})" if place else "")
    yield from _named("process", (COORDINATOR, 1), "coordinator")
    yield from _named("process", (WORKERS, 1), "workers")
    for lane, name in lanes.items():
        yield from _named("thread", lane, name)
    yield from (_event("i", FOLDS, at, "resumed", s="g") for at in axis.resumed)
    for task in axis.tasks:
        yield _work(task, task.span.round in rounds, sizes)
    for exchange in axis.exchanges:
        yield from _exchange(axis, exchange, sizes)
    for number, task in enumerate((t for own in axis.exchanges.values() for t in own), 1):
        yield from _flow(number, task, axis)


class _Axis:
    """The slices of all lanes on one axis of time.

    Viewers cannot show slices of a lane that overlap, so a slice begins no earlier than the one before it
    ends. The tasks of a worker overlap if it computes several at once, or if an answer is read late.
    """

    def __init__(self, spans: Iterable[Span], rounds: Mapping[int, Committed]) -> None:
        self._free: Counter[Lane] = Counter()
        """The instants from which the lanes are free."""
        self.resumed: list[int] = []
        dated = list(self._dated(spans, rounds))
        given = defaultdict[Exchange, list[int]](list)
        for span, at, _ in dated:
            if span.what != "evaluate":
                given[span[:2]].append(at)
        self.broadcasts = {
            key: self._place(BROADCASTS, min(at), max(at)) for key, at in sorted(given.items())
        }
        """Begin and end, from the first task of an exchange to its last one."""
        self.tasks = [self._task(*task, rounds) for task in dated]
        self.exchanges: dict[Exchange, list[_Task]] = {key: [] for key in self.broadcasts}
        for task in self.tasks:
            if task.span.what != "evaluate":
                self.exchanges[task.span[:2]].append(task)
        self.folds: dict[Exchange, tuple[int, int]] = {}
        """Begin and end, from the first upload of a committed exchange to its last one."""
        for key, own in self.exchanges.items():
            came = [(t.arrived, max(t.arrived, t.begin)) for t in own if t.span.what == "task"]
            if came and key[0] in rounds:
                self.folds[key] = self._place(FOLDS, min(came)[0], max(last for _, last in came))

    def _dated(
        self, spans: Iterable[Span], rounds: Mapping[int, Committed]
    ) -> Iterator[tuple[Span, int, int]]:
        """Yield every task with the instants at which it was given and answered. A resumed run counts
        seconds from 0 again: they decrease, or the round has a larger Committed.start."""
        start, begin, end, before = 1, 0, 0, 0.0
        for span in spans:
            task = span.what != "evaluate"
            by = rounds[span.round].start if task and span.round in rounds else start
            if by > start or span.arrived < before:
                self.resumed.append(end)
                start, begin = max(start, by), end
            given, arrived = (begin + round(1e6 * seconds) for seconds in (span.given, span.arrived))
            end, before = max(end, arrived), span.arrived
            yield span, given, arrived

    def _task(self, span: Span, given: int, arrived: int, rounds: Mapping[int, Committed]) -> _Task:
        given = max(given, self.broadcasts.get(span[:2], (0, 0))[0] if span.what != "evaluate" else 0)
        begin = arrived - round(1e6 * span.computing) if span.computing >= 0 else given
        begin, end = self._place((WORKERS, span.worker + 1), max(given, begin), arrived - 1)
        folded = (
            span.what == "task" and span.round in rounds and span.client not in rounds[span.round].dropped
        )
        return _Task(span, given, begin, end, arrived, folded)

    def _place(self, lane: Lane, first: int, last: int) -> tuple[int, int]:
        """Return begin and end of the next slice of a lane; `first` and `last` are in it if it is free."""
        begin = max(first, self._free[lane])
        end = self._free[lane] = max(last, begin) + 1
        return begin, end


def _exchange(axis: _Axis, key: Exchange, sizes: Mapping[tuple[Key, str], int]) -> Iterator[Event]:
    """Yield the slices of an exchange's broadcast and fold."""
    own = axis.exchanges[key]
    label = f"round {key[0]}" + (f", exchange {key[1]}" if key[1] > 1 else "")
    where = {"round": key[0], "exchange": key[1]}
    down, up = (sum(sizes.get((t.span[:4], side), 0) for t in own) for side in ("down", "up"))
    sent = {"tasks": len(own), "bytes_down": down}
    yield _slice(BROADCASTS, axis.broadcasts[key], f"broadcast {label}", "broadcast", where | sent)
    if key in axis.folds:
        uploads, folded = sum(t.span.what == "task" for t in own), sum(t.folded for t in own)
        came = {"uploads": uploads, "folded": folded, "bytes_up": up}
        yield _slice(FOLDS, axis.folds[key], f"fold {label}", "fold", where | came)


def _work(task: _Task, committed: bool, sizes: Mapping[tuple[Key, str], int]) -> Event:
    """Return the slice of a worker's task."""
    span = task.span
    if span.what == "evaluate":
        name = f"evaluate round {span.round}, chunk {span.exchange}"
        args: Event = {"round": span.round, "chunk": span.exchange}
    else:
        name = f"round {span.round}, client {span.client}" + (", gone" if span.what == "gone" else "")
        args = {"round": span.round, "exchange": span.exchange, "client": span.client}
        args |= {"folded": task.folded} if committed else {}
    args |= {f"bytes_{side}": sizes.get((span[:4], side), 0) for side in ("down", "up")}
    args |= {"given_seconds": span.given, "arrived_seconds": span.arrived}
    args |= {"computing_seconds": span.computing} if span.computing >= 0 else {}
    return _slice((WORKERS, span.worker + 1), (task.begin, task.end), name, span.what, args)


def _flow(number: int, task: _Task, axis: _Axis) -> Iterator[Event]:
    """Yield the arrow from the broadcast to the task and, if its upload was folded, to the fold."""
    flow, worker = {"cat": "flow", "id": number}, (WORKERS, task.span.worker + 1)
    yield _event("s", BROADCASTS, task.given, "task", **flow)
    if not task.folded:
        yield _event("f", worker, task.begin, "task", **flow, bp="e")
        return
    yield _event("t", worker, task.begin, "task", **flow)
    at = max(axis.folds[task.span[:2]][0], task.arrived, task.begin)
    yield _event("f", FOLDS, at, "task", **flow, bp="e")


def _slice(lane: Lane, window: tuple[int, int], name: str, category: str, args: Event) -> Event:
    return _event("X", lane, window[0], name, cat=category, dur=window[1] - window[0], args=args)


def _event(phase: str, lane: Lane, at: int, name: str, **more: Any) -> Event:
    return {"name": name, "ph": phase, "pid": lane[0], "tid": lane[1], "ts": at, **more}


def _named(kind: Literal["process", "thread"], lane: Lane, name: str) -> Iterator[Event]:
    """Yield the events that give a process or a thread its name and its position."""
    yield _event("M", lane, 0, f"{kind}_name", args={"name": name})
    yield _event("M", lane, 0, f"{kind}_sort_index", args={"sort_index": lane[kind == "thread"]})
