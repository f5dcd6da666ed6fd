"""Sums of edge servers by lossy codecs: the server's sum and the remainders are the clients' duals, and the
fixed point is that of exact sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.algorithm import Context
from fedsim.compressed_sums import LEAST, CompressedSums, Remainder, coded, to_posteriors, to_sums
from fedsim.errors import UsageError
from fedsim.experiment import build_algorithm
from fedsim.problem import Problem
from fedsim.wire.envelope import decode_own, encode
from fedsim.wire.message_context import codec_stream, of_sums
from fedsim.wire.schema import Mean, Precision, schema
from launch.results.plan import plan
from protocols import find
from tests.support.harness import leaves, play, problem_of

FINE = {"edge.mean": "sigma:0.05+dither", "edge.precision": "ratio:0.1"}
PRODUCTS = {name.replace("edge.", "edge.product_"): codec for name, codec in FINE.items()}
AVERAGING = ("ivon_admm", "bregman_admm")
"""Algorithms whose edge servers also send the product of the q_k."""
LOSSY = (*AVERAGING, "pvi", "ivon_pvi", "fedgvi", "fedlap_cov", "fedep")


def problem(name: str, **changes: Any) -> Problem:
    codecs = FINE | (PRODUCTS if name in AVERAGING else {})
    lossy = {"clients": 4, "rounds": 4, "tree": "2x2", "seed": 5, "codecs": codecs}
    return problem_of(find(name), **lossy | changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSY)
def test_the_servers_sum_and_the_remainders_are_the_clients_duals(name: str, tmp_path: Path) -> None:
    """Relative 1e-12, under losses, dropouts and uneven edge servers; the plan is a bound."""
    (tmp_path / "uneven.toml").write_text('[edges]\nb = "1,3,0"\na = [2]\n')
    mixed = {"tree": str(tmp_path / "uneven.toml"), "participation": "coin:0.8+gone:0.2+lost:0.2"}
    played = problem(name, **mixed)
    run = play(played, tmp_path / "run")
    server = run.outcome.server
    assert all(float(r.abs().max()) > 0 for left in server.remainders for r in left.values)
    mismatch = played.algorithm.dual_mismatch(server, run.states)
    assert mismatch is not None and mismatch < 1e-12
    without = played.algorithm.inner.dual_mismatch(server.inner, run.states)  # type: ignore[attr-defined]
    assert without > 1e-9
    sent = sum(e.bytes for e in run.entries if e.kind == "edge" and e.direction == "up" and e.round)
    outline = Problem.outline(played.experiment, played.algorithm.unwrapped, None)
    most = plan(outline, played.schedule(), run="run").edges
    assert 0 < sent <= sum(n for (side, _, _), n in most.items() if side == "up")
    exact = problem(name, codecs={}, **mixed)
    assert 5 * sent < sum(n for (_, field, _), n in by_field(exact).items() if field != "scalars")


def by_field(exact: Problem) -> dict[tuple[str, str, str], int]:
    """Bytes of exact sums, from the plan."""
    edges = plan(Problem.outline(exact.experiment, exact.algorithm, None), exact.schedule(), run="run").edges
    return {key: n for key, n in edges.items() if key[0] == "up"}


def test_float32_changes_a_round_by_its_rounding(tmp_path: Path) -> None:
    """Natural parameters of one round, relative to the largest: 20 roundings of 6e-8."""
    half = play(problem("fedlap_cov", codecs={"edge.mean": "zstd"}, rounds=1), tmp_path / "coded")
    exact = play(problem("fedlap_cov", codecs={}, rounds=1), tmp_path / "exact")
    pairs = zip(leaves(half.outcome.server.inner), leaves(exact.outcome.server), strict=True)
    for (name, x), (_, y) in pairs:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
            assert float((x - y).abs().max()) <= FLOAT32 * float(y.abs().max()), name


@dataclass(frozen=True)
class Broadcast:
    mean: Mean
    precision: Precision


@pytest.mark.parametrize("name", ["fedlap_cov", "ivon_admm"])
def test_sums_are_those_of_the_posteriors_that_are_sent(name: str) -> None:
    """Relative 1e-12 where the precision is above its limit; below, the precision is the limit."""
    sums = problem(name).algorithm.exchanges[0].sums
    assert sums is not None
    draws = torch.Generator().manual_seed(0)
    normal = lambda: torch.randn(50, generator=draws, dtype=torch.float64)  # noqa: E731
    down = Broadcast(normal(), normal().exp())
    values = {f.name: normal() if f.python is torch.Tensor else 3.0 for f in schema(sums)}
    for f in schema(sums):
        if f.kind.natural == "precision":
            values[f.name] = (
                3 * normal().exp() if f.kind.centred else -0.9 * down.precision * normal().sigmoid()
            )
    values["precision"][0] = -2.0 * down.precision[0]
    kind = coded(sums)
    assert kind is not None
    again = to_sums(sums, kind(**to_posteriors(sums, values, down, 3)), down, 3)
    for name, value in values.items():
        back = getattr(again, name)
        if isinstance(value, float):
            assert back == value
            continue
        assert torch.allclose(back[1:], value[1:], rtol=1e-12, atol=1e-12 * float(value.abs().max())), name
    assert torch.isclose(again.precision[0], (LEAST - 1) * down.precision[0], rtol=1e-12)
    assert torch.isclose(again.shift[0], values["shift"][0], rtol=1e-9)


# ---- the fixed point


@dataclass(frozen=True)
class TwoEdges(CompressedSums):
    """Folds a round's uploads through two edge servers; the first has two clients."""

    codecs: tuple[tuple[str, str], ...] = ()

    def server_update(self, server: Any, down: Any, ups: Iterable[tuple[int, Any]], ctx: Context) -> Any:
        kind, layout, every = self.exchanges[0].sums, ctx.layout, list(ups)
        assert kind is not None
        sent_as, codecs, dims = coded(kind), dict(self.codecs), {"P": len(ctx.start)}
        assert sent_as is not None
        sums, new = self.sums(server, down, ctx), dict[int, Remainder]()
        for edge, own in enumerate((every[:2], every[2:])):
            change = self.added(self.no_sums(down, ctx), down, own, ctx)
            owed = server.remainders[edge].values if server.remainders[edge] else (0.0,) * len(self.fields)
            due = {f.name: self.sum_of(change, f.name) for f in schema(kind)}
            due |= {name: due[name] + r for name, r in zip(self.fields, owed, strict=True)}
            context = of_sums(down, schema(sent_as), codec_stream(0, ctx.round, 1, edge))
            message = sent_as(**to_posteriors(kind, due, down, len(own)))
            payload = encode(message, codecs, dims, context, layout)
            back = to_sums(kind, decode_own(sent_as, payload, codecs, dims, context, layout), down, len(own))
            new[edge] = Remainder(tuple(due[name] - getattr(back, name) for name in self.fields))
            sums = self.merged(sums, back)
        return self.with_remainders(self.from_sums(server, down, sums, ctx), new)


def error_after(quadratics: Any, codecs: dict[str, str], rounds: int = 300) -> float:
    """|w - w*| / |w*| of fedlap_cov, which is exact for quadratics with diagonal Hessians."""
    shards = quadratics.regressions(clients=5, dims=40, spread=0.2, diagonal=True)
    settings = {"local.optimiser": "exact", "delta": 1.0, "rho": "1/K"}
    inner = build_algorithm(find("fedlap_cov"), settings)
    federation = quadratics.Federation(
        TwoEdges(inner, 2, tuple(codecs.items())), shards, codecs={"down": {}, "up": {}}
    )
    for _ in range(rounds):
        federation.play()
    return float(quadratics.error(federation.mean, quadratics.minimiser(shards, 1.0)))


FLOAT32 = 1e-6
"""A bound of the relative error that float32 messages leave: 20 roundings of 6e-8."""


@pytest.mark.parametrize("mean", ["dense", "sigma:auto", "sigma:auto+dither"])
def test_a_step_that_follows_the_message_reaches_the_fixed_point(quadratics: Any, mean: str) -> None:
    assert error_after(quadratics, {"mean": mean}) < FLOAT32


@pytest.mark.parametrize("flag", ["", "+dither"])
def test_a_step_of_c_leaves_an_error_of_the_order_of_c(quadratics: Any, flag: str) -> None:
    """Two edge servers owe at most c standard deviations of the posterior together."""
    c = 0.5
    shards = quadratics.regressions(clients=5, dims=40, spread=0.2, diagonal=True)
    precision = torch.stack([s.hessian.diagonal() for s in shards]).sum(0) + 1.0
    bound = float((c / precision.sqrt()).norm() / quadratics.minimiser(shards, 1.0).norm())
    error = error_after(quadratics, {"mean": f"sigma:{c}{flag}"})
    assert FLOAT32 < error <= bound * (1 + 1e-3)  # S of the broadcast is that of the last round


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"codecs": {"edge.mean": "sigma:10%"}}, "need not shrink when the edge server adds it"),
        ({"codecs": {"edge.mean": "sigma:0.1+random"}}, "need not shrink when the edge server adds it"),
        ({"codecs": {"edge.mean": "qsgd:4"}}, "need not shrink when the edge server adds it"),
        ({"codecs": {"edge.precision": "csr:0.1"}}, "need not shrink when the edge server adds it"),
        ({"name": "ivon_admm", "codecs": {"edge.count": "bf16"}}, "unknown message field 'count'"),
        ({"codecs": {"edge.mean": "sigma:0.1+last"}}, "a sum refers to its broadcast; write sigma:0.1"),
        ({"codecs": {"edge.mean": "delta+zstd"}}, "a sum refers to its broadcast; write zstd"),
        ({"codecs": {"edge.mean": "ratio:0.1"}}, "it is for a precision or a curvature"),
        (
            {"codecs": {"edge.train_loss": "bf16"}},
            "no sum of this run has the field 'train_loss', which its uploads",
        ),
        ({"codecs": {"edge.shift": "bf16"}}, "unknown message field 'shift'"),
        ({"codecs": FINE, "tree": "1x4"}, "only with --tree and at least two of them"),
        ({"codecs": FINE, "tree": ""}, "only with --tree and at least two of them"),
        ({"codecs": FINE, "participation": "full+event:norm:1"}, "leave \\+event and \\+quiet out"),
        ({"covariance": "full", "name": "pvi"}, "only if it is of natural parameters"),
        ({"name": "fedadmm", "codecs": {"edge.mean": "bf16"}}, "only if it is of natural parameters"),
        ({"name": "fedavg", "codecs": {"edge.total": "zstd"}}, "only if it is of natural parameters"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], why: str) -> None:
    name, covariance = changes.pop("name", "fedlap_cov"), changes.pop("covariance", "")
    settings = {"covariance": covariance} if covariance else {}
    with pytest.raises(UsageError, match=why):
        problem_of(find(name), settings, **{"clients": 4, "tree": "2x2", "codecs": FINE} | changes)
