"""The rule of the ADMM family: its algebra, the clipped cavity, the mismatch of duals, and the posterior's
check.

Relative errors are |found - exact| / |exact|; float64 throughout. Tolerances are about 100 times what was
measured, and not below 1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedsim.errors import TaskError
from fedsim.learning.gaussian import Gaussian, diagonal, identity, is_full
from protocols._dual_rule import (
    ClippedCavity,
    Consensus,
    Dual,
    DualRule,
    MeanFactor,
    Silent,
    clipped_cavity,
    proper,
)

K, D = 4, 6
DELTA = 30.0
"""Large enough for the posterior of random sites to be proper."""
TIGHT = 1e-13
KINDS = ["isotropic", "diagonal", "full"]


def error(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


def apart(a: Gaussian, b: Gaussian) -> float:
    """The larger of the two relative errors."""
    return max(error(a.shift, b.shift), error(torch.as_tensor(a.precision), torch.as_tensor(b.precision)))


def draw(seed: int, kind: str, *, proper: bool = True) -> Gaussian:
    """A random Gaussian, or a random factor with a precision of both signs."""
    draws = torch.Generator().manual_seed(seed)
    shift = torch.randn(D, generator=draws, dtype=torch.float64)
    if kind == "isotropic":
        return Gaussian(shift, 1.0 + seed / 7 if proper else -0.5)
    root = torch.randn((D, D) if kind == "full" else (D,), generator=draws, dtype=torch.float64)
    if kind == "full":
        square = root @ root.T + torch.eye(D, dtype=torch.float64)
        return Gaussian(shift, square if proper else root + root.T)
    return Gaussian(shift, 1 + root**2 if proper else root)


def rule_of(
    K: int,
    rho: float,
    gamma: float,
    rho_server: float,
    silent: Silent = "participants",
    fixed: bool = False,
) -> DualRule:
    """The rule of a member with these constants."""

    def server_step(prior: Gaussian, sites: Gaussian, mean_q: MeanFactor) -> Gaussian:
        merged = prior * sites * mean_q ** (rho_server * K)
        return merged if fixed else merged ** (1 / (1 + rho_server * K))

    return DualRule(
        K, rho, lambda k, q_k, q_g: (q_k / q_g) ** gamma, server_step, silent, (rho_server, gamma), fixed
    )


def fold(
    rule: DualRule,
    server: Consensus,
    q: Gaussian,
    prior: Gaussian,
    ups: list[tuple[int, Gaussian]],
    project: Callable[[Gaussian], Gaussian] = lambda merged: merged,
) -> Consensus:
    """The server's step from uploads (client, q_k or increment)."""
    total, averaged = server.total, None
    for k, sent in ups:
        total = rule.times_change(k, total, sent, q)
        if rule.silent == "participants":
            averaged = sent if averaged is None else averaged * sent
    return rule.stepped(q, total, MeanFactor(averaged, len(ups)), prior, project)


def cavity_of(rho: float, q: Gaussian, site: Gaussian) -> Gaussian:
    return q**rho / site


def clipped(rho: float, q: Gaussian, site: Gaussian, keep: float) -> ClippedCavity:
    return clipped_cavity(cavity_of(rho, q, site), q, site, rho, keep)


def dense(q: Gaussian) -> Tensor:
    """The precision as a matrix."""
    return (
        torch.as_tensor(q.precision) if is_full(q.precision) else torch.diag(diagonal(q.precision, q.shift))
    )


# ---- the client's part


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [0.3, 0.05])
def test_what_is_sent_and_committed_without_a_codec(kind: str, gamma: float) -> None:
    """participants: q_k itself; last: z_k' / z_k with z_k = q_k^rho_server t_k."""
    fixed = kind == "isotropic"
    q, local = draw(1, kind), draw(2, kind)
    if fixed:
        local = Gaussian(local.shift, q.precision)
    rule = rule_of(K, 0.3, gamma, 0.1, fixed=fixed)
    dual = rule.client_init(q)
    assert dual.z is None
    assert float(dual.site.shift.norm()) == 0
    assert rule.upload(0, dual, local, q) is local
    after = rule.commit(0, dual, local, q)
    assert torch.equal(after.site.shift, rule.dual_step(0, local, q).shift)

    last = replace(rule, silent="last")
    start = last.client_init(q)
    assert start.z is not None
    assert apart(start.z, q**0.1) < TIGHT
    other = draw(5, kind)
    for result in (local, Gaussian(other.shift, q.precision) if fixed else other):
        before = start
        sent = last.upload(0, start, result, q)
        start = last.commit(0, start, sent, q)
        assert start.z is not None
        expected = before.site * last.dual_step(0, result, q)
        assert error(start.site.shift, expected.shift) < TIGHT  # measured 3e-16
        assert apart(start.z, result**0.1 * expected) < TIGHT


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_lossy_codec_site_and_z_still_stand_for_one_q_k(kind: str) -> None:
    """z is what was sent; the site is the one whose q_k gives this z."""
    fixed = kind == "isotropic"
    q, local = draw(1, kind), draw(2, kind)
    local = Gaussian(local.shift, q.precision) if fixed else local
    rule = rule_of(K, 0.3, 0.2, 0.1, silent="last", fixed=fixed)
    dual = rule.client_init(q)
    sent = rule.upload(0, dual, local, q)
    rounded = Gaussian(
        sent.shift.bfloat16().double(), 0.0 if fixed else torch.as_tensor(sent.precision).bfloat16().double()
    )
    after = rule.commit(0, dual, rounded, q)
    assert after.z is not None and dual.z is not None
    assert apart(after.z, dual.z * rounded) < TIGHT
    # t' = t (q_k / q)^gamma has q_k = q (t' / t)^(1/gamma)
    implied = q * (after.site / dual.site) ** (1 / 0.2)
    assert apart(implied**0.1 * after.site, after.z) < TIGHT
    assert 1e-5 < error(implied.shift, local.shift) < 0.1  # the codec was lossy


# ---- the server's part


def uploads(rule: DualRule, q: Gaussian, kind: str, who: range) -> tuple[list[Dual], list[Gaussian]]:
    """Duals of all K clients before a round and the q_k of `who`."""
    duals = [rule.client_init(q) for _ in range(rule.K)]
    return duals, [Gaussian.at(draw(20 + k, kind).shift, draw(30 + k, kind).precision) for k in who]


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_silent_clients_count_as_the_mean_or_as_their_last(kind: str) -> None:
    like = torch.zeros(D, dtype=torch.float64)
    prior = Gaussian(like, identity(like, DELTA, full=kind == "full"))
    q, heard = draw(1, kind), {1: draw(2, kind), 3: draw(3, kind)}
    rho = 0.25
    a = 1 / (1 + rho * K)
    mean = (heard[1] * heard[3]) ** 0.5
    for silent, counted in (
        ("participants", [mean, heard[1], mean, heard[3]]),
        ("last", [q, heard[1], q, heard[3]]),
    ):
        rule = rule_of(K, rho, rho, rho, silent=silent)  # type: ignore[arg-type]
        dual = rule.client_init(q)
        ups = [(k, rule.upload(k, dual, x, q)) for k, x in heard.items()]
        server = fold(rule, rule.server_init(q), q, prior, ups)
        sites = rule.dual_step(1, heard[1], q) * rule.dual_step(3, heard[3], q)
        expected = prior * sites
        for x in counted:
            expected = expected * x**rho
        assert apart(server.q, expected**a) < TIGHT  # measured 2e-16


# ---- the clipped cavity


def generalised(matrix: Tensor, scale: Tensor) -> Tensor:
    """Eigenvalues of L^-1 M L^-T with scale = L L'."""
    root = torch.linalg.inv(torch.linalg.cholesky(scale))
    return torch.linalg.eigvalsh(root @ matrix @ root.T)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.3])
def test_clipped_cavity_holds_the_dual_and_keeps_the_gradient_at_the_mean(kind: str, keep: float) -> None:
    rho, q = 0.4, draw(1, kind)
    site = draw(2, kind, proper=False) ** 3
    free, correction = cavity_of(rho, q, site), clipped(rho, q, site, keep)
    assert generalised(dense(free), rho * dense(q))[0] < -0.5  # it does have something to hold
    ratios = generalised(dense(correction.factor), rho * dense(q))
    before = generalised(dense(free), rho * dense(q))
    torch.testing.assert_close(ratios, before.clamp(min=keep), rtol=0, atol=1e-12)
    gradient = dense(free) @ q.mean - free.shift
    assert error(dense(correction.factor) @ q.mean - correction.factor.shift, gradient) < TIGHT * 10  # 3e-16
    assert correction.capped == int((before < 0).sum()) > 0
    least = torch.linalg.eigvalsh(dense(free))[0]
    assert correction.slack == pytest.approx(float(least), rel=1e-12)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_clipped_cavity_is_the_cavity_where_nothing_needs_holding(kind: str) -> None:
    q = draw(1, kind)
    site = Gaussian(draw(2, kind).shift, 0.39 * torch.as_tensor(q.precision))
    correction = clipped(0.4, q, site, 0.01)
    assert apart(correction.factor, cavity_of(0.4, q, site)) < TIGHT
    assert correction.capped == 0
    assert correction.slack > 0


# ---- mismatch, residual, proper


@pytest.mark.parametrize("kind", KINDS)
def test_mismatch_sees_small_changes_of_every_number(kind: str) -> None:
    a = draw(1, kind)
    assert a.mismatch(a) == 0 and a.mismatch(a**2) == pytest.approx(0.5)
    for i in range(D):
        changed = a.shift.clone()
        changed[i] += 1e-6
        assert a.mismatch(Gaussian(changed, a.precision)) > 1e-9
        if isinstance(a.precision, Tensor):
            other = a.precision.clone()
            other[i] = other[i] * (1 + 1e-6)
            assert a.mismatch(Gaussian(a.shift, other)) > 1e-9
    zero = Gaussian(torch.zeros(D), 0.0)
    assert zero.mismatch(zero) == 0 and zero.mismatch(a) == 1


@pytest.mark.parametrize(
    ("spoil", "output"),
    [
        (
            lambda s: s.index_fill(0, torch.tensor([1, 4]), -3.0),
            r"is not positive in 2 of 6 entries \(smallest -3\).*raise rho",
        ),
        (
            lambda s: s.index_fill(0, torch.tensor([2]), 0.0),
            r"is not positive in 1 of 6 entries \(smallest 0\).*raise rho",
        ),
        (
            lambda s: s.index_fill(0, torch.tensor([2]), math.nan),
            r"1 values that are not finite.*smaller steps",
        ),
        (lambda s: torch.diag(s - 100), r"is not positive definite.*raise rho"),
    ],
    ids=["negative", "zero", "nan", "matrix"],
)
def test_an_improper_posterior_is_refused_and_named(spoil: Callable[[Tensor], Tensor], output: str) -> None:
    q = draw(1, "diagonal")
    with pytest.raises(TaskError, match=f"the thing.*{output}"):
        proper(Gaussian(q.shift, spoil(torch.as_tensor(q.precision))), "the thing")


@pytest.mark.parametrize("kind", ["isotropic", "diagonal"])
def test_a_mean_that_is_not_finite_is_not_called_a_bad_precision(kind: str) -> None:
    q = draw(1, kind)
    with pytest.raises(TaskError) as caught:
        proper(Gaussian(q.shift * math.inf, q.precision), "the thing")
    assert "0 of" not in str(caught.value)
    assert "finite" in str(caught.value)


def test_server_init_has_the_product_of_all_clients_duals() -> None:
    q = draw(1, "diagonal")
    for silent in ("participants", "last"):
        rule = rule_of(K, 0.3, 0.2, 0.1, silent=silent)  # type: ignore[arg-type]
        server, dual = rule.server_init(q), rule.client_init(q)
        assert isinstance(server, Consensus) and not server.started
        assert apart(server.total * q, (dual.z or dual.site) ** K * q) < TIGHT
