"""The file metrics.jsonl, with one line per evaluated round. This module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim.learning.score_names import CALIBRATION, CLIENT_LISTS, CLIENT_NUMBERS, EXTRA

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


def metrics_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the lines of metrics.jsonl and the position of each line's end, up to the first damaged line."""
    at = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith(b"\n"):
            return
        at += len(line)
        try:
            read = json.loads(line)
        except ValueError:
            return
        if not isinstance(read, dict) or not isinstance(read.get("round"), int):
            return
        yield read, at
