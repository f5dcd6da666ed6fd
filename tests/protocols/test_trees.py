"""Edge servers, for every algorithm: one alone changes no bit, several change sums by rounding, and the duals
of all clients add up to the server's whatever is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.algorithm import Algorithm
from fedsim.errors import UsageError
from fedsim.problem import Problem
from fedsim.tree import sums_dims, sums_message
from fedsim.wire.envelope import encode
from fedsim.wire.ledger_rows import Entry
from fedsim.wire.schema import schema
from fedsim.wire.wire_size import field_headers
from launch.results.plan import plan
from protocols import REGISTRY
from tests.support.harness import Run, leaves, play, problem_of

Class = type[Algorithm[Any, Any, Any, Any]]
MIXED = "coin:0.8+gone:0.2+lost:0.2"
REFUSED = {
    "bcm": "needs every upload by itself",
    "fisher_merge": "needs every upload by itself",
    "fedlap_func": "a part that is one client's own",
    "fedlap_cov_func": "a part that is one client's own",
    "fedlap_func_public": "needs every upload by itself",
    "pooled": "is not federated",
}
"""Algorithms that cannot have edge servers, and why."""
TREES = [pytest.param(a, id=a.name) for a in REGISTRY if a.name not in REFUSED]


def problem(algorithm: Class, tree: str, **changes: Any) -> Problem:
    settings: dict[str, Any] = {"clients": 4, "rounds": 3, "participation": MIXED, "seed": 5} | changes
    return problem_of(algorithm, tree=tree, **settings)


@pytest.mark.parametrize("name", REFUSED)
def test_who_cannot_have_edge_servers_says_why(name: str) -> None:
    (algorithm,) = (a for a in REGISTRY if a.name == name)
    with pytest.raises(UsageError, match="--tree") as raised:
        problem(algorithm, "2x2")
    assert REFUSED[name] in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", TREES)
def test_one_edge_server_changes_no_bit(algorithm: Class, tmp_path: Path) -> None:
    flat = play(problem(algorithm, ""), tmp_path / "flat")
    alone = play(problem(algorithm, "1x4"), tmp_path / "tree")
    model, clients, server, versions, rows, metrics = alone.bits
    assert (model, clients, server, versions) == flat.bits[:4]
    assert [e for e in rows if not e.hop] == flat.bits[4]
    up = [e.bytes for e in flat.entries if e.message == "upload" and e.round]
    passed_on = [e.bytes for e in alone.entries if e.hop and e.direction == "up" and e.round]
    assert sum(passed_on) <= sum(up)  # without those that the schedule loses on their way
    shown = [{k: v for k, v in m.items() if k != "limits"} for m in flat.bits[5]]
    assert [{k: v for k, v in m.items() if not k.startswith("edge_")} for m in metrics] == shown


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", TREES)
def test_the_first_fold_of_a_tree_is_the_flat_one_up_to_rounding(algorithm: Class, tmp_path: Path) -> None:
    """One round: afterwards clients train from a broadcast that may differ in its last bit."""
    flat = play(problem(algorithm, "", rounds=1), tmp_path / "flat")
    run = play(problem(algorithm, "2x2", rounds=1), tmp_path / "tree")
    assert run.bits[1] == flat.bits[1] or algorithm.name == "fedep"  # clients do not see the sums
    pairs = zip(leaves(run.outcome.server), leaves(flat.outcome.server), strict=True)
    for (name, x), (_, y) in pairs:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
            scale = float(y.abs().max()) or 1.0
            assert float((x - y).abs().max()) / scale < 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", TREES)
def test_duals_add_up_and_the_plan_is_the_ledger(algorithm: Class, tmp_path: Path) -> None:
    (tmp_path / "uneven.toml").write_text('[edges]\nb = "1,3,0"\na = [2]\n')
    played = problem(algorithm, str(tmp_path / "uneven.toml"), rounds=4)
    run = play(played, tmp_path / "run")
    mismatch = played.algorithm.dual_mismatch(run.outcome.server, run.states)
    assert mismatch is None or mismatch < 1e-12
    created = plan(
        Problem.outline(played.experiment, played.algorithm, None), played.rounds.schedule(), run="run"
    )
    assert created.edges == by_field(run, "edge")
    assert created.bytes == by_field(run, "algorithm")


def by_field(run: Run, kind: str) -> Counter[tuple[str, str, str]]:
    counted: Counter[tuple[str, str, str]] = Counter()
    for e in run.entries:
        if e.kind == kind:
            counted[e.direction, e.field, e.layer] += e.bytes
    return counted


def test_what_crosses_the_hop_to_the_root(tmp_path: Path) -> None:
    """Four broadcasts and four sums in the place of twelve: 4 (2P x 4) down, 4 (2P x 8) up."""
    (algorithm,) = (a for a in REGISTRY if a.name == "fedlap_cov")
    run = play(problem(algorithm, "4x3", clients=12, rounds=2, participation="full"), tmp_path / "run")
    P = run.problem.net.layout.size

    def values(kind: str, message: str) -> int:
        rows = [e for e in run.entries if (e.kind, e.message, e.layer) == (kind, message, "values")]
        return sum(e.bytes for e in rows if e.field in ("mean", "shift", "precision"))

    assert values("edge", "relayed") == 2 * 4 * 2 * P * 4
    assert values("edge", "sums") == 2 * 4 * 2 * P * 8
    assert values("algorithm", "upload") == 2 * 12 * 2 * P * 4
    hops = Counter(e.hop for e in run.entries if e.message == "sums" and e.layer == "header")
    assert hops == {f"edge{e}": 2 for e in range(4)}
    down, up = (sum(e.bytes for e in rows(run) if e.direction == d) for d in ("down", "up"))
    assert (down, up) == tuple(
        sum(m[f"edge_bytes_{side}"] for m in run.metrics if m["round"]) for side in ("down", "up")
    )


@pytest.mark.parametrize("name", ["fedlap_cov", "ivon_admm", "mime", "fednova"])
def test_the_booked_size_of_sums_is_that_of_the_encoded_message(name: str) -> None:
    (algorithm,) = (a for a in REGISTRY if a.name == name)
    built = problem(algorithm, "2x2")
    for exchange in built.algorithm.exchanges:
        kind, dims = sums_message(exchange), sums_dims(exchange, built.messages.dims, uploads=3)
        values = {f.name: torch.zeros(f.shape(dims), dtype=torch.float64) for f in schema(kind)}
        sent = encode(kind(**values), {}, dims, layout=built.net.layout).fields
        booked, _ = field_headers(kind, {}, dims, built.net.layout)
        sizes = [
            [(f.name, f.codec, f.shape, [p.nbytes for p in f.parts]) for f in of] for of in (sent, booked)
        ]
        assert sizes[0] == sizes[1]


def rows(run: Run) -> list[Entry]:
    return [e for e in run.entries if e.kind == "edge"]
