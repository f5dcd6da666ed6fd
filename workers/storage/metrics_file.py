"""The file metrics.jsonl, with one line per evaluated round. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import lexists
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

from msgspec import Meta

from fedsim.foreign_files import checked, json_value, read
from fedsim.learning.score_names import CALIBRATION, CLIENT_LISTS, CLIENT_NUMBERS, EXTRA
from workers.storage.atomic_files import disk_errors

_RELIABILITY = ("reliability", "ensemble_reliability")
LISTS = (*_RELIABILITY, "client_accuracy_histogram", *CLIENT_LISTS, "staleness", "limits")
"""The names in metrics.jsonl whose values are not numbers: reliability tables, clients' scores and their
histogram, the staleness of each participant, and the limits (fedsim.wire.limits)."""

_ENSEMBLE = ("ensemble_accuracy", "ensemble_nll", "ensemble_ece", "ensemble_brier")
OPTIONAL_SCORES = (*_ENSEMBLE, *CALIBRATION, *CLIENT_NUMBERS, *EXTRA)
"""Scores that some runs have besides test_accuracy and test_nll."""

EDGE_BYTES = ("edge_bytes_down", "edge_bytes_up")
"""Names of a round's bytes between edge servers and the root, down and up."""
_ROUND = {"round", "participants", "folded", "late", "refused", "unchanged", "simulated_seconds", "joules"}
_ROUND |= {"test_accuracy", "test_nll", "bytes_down", "bytes_up"}
RESERVED = {*_ROUND, *EDGE_BYTES, *OPTIONAL_SCORES, *LISTS}
"""Names in metrics.jsonl that an algorithm must not report."""


Count = Annotated[int, Meta(ge=0)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""A finite number; scores are `float`, because those of a run that diverged are NaN."""
Scores = list[float | None] | None


class FieldLimits(TypedDict, total=False):
    """The cost of a field's measured message, in bits per value (fedsim.wire.limits)."""

    bits: Required[Number]
    entropy: Required[Number]
    step: Number | None
    rounding: Number | None


class Limits(TypedDict, total=False):
    """The costs of a round's measured messages by field, and the KL divergence of the upload."""

    down: dict[str, FieldLimits]
    up: dict[str, FieldLimits]
    kl: Number


class Line(TypedDict, total=False):
    """What is not a score in a line of metrics.jsonl."""

    round: Required[Count]
    bytes_down: Count
    bytes_up: Count
    edge_bytes_down: Count
    edge_bytes_up: Count
    seconds: Number
    simulated_seconds: Number
    joules: Number | None
    participants: list[Count]
    folded: list[Count]
    late: list[Count]
    refused: list[Count]
    unchanged: list[Count]
    staleness: list[Count]
    reliability: list[tuple[Count, Number, Count]] | None
    ensemble_reliability: list[tuple[Count, Number, Count]] | None
    client_accuracy_histogram: list[Count] | None
    client_accuracies: Scores
    client_nlls: Scores
    limits: Limits


def line_of(text: bytes) -> dict[str, Any]:
    """Return a line of metrics.jsonl; raise ValueError if it is not the record of a round."""
    line: dict[str, Any] = checked(json_value(text), Line)
    checked(
        {key: value for key, value in line.items() if key not in Line.__annotations__},
        dict[str, float | None],
    )
    return line


def metrics_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the lines of metrics.jsonl and the position of each line's end, up to the first damaged line."""
    at = 0
    with disk_errors(f"cannot read {path}"):
        data = read(path) if lexists(path) else b""
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        at += len(line)
        try:
            yield line_of(line), at
        except ValueError:
            return
