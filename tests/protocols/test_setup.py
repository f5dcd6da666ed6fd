"""precond_admm's set-up through the launcher: what round 0 costs, and what everybody knows after it."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from fedsim.seeds import RandomStream
from protocols.precond_admm import PrecondADMM
from workers.storage.checkpoints import read_checkpoint
from workers.storage.client_states import ClientStates

P, CLIENTS = 640, 4
COMMON: dict[str, Any] = {
    "algo": "precond_admm",
    "model": "logistic",
    "clients": CLIENTS,
    "rounds": 2,
    "participation": "2",
}

Launched = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def _numerics() -> Iterator[None]:
    """A launch in this process changes torch's settings, which other tests must not feel."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ledger(folder: Path) -> list[dict[str, str]]:
    with (folder / "ledger.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["kind"] == "algorithm"]


def states(folder: Path, setup: int) -> list[Any]:
    """Of all clients as they were last folded; a client without any version has none."""
    manifest = json.loads((folder / "manifest.json").read_text())
    last = sorted((folder / "checkpoints").glob("*.checkpoint"))[-1]
    versions = read_checkpoint(last, PrecondADMM.server_type).versions.tolist()
    assert len(versions) == manifest["experiment"]["clients"]
    assert max(versions) > setup
    correction = ClientStates(folder / "state", PrecondADMM.client_type)
    return [correction.load(k, v) if v else None for k, v in enumerate(versions)]


@pytest.fixture
def result(launched: Launched) -> Path:
    return launched("found", **COMMON, hyperparameters={"epochs": 1})


def test_round_0_is_everyone_and_its_bytes_are_those_of_the_ledger(result: Path) -> None:
    line, first, *_ = metrics(result)
    assert (line["round"], line["participants"]) == (0, list(range(CLIENTS)))
    assert len(first["participants"]) == 2
    mine = [row for row in ledger(result) if row["round"] == "0"]
    for direction in ("down", "up"):
        assert line[f"bytes_{direction}"] == sum(int(r["bytes"]) for r in mine if r["direction"] == direction)
    values = {
        (int(r["exchange"]), int(r["client"]), r["direction"], r["field"]): int(r["bytes"])
        for r in mine
        if r["layer"] == "values"
    }
    assert values == {
        **{(1, k, "up", "curvature"): 4 * P for k in range(CLIENTS)},
        **{(2, k, "down", "precision"): 4 * P for k in range(CLIENTS)},
    }
    layers = Counter((r["direction"], r["layer"]) for r in mine)
    assert layers == {
        **{(d, layer): 2 * CLIENTS for d in ("down", "up") for layer in ("header", "framing")},
        ("up", "values"): CLIENTS,
        ("down", "values"): CLIENTS,
    }
    overhead = sum(int(r["bytes"]) for r in mine if r["layer"] in ("header", "framing"))
    assert line["bytes_down"] + line["bytes_up"] == 2 * CLIENTS * 4 * P + overhead
    assert 0 < overhead < 4 * CLIENTS * 300


def test_everybody_has_the_same_positive_precision(result: Path) -> None:
    """S = (sum_k H_k + delta I) / K, as it came over the wire."""
    correction = [state.precision for state in states(result, 2)]
    assert len(correction) == CLIENTS
    for S in correction:
        assert S.shape == (P,) and S.dtype == torch.float64
        assert torch.equal(S, correction[0])
        assert float(S.min()) > 0
    checkpoint = sorted((result / "checkpoints").glob("*.checkpoint"))[-1]
    server = read_checkpoint(checkpoint, PrecondADMM.server_type).server
    assert torch.equal(torch.as_tensor(server.q.precision), correction[0])
    experiment = Experiment(**COMMON)
    problem = Problem.build(experiment, build_algorithm(PrecondADMM, {}), None)
    curvature = torch.zeros(P, dtype=torch.float64)
    for k in range(CLIENTS):
        curvature += problem.shard(k).curvature(problem.start, "exact", RandomStream(0, "any"))
    expected = (curvature + PrecondADMM().delta) / CLIENTS
    # H_k and S are rounded to float32 on their way
    assert float(((correction[0] - expected) / expected).abs().max()) < 1e-6
    assert float(correction[0].max() / correction[0].min()) > 10  # it is no multiple of the identity


def test_a_given_preconditioner_needs_no_setup(launched: Launched) -> None:
    run = launched("given", **COMMON, hyperparameters={"epochs": 1, "preconditioner": 10.0})
    assert not [row for row in ledger(run) if row["round"] == "0"]
    line = metrics(run)[0]
    assert (line["round"], line["participants"], line["bytes_down"], line["bytes_up"]) == (0, [], 0, 0)
    assert {s.precision for s in states(run, 0) if s is not None} == {10.0}
    assert PrecondADMM(preconditioner=10.0).setup == ()


def test_no_rounds_with_a_setup_is_the_setup(launched: Launched) -> None:
    run = launched("none", **(COMMON | {"rounds": 0}))
    (line,) = metrics(run)
    assert line["participants"] == list(range(CLIENTS))
    assert line["bytes_up"] > 4 * P * CLIENTS
    assert {row["round"] for row in ledger(run)} == {"0"}
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
