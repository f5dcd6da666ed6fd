"""Run folders that were never run, for the tests of what compares them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

COLUMNS = "kind,round,exchange,client,worker,direction,message,field,layer,codec,dense_bytes,bytes"
MB = 1_000_000
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes the folder of a run that was never run."""

    def write(
        name: str,
        accuracies: Sequence[float | None] = (0.1, 0.5, 0.6),
        *,
        cost: int = MB,
        rounds: Sequence[int] | None = None,
        status: str | None = "done",
        hyperparameters: dict[str, Any] | None = None,
        codecs: dict[str, str] | None = None,
        simulated: float | None = None,
        **experiment: Any,
    ) -> Path:
        """accuracies: of the start, and after every evaluated round; cost: bytes of a round in each
        direction."""
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        numbers = list(rounds or range(len(accuracies)))
        described = {"algo": "fedavg", "dataset": "digits", "clients": 4, "rounds": numbers[-1], "seed": 0}
        described |= {"params": 1000, "client_sizes": [len(name)], "partition": "iid"}
        described |= {"hyperparameters": hyperparameters or {"local.lr": 0.1}, "codecs": codecs or {}}
        manifest = {"format": 1, "wire": 3, "run": name, "experiment": described | experiment}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        timed = {} if simulated is None else {"simulated_seconds": simulated}
        lines = [
            {"round": n, "test_accuracy": a, "test_nll": 1 - (a or 0)}
            | {"bytes_down": cost * bool(n), "bytes_up": cost * bool(n), **(timed if n else {})}
            for n, a in zip(numbers, accuracies, strict=True)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows = [
            f"algorithm,{n},1,0,0,{side},task,mean,values,dense,{cost},{cost}"
            for n in range(1, numbers[-1] + 1)
            for side in ("down", "up")
        ]
        (folder / "ledger.csv").write_text("\n".join([COLUMNS, *rows, ""]))
        if status:
            sent = {"mean": {"values": cost * numbers[-1]}}
            summary = {"format": 1, "status": status, "bytes": {"algorithm": {"down": sent, "up": sent}}}
            summary |= {"units_of_p_down": cost / 4000, "units_of_p_up": cost / 4000, "error": None}
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return write
