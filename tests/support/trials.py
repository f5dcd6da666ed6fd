"""What both kinds of chaos trials (tests.chaos, tests.chaos_remote) have in common: faults, outcomes, and
what must be the same as in a run that nobody disturbed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.reproducible import without_seconds

EXPERIMENT = (
    *("--algo", "fedlap_cov", "--clients", "6", "--rounds", "10", "--model", "logistic"),
    *("--participation", "0.7+lost:0.2", "--set", "local.epochs=20"),
)
ROUNDS = 10


@dataclass(frozen=True)
class Fault:
    """round: hits so many seconds after this round was reported; None: after the last fault, or the start.

    place: which of the remote workers, counted round and round. amount: how much of it, in seconds.
    """

    what: str
    round: int | None
    seconds: float
    position: int = 0
    amount: float = 0.0


@dataclass
class Trial:
    seed: int
    faults: list[Fault]
    hit: list[str] = field(default_factory=list)
    """What happened really: a plan may outlast its run."""
    identical: bool = False
    left: list[int] = field(default_factory=list)
    """Processes that outlived their run."""
    trouble: list[str] = field(default_factory=list)
    """What ended or stood still for no fault of ours."""

    @property
    def good(self) -> bool:
        return self.identical and not self.left and not self.trouble

    def __str__(self) -> str:
        end = "identical" if self.identical else "DIFFERENT"
        output = (
            f"seed {self.seed}: {', '.join(self.hit) or 'nothing hit'}; {end}; left over: {self.left or 0}"
        )
        return output + "".join(f"\n    {line}" for line in self.trouble)


def facts(folder: Path) -> dict[str, Any]:
    """All that must be the same: digests, who took part, metrics."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = (
        "status",
        "rounds",
        "model_sha256",
        "clients_sha256",
        "took_part",
        "folded",
        "bytes_up",
        "bytes_down",
    )
    return {key: summary[key] for key in keys} | {"metrics": without_seconds(lines)}


def done(folder: Path) -> bool:
    """The run has ended by itself, as its summary says."""
    path = folder / "summary.json"
    return path.exists() and bool(json.loads(path.read_text())["status"] == "done")


def same(folder: Path, expected: dict[str, Any]) -> bool:
    return (folder / "summary.json").exists() and facts(folder) == expected
