"""Duals under codecs of a few bits: when they reach the fixed point of exact messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from fedsim.experiment import build_algorithm
from fedsim.wire.codec_selection import bias_remarks, noise_remarks, select_codecs
from fedsim.wire.codecs import codec
from protocols import find

CLIENTS, ROUNDS = 5, 300
FLOAT32 = 1e-6
"""A bound of the relative error that float32 messages leave: 20 roundings of 6e-8."""


def error_after(quadratics: Any, rho: float | str, codecs: dict[str, str], rounds: int = ROUNDS) -> float:
    """|w - w*| / |w*| of fedlap_cov, which is exact for quadratics with diagonal Hessians."""
    shards = quadratics.regressions(clients=CLIENTS, dims=40, spread=0.2, diagonal=True)
    algorithm = build_algorithm(find("fedlap_cov"), {"local.optimiser": "exact", "delta": 1.0, "rho": rho})
    federation = quadratics.Federation(algorithm, shards, codecs={"down": {}, "up": codecs})
    for _ in range(rounds):
        federation.play()
    return float(quadratics.error(federation.mean, quadratics.minimiser(shards, 1.0)))


@pytest.mark.parametrize(
    ("step", "rho", "converges"),
    [("27%", 0.5, True), ("11%", "1/K", True), ("27%", 1.0, False), ("11%", 0.5, False)],
)
def test_random_rounding_reaches_the_fixed_point_where_it_is_stable(
    quadratics: Any, step: str, rho: float | str, converges: bool
) -> None:
    """A site's squared error changes by (1 - rho)^2 + rho^2 omega a round: it falls if rho (1 + omega) < 2.

    For normal numbers of which a share p is not 0 after rounding, 1 + omega = 2 / (pi p): 2.4 and 5.8 here.
    """
    error = error_after(quadratics, rho, {"mean": f"sigma:{step}+random"})
    assert error < FLOAT32 if converges else error > 1


def test_a_random_precision_as_well(quadratics: Any) -> None:
    codecs = {"mean": "sigma:11%+random", "precision": "ratio:1.5+random"}
    assert error_after(quadratics, "1/K", codecs) < FLOAT32


def test_rounding_to_the_nearest_reaches_it_too_by_the_largest_changes_first(quadratics: Any) -> None:
    """As EF21 does (Richtarik et al., arXiv:2106.05203): changes that are not sent stay in later ones."""
    assert error_after(quadratics, "1/K", {"mean": "sigma:10%"}) < FLOAT32


def test_a_step_in_standard_deviations_leaves_an_error_however_it_rounds(quadratics: Any) -> None:
    for flag in ("", "+random"):
        assert error_after(quadratics, "1/K", {"mean": f"sigma:0.5{flag}"}) > 0.01


# ---- the posterior's precision, which neither the mean nor accuracy shows

PRECISIONS = ("bf16", "f16", "log8", "ratio:0.05", "ratio:0.25", "ratio:1.0", "ratio:0.25+nearest", "csr:0.5")


def precision_after(quadratics: Any, clients: int, name: str, rounds: int = ROUNDS) -> Tensor:
    """S_g over the exact S_g, (P,), after 300 rounds in which one codec takes the uploaded precision."""
    shards = quadratics.regressions(clients=clients, dims=40, spread=0.2, diagonal=True)
    algorithm = build_algorithm(find("fedlap_cov"), {"local.optimiser": "exact", "delta": 1.0})
    sides = select_codecs({"up.precision": name} if name else {}, algorithm.exchanges, False)
    federation = quadratics.Federation(algorithm, shards, codecs=dict(sides))
    for _ in range(rounds):
        federation.play()
    exact = 1.0 + sum(shard.hessian.diagonal() for shard in shards)
    precision: Tensor = federation.server.sites.precision + 1.0
    return precision / exact


@pytest.mark.parametrize("clients", [5, 10])
@pytest.mark.parametrize("name", ["", *PRECISIONS])
def test_the_posteriors_precision_is_exact_unbiased_or_within_the_bound_that_is_said(
    quadratics: Any, name: str, clients: int
) -> None:
    share = precision_after(quadratics, clients, name)
    selected = codec(name or "dense")
    bias = codec(selected.upwards or selected.name).bias
    if not name:
        assert float((share - 1).abs().max()) < FLOAT32
    elif not bias:  # unbiased: within four standard errors of the mean over the parameters
        assert abs(float(share.mean()) - 1) < 4 * float(share.std()) / math.sqrt(len(share)) + FLOAT32
    elif bias < math.inf:
        least = 1 / (1 + clients * math.expm1(bias))
        assert least * (1 - FLOAT32) <= float(share.min()) and float(share.max()) <= 1 / least * (1 + FLOAT32)


@pytest.mark.parametrize(("clients", "at_most"), [(5, 0.8), (10, 0.65)])
def test_rounding_to_the_nearest_does_change_it(quadratics: Any, clients: int, at_most: float) -> None:
    """So that the test above can fail: a fifth to a third of the precision is lost."""
    assert float(precision_after(quadratics, clients, "ratio:0.25+nearest").mean()) < at_most


def test_a_biased_codec_is_said_at_the_start() -> None:
    exchanges = build_algorithm(find("fedlap_cov"), {}).exchanges
    (line,) = bias_remarks({"precision": "ratio:0.25+nearest"}, exchanges, True, 10)
    assert "may fall to 0.43 of the exact one" in line
    assert bias_remarks({"precision": "ratio:0.25+random", "mean": "bf16"}, exchanges, True, 10) == ()


def test_random_rounding_that_a_dual_step_amplifies_is_said() -> None:
    """rho (1 + omega) < 2 with 1 + omega = 2 / (pi p): at rho = 1/K, 5 % need seven clients."""
    remarks = {k: noise_remarks({"mean": "sigma:5%+random"}, 1 / k) for k in (6, 7)}
    assert remarks[7] == () and "sigma:5.3%+random or more would" in remarks[6][0]
    for name in ("sigma:5%+dither", "sigma:auto+dither", "bf16"):
        assert noise_remarks({"mean": name}, 0.5) == ()
    assert noise_remarks({"mean": "sigma:5%+random"}, 1.0) == ()  # not damped: another rule
