"""A run's rounds as flat numbers, read from metrics.jsonl and ledger.csv while these files grow."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.experiment import dotted
from launch.runs.growing import GrowingLines
from launch.tracking import Row, Value
from workers.storage.growing_file import LEDGER, METRICS

LONGEST = 500
"""The maximum length of a configuration value. Older versions of MLflow do not accept longer values."""
PARTICIPANTS = ("participants", "folded", "late", "refused")
"""Lists of clients in metrics.jsonl; trackers get the number of clients in each."""


@dataclass
class RoundBytes:
    """The algorithm's bytes of a round, by direction and field. gone: the clients that dropped out."""

    fields: Counter[str] = field(default_factory=Counter)
    gone: set[bytes] = field(default_factory=set)


@dataclass
class RunRows:
    """A reader of a run's rounds. so_far: the algorithm's bytes up to the last round that was read."""

    folder: Path
    so_far: int = 0
    _rounds: dict[int, RoundBytes] = field(default_factory=dict)
    """Bytes of rounds whose line in metrics.jsonl has not been read yet."""

    def __post_init__(self) -> None:
        self._metrics, self._ledger = (GrowingLines(self.folder / name) for name in (METRICS, LEDGER))

    def new(self) -> list[Row]:
        """Return the rounds that were evaluated since the last call."""
        lines = [json.loads(line) for line in self._metrics.new()]
        if lines:
            self._read_ledger()  # a round's bytes are written there before its line in metrics.jsonl
        return [Row(int(line["round"]), self._numbers(line)) for line in lines]

    def _read_ledger(self) -> None:
        for line in self._ledger.new():
            if line.startswith(b"algorithm,"):
                _, number, _, client, _, direction, message, name, layer, _, _, size = line.split(b",")
                of_round = self._rounds.setdefault(int(number), RoundBytes())
                what = name + (b"" if layer == b"values" else b" " + layer) if name else layer
                of_round.fields[f"{direction.decode()}.{what.decode()}"] += int(size)
                if message == b"gone":
                    of_round.gone.add(client)

    def _numbers(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return all numbers of a line of metrics.jsonl, and the ledger's numbers of the same round."""
        number = int(line["round"])
        own = self._rounds.get(number, RoundBytes())
        for earlier in sorted(r for r in self._rounds if r <= number):
            self.so_far += self._rounds.pop(earlier).fields.total()
        plain = {k: v for k, v in line.items() if k != "round" and not isinstance(v, list)}
        result = {
            f"bytes/{key.removeprefix('bytes_')}" if key.startswith("bytes_") else key.replace(".", "/"): x
            for key, x in finite(plain).items()
        }
        result["bytes/so_far"] = float(self.so_far)
        result |= {f"bytes/field/{key}": float(n) for key, n in sorted(own.fields.items())}
        result |= participation(line, len(own.gone))
        if staleness := line.get("staleness"):
            result |= {"staleness/mean": sum(staleness) / len(staleness), "staleness/max": max(staleness)}
        return result


def participation(line: Mapping[str, Any], gone: int) -> dict[str, float]:
    """Return a round's numbers of clients, by outcome. asked = folded + dropouts + late + refused + lost;
    `lost` counts clients whose uploads were lost on the way. line: the round's line of
    metrics.jsonl. gone: the number of clients that dropped out after the download."""
    counts = {name: len(line.get(name, ())) for name in PARTICIPANTS}
    asked = counts.pop("participants")
    counts["folded"] = counts["folded"] if "folded" in line else asked
    counts["dropouts"] = gone
    counts["lost"] = max(0, asked - sum(counts.values()))
    return {f"participation/{name}": float(n) for name, n in {"asked": asked, **counts}.items()}


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a nested mapping by dotted name, without booleans."""
    return {
        key: float(value)
        for key, value in dotted(values)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def config(manifest: Mapping[str, Any]) -> dict[str, Value]:
    """Return the run's parameters by dotted name: hyperparameters, algorithm, data, versions and the digest.
    Empty values and values longer than LONGEST are left out; trackers keep the manifest, which has them."""
    known = {
        **manifest.get("experiment", {}),
        **{key: manifest.get(key) for key in ("experiment_sha256", "run", "commit", "versions")},
    }
    result: dict[str, Value] = {}
    for key, value in dotted(known):
        plain = json.dumps(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        if isinstance(plain, Value) and plain not in ("", "[]") and len(str(plain)) <= LONGEST:
            result[key] = plain
    return result
