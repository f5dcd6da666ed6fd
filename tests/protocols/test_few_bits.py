"""Duals under codecs of a few bits: when they reach the fixed point of exact messages."""

from __future__ import annotations

from typing import Any

import pytest

from fedsim.experiment import build_algorithm
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
    [
        ("27%", 0.5, True),
        ("11%", "1/K", True),
        ("27%", 1.0, False),
        ("11%", 0.5, False),
    ],
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
