"""fedsim trace: what it writes is read back by a strict reader of the Trace Event Format.

The package perfetto would read it, too, but it downloads the program that does so when it is first used, and
its protobuf classes are of another format. So the rules are written out here: which keys an event has, that
slices of a lane do not overlap, and that a flow's events lie in slices.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pandas
import pytest
from hypothesis import given, settings, strategies as st

from fedsim.errors import Interrupted
from fedsim.wire.ledger_rows import Entry
from launch.results.trace import COORDINATOR, FOLDS, WORKERS, Committed, events
from launch.session.run import resume
from tests.support.commands import DEADLINE
from tests.support.kept_runs import command, flip, kept_run
from tests.support.snapshots import at, snapshot
from workers.coordinator.task_timeline import Span

KEYS = {
    "M": {"args"},
    "X": {"dur", "cat", "args"},
    "s": {"cat", "id"},
    "t": {"cat", "id"},
    "f": {"cat", "id", "bp"},
    "i": {"s"},
}
"""What an event of each phase has besides name, ph, pid, tid and ts."""
Lane = tuple[int, int]


@dataclass
class Read:
    """A trace, sorted by time as a viewer does it: events of one instant keep their order."""

    events: list[dict[str, Any]]
    slices: dict[Lane, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    names: dict[Lane, str] = field(default_factory=dict)
    flows: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for event in self.events:
            self._check(event)
        for event in sorted(self.events, key=lambda e: e["ts"]):
            lane = event["pid"], event["tid"]
            if event["ph"] == "X":
                self.slices[lane].append(event)
            elif event["ph"] in "stf":
                self.flows[event["id"]].append(event)
                inside = self.slices[lane][-1]
                assert inside["ts"] <= event["ts"] < inside["ts"] + inside["dur"], (event, inside)
            elif event["name"] == "thread_name":
                self.names[lane] = event["args"]["name"]
        assert self.slices.keys() <= self.names.keys()
        self._check_lanes()

    @staticmethod
    def _check(event: dict[str, Any]) -> None:
        assert event.keys() == {"name", "ph", "pid", "tid", "ts"} | KEYS[event["ph"]], event
        assert all(type(event[key]) is int for key in ("pid", "tid", "ts")) and event["ts"] >= 0
        assert event["pid"] > 0 and event["tid"] > 0  # 0 is the idle thread
        assert type(event.get("dur", 1)) is int and event.get("dur", 1) > 0

    def _check_lanes(self) -> None:
        for lane in self.slices.values():
            for one, after in pairwise(lane):
                assert one["ts"] + one["dur"] <= after["ts"], (one, after)
        for flow in self.flows.values():
            assert "".join(e["ph"] for e in flow) in ("stf", "sf")

    def of(self, *categories: str) -> list[dict[str, Any]]:
        return [s for lane in self.slices.values() for s in lane if s["cat"] in categories]


def read(text: str) -> Read:
    whole = json.loads(text)
    assert set(whole) == {"displayTimeUnit", "otherData", "traceEvents"}
    return Read(whole["traceEvents"])


def traced(run: Path) -> Read:
    output = command("trace", run)
    assert output.code == 0 and output.out.splitlines() == [str(run / "trace.json")], output.err
    return read((run / "trace.json").read_text())


def compare_with_files(trace: Read, run: Path) -> None:
    """Every row of timeline.csv is a slice of its worker, and slices have the ledger's bytes of tasks."""
    rows = pandas.read_csv(run / "timeline.csv")
    in_file = Counter(
        (r.what, r.worker + 1, r.round, r.exchange, r.client, r.given, r.arrived) for r in rows.itertuples()
    )
    in_trace = Counter(map(_row, trace.of("task", "gone", "evaluate")))
    assert in_file == in_trace and {s["pid"] for s in trace.of("task", "gone", "evaluate")} == {WORKERS}
    tasks = rows[rows.what != "evaluate"]
    assert len(trace.flows) == len(tasks)
    ledger = pandas.read_csv(run / "ledger.csv", keep_default_na=False)
    of_tasks = ledger[ledger.message.isin(["task", "gone", "upload"])]
    for side in ("down", "up"):
        sent = sum(s["args"][f"bytes_{side}"] for s in trace.of("task", "gone"))
        assert sent == of_tasks[of_tasks.direction == side].bytes.sum()


def _row(one: dict[str, Any]) -> tuple[Any, ...]:
    """The row of timeline.csv that a worker's slice is of."""
    args = one["args"]
    exchange, client = (args["chunk"], -1) if "chunk" in args else (args["exchange"], args["client"])
    times = args["given_seconds"], args["arrived_seconds"]
    return one["cat"], one["tid"], args["round"], exchange, client, *times


@pytest.mark.parametrize(
    "changes",
    [
        {"algo": "fedlap_cov", "participation": "coin:0.7+lost:0.3+gone:0.2", "rounds": 5},
        {"algo": "mime"},
        {"algo": "precond_admm", "participation": "2", "rounds": 2},
        {"algo": "fedavg", "participation": "coin:0.2"},
        {"algo": "pooled"},
    ],
    ids=["losses", "two exchanges", "set-up", "empty rounds", "centralised"],
)
def test_the_trace_has_each_row_of_the_timeline_and_the_bytes_of_the_ledger(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    run = kept_run(tmp_path / "run", **changes)
    trace = traced(run)
    compare_with_files(trace, run)
    ledger = pandas.read_csv(run / "ledger.csv", keep_default_na=False)
    for one in trace.of("task", "gone"):
        args = one["args"]
        own = ledger[(ledger["round"] == args["round"]) & (ledger.exchange == args["exchange"])]
        own = own[own.client == args["client"]]
        for side, messages in (("down", ("task", "gone")), ("up", ("upload",))):
            sent = own[(own.direction == side) & own.message.isin(messages)]
            assert args[f"bytes_{side}"] == sent.bytes.sum()


def test_a_flow_goes_from_broadcast_to_task_to_fold_and_that_of_a_lost_upload_ends_at_its_task(
    tmp_path: Path,
) -> None:
    options = {"participation": "coin:0.7+lost:0.3+gone:0.2", "rounds": 8, "clients": 5}
    run = kept_run(tmp_path / "run", algo="fedavg", **options)
    trace, summary = traced(run), json.loads((run / "summary.json").read_text())
    ends = Counter((e["pid"], len(flow)) for flow in trace.flows.values() for e in flow[-1:])
    took_part, folded = sum(summary["took_part"]), sum(summary["folded"])
    assert 0 < folded < took_part
    assert ends == {(COORDINATOR, 3): folded, (WORKERS, 2): took_part - folded}
    assert sum(s["args"]["folded"] for s in trace.of("task", "gone")) == folded
    assert sum(s["args"]["folded"] for s in trace.of("fold")) == folded
    assert sum(s["args"]["tasks"] for s in trace.of("broadcast")) == took_part
    for flow in trace.flows.values():
        assert flow[0]["pid"] == COORDINATOR and flow[1]["pid"] == WORKERS
        assert [(e["pid"], e["tid"]) for e in flow[2:]] == [FOLDS] * (len(flow) - 2)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a run's folder held in one of its first rounds."""

    with at("evaluated", 2, lambda: snapshot(tmp_path / "whole", tmp_path / "left")):
        kept_run(tmp_path / "whole", algo="fedavg", rounds=6)
    return tmp_path / "left"


def test_a_run_that_goes_on_is_traced_as_far_as_it_is_written(left: Path) -> None:
    before = traced(left)
    compare_with_files(before, left)
    for name in ("timeline.csv", "ledger.csv"):
        with (left / name).open("a") as growing:
            growing.write("4,1,0,0")  # a row that is being written
    (left / "journal").write_bytes((left / "journal").read_bytes() + b"\0\0")
    assert traced(left).events == before.events


def test_starts_of_a_resumed_run_follow_each_other(left: Path) -> None:
    resume(left, {}, quiet=True)
    trace = traced(left)
    compare_with_files(trace, left)
    resumed = [e["ts"] for e in trace.events if e["ph"] == "i"]
    assert len(resumed) == 1
    last = max(s["args"]["round"] for s in trace.of("task") if s["ts"] < resumed[0])
    first = min(s["args"]["round"] for s in trace.of("task") if s["ts"] >= resumed[0])
    assert first == last + 1


def test_a_run_that_was_interrupted_is_traced(tmp_path: Path) -> None:
    def stop() -> None:
        raise Interrupted("seen")

    with at("committed", 2, stop), pytest.raises(Interrupted):
        kept_run(tmp_path / "run", algo="fedavg", rounds=6)
    compare_with_files(traced(tmp_path / "run"), tmp_path / "run")


def test_standard_output_and_another_file_have_the_same_trace(left: Path, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere.json"
    assert command("trace", left, "--out", there).out.split() == [str(there)]
    printed = command("trace", left, "--out", "-")
    assert printed.code == 0 and printed.out == there.read_text() and not (left / "trace.json").exists()


def test_a_pipe_that_has_a_reader_stays_a_pipe(left: Path, tmp_path: Path) -> None:
    pipe, there = tmp_path / "pipe", tmp_path / "there.json"
    os.mkfifo(pipe)
    assert "cannot write" in command("trace", left, "--out", pipe).err  # nobody reads it
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as opened:
        os.set_blocking(opened.fileno(), True)
        came: list[str] = []
        reader = Thread(target=lambda: came.append(opened.read()), daemon=True)
        with open(os.open(pipe, os.O_WRONLY), "w"):  # until the reader waits for the trace
            reader.start()
            assert command("trace", left, "--out", pipe).code == 0
        reader.join(timeout=DEADLINE)
    assert command("trace", left, "--out", there).code == 0
    assert pipe.is_fifo() and came == [there.read_text()] and read(came[0]).flows


def test_mistakes_are_one_line(left: Path, tmp_path: Path) -> None:
    def refused(*options: object, run: Path = left, code: int = 2) -> str:
        output = command("trace", run, *options)
        assert output.code == code and len(output.err.splitlines()) == 1 and not output.out
        return output.err

    files = sorted(tmp_path.rglob("*"))
    (tmp_path / "empty").mkdir()
    assert "not a run folder" in refused(run=tmp_path / "empty")
    assert "not a run folder" in refused(run=tmp_path / "nothing")
    assert "is a folder; name a file" in refused("--out", left)
    assert "cannot write" in refused("--out", tmp_path / "no" / "t.json", code=5)
    timeline = (left / "timeline.csv").read_text()
    shutil.rmtree(left / "checkpoints")  # nothing is known of the files then
    (left / "timeline.csv").write_text(timeline.replace("task", "1,2", 1))
    assert "timeline.csv is damaged: line" in refused()
    (left / "timeline.csv").write_text(timeline.replace("given", "sent"))
    assert "timeline.csv has the columns" in refused()
    (left / "timeline.csv").write_text(timeline.splitlines()[0] + "\n")
    assert "no task in timeline.csv yet: trace it after its first round" in refused()
    (left / "timeline.csv").unlink()
    assert "has no timeline.csv" in refused()
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in files] == [tmp_path / "empty"]


def test_a_timeline_that_was_changed_is_refused(tmp_path: Path) -> None:
    run = kept_run(tmp_path / "run", algo="fedavg")
    flip(run / "timeline.csv")
    output = command("trace", run)
    assert output.code == 2 and f"{run / 'timeline.csv'} was changed" in output.err
    assert not (run / "trace.json").exists()


# ---- any timeline

seconds = st.integers(0, 50).map(lambda micros: micros / 1e6)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Span], list[Entry], dict[int, Committed]]:
    """Rounds of a few microseconds in which answers come late, at once, or before they could."""
    spans: list[Span] = []
    entries: list[Entry] = []
    rounds: dict[int, Committed] = {}
    now, start = 0.0, 1
    for number in range(1, draw(st.integers(1, 4)) + 1):
        if number > 1 and draw(st.booleans()):
            now, start = draw(seconds), start + 1
        clients = draw(st.sets(st.integers(0, 5), min_size=1))
        rounds[number] = Committed(start, draw(st.frozensets(st.sampled_from(sorted(clients)))))
        own = []
        for client in sorted(clients):
            given = now + draw(seconds)
            arrived, worker = given + draw(seconds), draw(st.integers(0, 2))
            computing = draw(st.one_of(st.just(-1.0), seconds))
            own.append(Span(number, 1, client, worker, "task", given, arrived, computing))
            for side, message in (("down", "task"), ("up", "upload")):
                label = ("algorithm", number, 1, client, worker, side, message)
                entries.append(Entry(*label, "", "header", "", 0, draw(st.integers(0, 9))))
        spans += sorted(own, key=lambda s: s.arrived)
        now = max(s.arrived for s in own)
        entries.append(Entry("control", number, -1, -1, 0, "up", "heartbeat", "", "header", "", 0, 7))
    return spans, entries, rounds


@settings(max_examples=200, deadline=None)
@given(histories())
def test_any_timeline_gives_a_sound_trace(
    history: tuple[list[Span], list[Entry], dict[int, Committed]],
) -> None:
    spans, entries, rounds = history
    trace = Read(list(events(spans, entries, rounds)))
    assert len(trace.of("task")) == len(trace.flows) == len(spans)
    for side in ("down", "up"):
        sent = sum(e.bytes for e in entries if e.kind == "algorithm" and e.direction == side)
        assert sum(s["args"][f"bytes_{side}"] for s in trace.of("task")) == sent
    folded = sum(s.client not in rounds[s.round].dropped for s in spans)
    assert sum(len(flow) == 3 for flow in trace.flows.values()) == folded
