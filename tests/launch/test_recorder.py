"""What a resumed run says of the rounds that were committed and not evaluated when it was ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from fedsim.wire.ledger_rows import Entry
from launch.session.recorder import Recorder
from protocols import find
from workers.storage.recovery import Recovery


def entry(number: int, direction: str, kind: str = "algorithm") -> Entry:
    return Entry(kind, number, 1, 0, 0, direction, direction, "mean", "values", "dense", 100, 100)


def test_a_round_evaluated_after_the_resumption_has_the_bytes_up_to_it(tmp_path: Path) -> None:
    rows = [entry(number, side) for number in (1, 2, 3) for side in ("down", "up")]
    rows.insert(3, entry(2, "up", "control"))
    folder: Any = SimpleNamespace(
        path=tmp_path,
        cut=lambda _: None,
        ledger_rows=lambda: iter(rows),
        metrics=list,
        append_ledger=lambda _: None,
        digests=(),
    )
    display: Any = SimpleNamespace(committed=lambda _: None)
    experiment = Experiment(algo="fedavg", model="logistic", clients=1)
    problem = Problem.build(experiment, build_algorithm(find("fedavg"), {}), None)
    recorder = Recorder(problem, folder, display, SimpleNamespace(), False, 0)  # type: ignore[arg-type]
    recorder.restore(Recovery(2, None, {}, ()))
    commit: Any = SimpleNamespace(round=4, participants=(0,), folded=(0,))
    recorder.committed(commit, [entry(4, "down")])  # before the evaluation of round 2 is there
    assert [recorder._bytes_until(number) for number in (2, 3, 4)] == [400, 600, 700]
