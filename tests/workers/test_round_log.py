"""Lines of metrics.jsonl: in the order of rounds, combined in the order of chunks, complete or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedsim.errors import UsageError
from fedsim.evaluation import ChunkScore
from fedsim.learning.calibration import SIZE
from fedsim.learning.client_scores import LabelShares
from fedsim.learning.likelihoods import LIKELIHOODS
from fedsim.learning.score_names import EXTRA
from tests.support.reproducible import without_seconds
from workers.coordinator.run_records import RoundLog
from workers.storage.metrics_file import RESERVED
from workers.storage.round_record import RoundRecord

CATEGORICAL = LIKELIHOODS["categorical"]
CLASSES = 2
SHARES = LabelShares(np.eye(CLASSES))


def round_log(chunks: int = 2) -> tuple[RoundLog, list[Mapping[str, Any]]]:
    lines: list[Mapping[str, Any]] = []
    return RoundLog(chunks, lines.append, CATEGORICAL), lines


def score(
    correct: int, nll: float, examples: int = 10, *, ensemble: tuple[int, float] = (0, math.nan)
) -> ChunkScore:
    rest = (0.0,) * (CATEGORICAL.width(CLASSES) - 3)
    return ChunkScore((examples, correct, nll, *rest), (examples, *ensemble, *rest))


def test_a_line_waits_for_its_scores_its_commit_and_its_predecessors() -> None:
    created, lines = round_log()
    for r in (0, 1):
        created.open(r, (r,))
    created[1].scores |= {0: score(1, 1.0), 1: score(2, 3.0)}
    created[1].committed = True
    created.flush()
    assert lines == []
    created[0].scores |= {0: score(1, 1.0), 1: score(2, 3.0)}
    created.flush()
    assert lines == []  # not committed
    created[0].committed = True
    del created[0].scores[1]
    created.flush()
    assert lines == []  # not scored
    created[0].scores[1] = score(2, 3.0)
    created.flush()
    assert [line["round"] for line in lines] == [0, 1]
    assert created.oldest is None
    created.flush()
    assert len(lines) == 2


def test_scores_are_means_over_examples_in_the_order_of_chunks() -> None:
    created, lines = round_log(3)
    record = created.open(0, ())
    parts = {0: score(5, 1e16, 10), 1: score(1, 1.0, 4), 2: score(0, -1e16, 2)}
    for chunk in (2, 0, 1):  # as they arrive
        record.scores[chunk] = parts[chunk]
    record.committed = True
    created.flush()
    assert lines[0]["test_accuracy"] == 6 / 16
    assert lines[0]["test_nll"] == ((1e16 + 1.0) - 1e16) / 16


@pytest.mark.parametrize("sampled", [False, True])
def test_an_ensemble_is_told_only_if_there_was_one(sampled: bool) -> None:
    created, lines = round_log(2)
    record = created.open(3, (0, 2))
    record.committed, record.sampled = True, sampled
    record.scores |= {0: score(4, 5.0, ensemble=(6, 3.0)), 1: score(2, 7.0, ensemble=(8, 2.0))}
    created.flush()
    (line,) = lines
    assert line["test_nll"] == 12 / 20
    assert ("ensemble_nll" in line, "ensemble_accuracy" in line) == (sampled, sampled)
    if sampled:
        assert (line["ensemble_accuracy"], line["ensemble_nll"]) == (14 / 20, 5 / 20)


def test_opening_twice_is_the_same_record_and_a_dropped_round_is_never_told() -> None:
    created, lines = round_log(0)
    first = created.open(1, (0, 1))
    assert created.open(1, (5,)) is first
    assert first.participants == (0, 1)
    created.open(2, ())
    created.drop(1)
    assert created.oldest == 2
    created[2].committed = True
    with pytest.raises(KeyError):
        created[1]
    assert lines == []


@pytest.mark.parametrize("name", [*sorted(RESERVED), "seconds", "seconds_anything"])
def test_an_algorithm_cannot_report_what_a_line_has(name: str) -> None:
    with pytest.raises(UsageError, match=f"cannot report '{name}'"):
        RoundRecord(1).report({"rho": 1.0, name: 1.0})


def test_reserved_names_are_all_that_a_line_has() -> None:
    scores = {0: score(1, 1.0)}
    often = {
        "late": (1,),
        "refused": (0,),
        "unchanged": (1,),
        "simulated": 2.0,
        "joules": 3.0,
        "sampled": True,
    }
    often |= {"staleness": (0, 3), "limits": {"kl": 0.1}, "edge_bytes": (1, 2)}
    record = RoundRecord(1, (0, 1), (0,), scores=scores, **often)
    keys = set(*without_seconds([record.line(1, CATEGORICAL, SHARES)]))
    assert keys == RESERVED - {*EXTRA}
    tags = RoundRecord(1, scores={0: ChunkScore((2.0, 1.0, 1.0, 1.0, 1.0, *[1.0, 0.0] * 3, *[0.0] * SIZE))})
    keys = set(*without_seconds([tags.line(1, LIKELIHOODS["bernoulli"])]))
    now_and_then = {
        "folded",
        "late",
        "refused",
        "unchanged",
        "simulated_seconds",
        "joules",
        "staleness",
        "limits",
    }
    now_and_then |= {"edge_bytes_down", "edge_bytes_up"}
    besides = ("ensemble", "client")
    assert keys == {k for k in RESERVED - now_and_then if not k.startswith(besides)}


def test_regression_has_no_accuracy() -> None:
    record = RoundRecord(1, scores={0: ChunkScore((4.0, 2.0)), 1: ChunkScore((4.0, 6.0))})
    line = record.line(2, LIKELIHOODS["gaussian"])
    assert (line["test_accuracy"], line["test_nll"]) == (None, 1.0)
