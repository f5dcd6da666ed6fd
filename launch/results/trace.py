"""A run's timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

The trace has two processes: the coordinator with one lane for broadcasts and one for folding, and the workers
with one lane each. Times are microseconds. A flow connects the broadcast, the computation and the fold of a
task.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from fedsim.errors import DataError
from fedsim.wire.ledger_rows import Entry
from launch.runs.folder import RunFolder
from workers.coordinator.task_timeline import Span
from workers.storage.growing_file import JOURNAL
from workers.storage.journal import journal_records

Event = dict[str, Any]
COORDINATOR, WORKERS = 1, 2
"""Process ids in the trace; Perfetto reserves 0 for the idle process."""
BROADCASTS, FOLDS = 1, 2
"""Thread ids of the coordinator's lanes. Worker w is thread w + 1 of WORKERS."""
KINDS = ("algorithm", "control", "retry", "simulation")
DOWN = ("task", "gone", "evaluate")
UP = ("upload", "score")
_LAST = float("inf")


@dataclass(frozen=True)
class Committed:
    """A committed round. start: 1 if the launch committed it, 2 if the first resume did, and so on. dropped:
    the clients whose uploads were not folded."""

    start: int
    dropped: frozenset[int]


@dataclass(frozen=True)
class TracedRun:
    """The metadata of a trace. workers: machine and device by worker, as far as known. rounds: the committed
    rounds; folds are shown only for these."""

    name: str
    algorithm: str
    dataset: str
    workers: Mapping[int, str]
    rounds: Mapping[int, Committed]


class Batch(NamedTuple):
    """The spans of one round in timeline.csv. resumed: whether this is the first batch after a resume."""

    round: float
    resumed: bool
    spans: list[Span]


class _Task(NamedTuple):
    """A span with its times in microseconds of the trace; the worker's slice lasts from begin to end."""

    span: Span
    given: int
    begin: int
    end: int
    arrived: int


class _Envelopes(NamedTuple):
    """The columns by which the rows of the ledger are added up to envelopes."""

    round: int
    exchange: int
    client: int
    worker: int
    direction: str
    message: str
    kind: str

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self[:4]


def events(run: TracedRun, spans: Iterable[Span], entries: Iterable[Entry]) -> Iterator[Event]:
    """Yield the events of a trace round by round; only one round's spans and bytes are in memory at a time.

    spans, entries: the rows of timeline.csv and of ledger.csv, in their order.
    """
    yield from _Trace(run, _Traffic(entries)).events(spans)


def committed_rounds(run: RunFolder) -> Mapping[int, Committed]:
    """Return the committed rounds of a run. If a round was committed twice, the last commit counts."""
    rounds: dict[int, Committed] = {}
    start = 0
    journal = run.path / JOURNAL
    try:
        for record in journal_records(journal) if run.has(JOURNAL) else ():
            if record["what"] == "start":
                start += 1
            elif record["what"] == "commit":
                commit = record["about"]
                dropped = frozenset(commit["participants"]).difference(commit["folded"])
                rounds[int(record["round"])] = Committed(max(start, 1), dropped)
    except (LookupError, TypeError, ValueError):
        raise DataError(f"{journal} is damaged: a record of a commit does not say who took part") from None
    return rounds


def batches(spans: Iterable[Span], rounds: Mapping[int, Committed]) -> Iterator[Batch]:
    """Group spans by round. A resumed run counts seconds from 0 again. A resume shows in seconds that
    decrease, or in a larger Committed.start of the round."""
    held: list[Span] = []
    round, start, before, resumed = -1, 1, 0.0, False
    for span in spans:
        task = span.what != "evaluate"
        by = rounds[span.round].start if task and span.round in rounds else start
        again = bool(held) and (span.arrived < before or by > start)
        if held and (again or (task and span.round > round >= 0)):
            yield Batch(round, resumed, held)
            held, round, resumed = [], -1, again
        held.append(span)
        round, start, before = max(round, span.round if task else -1), max(start, by), span.arrived
    if held:
        yield Batch(_LAST, resumed, held)


class _Traffic:
    """A reader of the ledger that sums rows by envelope and reads only as far as needed."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._rows = iter(entries)
        self._next: Entry | None = None

    def until(self, round: float) -> Counter[_Envelopes]:
        """Read the next rows, up to the end of this round; return the bytes of each envelope in them."""
        taken: Counter[_Envelopes] = Counter()
        while (row := self._next or next(self._rows, None)) is not None:
            self._next = None
            if row.message in ("task", "gone") and row.round > round:
                self._next = row
                break
            what = (row.round, row.exchange, row.client, row.worker, row.direction, row.message, row.kind)
            taken[_Envelopes(*what)] += row.bytes
        return taken


class _Trace:
    """A converter of spans into events, one batch after the other."""

    def __init__(self, run: TracedRun, traffic: _Traffic) -> None:
        self.run, self.traffic = run, traffic
        self._offset = 0
        """The time in the trace, in microseconds, of the launch or the latest resume."""
        self._end = 0
        """The latest instant so far."""
        self._free: dict[int, int] = {}
        """By worker, the instant from which its lane is free."""
        self._folding = self._broadcasting = 0
        """The instants from which the lanes of the coordinator are free."""
        self._folded: tuple[int, int] | None = None
        """Round and exchange of the last fold; None if there was none since the launch or resume."""
        self._flows = 0
        self._sums: Counter[tuple[str, str]] = Counter()
        """Bytes so far, by direction and kind."""
        self._counted = 0
        """The instant of the last counter event."""

    def events(self, spans: Iterable[Span]) -> Iterator[Event]:
        yield from _named("process", COORDINATOR, 1, "coordinator")
        yield from _named("process", WORKERS, 1, "workers")
        yield from _named("thread", COORDINATOR, BROADCASTS, "broadcasts")
        yield from _named("thread", COORDINATOR, FOLDS, "folding")
        yield from (self._counter(side, 0) for side in ("down", "up"))
        for batch in batches(spans, self.run.rounds):
            yield from self._batch(batch)

    def _batch(self, batch: Batch) -> Iterator[Event]:
        if batch.resumed:
            self._offset, self._folded = self._end, None
            yield _event("i", COORDINATOR, FOLDS, self._offset, "resumed", s="g")
        for worker in sorted({span.worker for span in batch.spans} - self._free.keys()):
            self._free[worker] = 0
            known = self.run.workers.get(worker)
            name = f"worker {worker}" + (f" ({known})" if known else "")
            yield from _named("thread", WORKERS, worker + 1, name)
        windows = dict(self._broadcasts(batch.spans))
        tasks = [self._placed(span, windows.get(span[:2], (0, 0))[0]) for span in batch.spans]
        self._end = max(self._end, *(task.end for task in tasks))
        envelopes = self.traffic.until(batch.round)
        sizes: Counter[tuple[tuple[int, int, int, int], str]] = Counter()
        for envelope, size in envelopes.items():
            if envelope.message in DOWN + UP:
                sizes[envelope.key, envelope.direction] += size
        given = sorted((t for t in tasks if t.span.what != "evaluate"), key=lambda t: t.span[:2])
        for (number, exchange), group in groupby(given, key=lambda t: t.span[:2]):
            yield from self._exchange(windows[number, exchange], list(group), sizes)
        yield from (self._work(task, sizes) for task in tasks if task.span.what == "evaluate")
        yield from self._counters(tasks, envelopes)

    def _broadcasts(self, spans: Iterable[Span]) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
        """Yield round, exchange and interval of each broadcast, from its first task to its last one."""
        own = sorted(span for span in spans if span.what != "evaluate")
        for key, group in groupby(own, key=lambda span: span[:2]):
            given = [self._at(span.given) for span in group]
            begin = max(self._broadcasting, min(given))
            self._broadcasting = max(begin, *given) + 1
            yield key, (begin, self._broadcasting)

    def _placed(self, span: Span, earliest: int) -> _Task:
        """Place a task in its worker's lane.

        The tasks of a worker overlap if it computes several at once, or if an answer is read late. Viewers
        cannot show slices of a lane that overlap, so a slice begins no earlier than the previous one ends.
        earliest: the beginning of the broadcast.
        """
        given, arrived = max(earliest, self._at(span.given)), self._at(span.arrived)
        begin = arrived - round(1e6 * span.computing) if span.computing >= 0 else given
        begin = max(given, begin, self._free[span.worker])
        end = self._free[span.worker] = max(arrived, begin + 1)
        return _Task(span, given, begin, end, arrived)

    def _at(self, seconds: float) -> int:
        return self._offset + round(1e6 * seconds)

    def _work(self, task: _Task, sizes: Mapping[Any, int]) -> Event:
        span = task.span
        if span.what == "evaluate":
            name = f"evaluate round {span.round}, chunk {span.exchange}"
            args: Event = {"round": span.round, "chunk": span.exchange}
        else:
            name = f"round {span.round}, client {span.client}" + (", gone" if span.what == "gone" else "")
            args = {"round": span.round, "exchange": span.exchange, "client": span.client}
            args |= {"algorithm": self.run.algorithm}
            if span.round in self.run.rounds:
                args["folded"] = _folds(span, self.run.rounds)
        args |= {f"bytes_{side}": sizes.get((_key(span), side), 0) for side in ("down", "up")}
        args |= {"given_seconds": span.given, "arrived_seconds": span.arrived}
        if span.computing >= 0:
            args["computing_seconds"] = span.computing
        lasts = task.end - task.begin
        return _event("X", WORKERS, span.worker + 1, task.begin, name, cat=span.what, dur=lasts, args=args)

    def _exchange(
        self, window: tuple[int, int], tasks: Sequence[_Task], sizes: Mapping[Any, int]
    ) -> Iterator[Event]:
        """Yield the broadcast, the tasks and the fold of an exchange, with the flows between them."""
        (begin, end), (number, exchange) = window, tasks[0].span[:2]
        label = f"round {number}" + (f", exchange {exchange}" if exchange > 1 else "")
        where = {"round": number, "exchange": exchange, "algorithm": self.run.algorithm}
        sent = {"tasks": len(tasks), "bytes_down": sum(sizes.get((_key(t.span), "down"), 0) for t in tasks)}
        if self._folded is not None and self._folding < begin:
            yield self._between(begin, number)
        yield _slice(BROADCASTS, begin, end, f"broadcast {label}", "broadcast", where | sent)
        answered = [t for t in tasks if t.span.what == "task"]
        first = max(self._folding, min((t.arrived for t in answered), default=0))
        committed = number in self.run.rounds
        if answered and committed:
            # _placed may begin a slice after its answer arrived; the fold then ends after that beginning
            self._folding = max(first, *(max(t.arrived, t.begin) for t in answered)) + 1
            self._folded = number, exchange
            self._end = max(self._end, self._folding)
            came = {
                "uploads": len(answered),
                "folded": sum(_folds(t.span, self.run.rounds) for t in answered),
                "bytes_up": sum(sizes.get((_key(t.span), "up"), 0) for t in answered),
            }
            yield _slice(FOLDS, first, self._folding, f"fold {label}", "fold", where | came)
        for task in tasks:
            yield self._work(task, sizes)
            self._flows += 1
            flow = {"cat": "flow", "id": self._flows}
            yield _event("s", COORDINATOR, BROADCASTS, task.given, "task", **flow)
            lane, folded = task.span.worker + 1, committed and _folds(task.span, self.run.rounds)
            if not folded:
                yield _event("f", WORKERS, lane, task.begin, "task", **flow, bp="e")
                continue
            yield _event("t", WORKERS, lane, task.begin, "task", **flow)
            at = max(first, task.arrived, task.begin)
            yield _event("f", COORDINATOR, FOLDS, at, "task", **flow, bp="e")

    def _between(self, end: int, after: int) -> Event:
        """Return a slice for the coordinator's work between the end of a fold and the next broadcast."""
        assert self._folded is not None
        before, exchange = self._folded
        name = f"between rounds {before} and {after}"
        if before == after:
            name = f"in round {before}, after exchange {exchange}"
        return _slice(FOLDS, self._folding, end, name, "between", {"round": before, "exchange": exchange})

    def _counters(self, tasks: Sequence[_Task], envelopes: Mapping[_Envelopes, int]) -> Iterator[Event]:
        """Yield counter events. A task's bytes are counted when it is sent, an answer's when it arrives,
        and all others when the round ends."""
        when: dict[tuple[tuple[int, int, int, int], str], int] = {}
        for task in tasks:
            when[_key(task.span), "down"], when[_key(task.span), "up"] = task.given, task.arrived
        dated = sorted(
            (
                when.get((e.key, e.direction), self._end) if e.message in DOWN + UP else self._end,
                e.direction,
                e.kind,
                size,
            )
            for e, size in envelopes.items()
        )
        for (at, side), group in groupby(dated, key=lambda d: d[:2]):
            for *_, kind, size in group:
                self._sums[side, kind] += size
            yield self._counter(side, at)

    def _counter(self, side: str, at: int) -> Event:
        self._counted = max(self._counted, at)
        sums = {kind: self._sums[side, kind] for kind in KINDS}
        return _event("C", COORDINATOR, BROADCASTS, self._counted, f"bytes {side}", args=sums)


def _key(span: Span) -> tuple[int, int, int, int]:
    """Return the key of the task's envelopes in the ledger."""
    return span.round, span.exchange, span.client, span.worker


def _folds(span: Span, rounds: Mapping[int, Committed]) -> bool:
    return span.what == "task" and span.client not in rounds[span.round].dropped


def _slice(thread: int, begin: int, end: int, name: str, category: str, args: Event) -> Event:
    return _event("X", COORDINATOR, thread, begin, name, cat=category, dur=end - begin, args=args)


def _event(phase: str, process: int, thread: int, at: int, name: str, **more: Any) -> Event:
    return {"name": name, "ph": phase, "pid": process, "tid": thread, "ts": at, **more}


def _named(kind: Literal["process", "thread"], process: int, thread: int, name: str) -> Iterator[Event]:
    """Yield the events that give a process or a thread its name and its position."""
    yield _event("M", process, thread, 0, f"{kind}_name", args={"name": name})
    index = process if kind == "process" else thread
    yield _event("M", process, thread, 0, f"{kind}_sort_index", args={"sort_index": index})
