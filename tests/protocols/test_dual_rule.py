"""The rule of the ADMM family: its algebra, the clipped cavity, the mismatch of duals, and the posterior's
check.

Relative errors are |found - exact| / |exact|; float64 throughout. Tolerances are about 100 times what was
measured, and not below 1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedsim.algorithm import At, Context
from fedsim.errors import TaskError
from fedsim.learning.gaussian import Gaussian, diagonal, is_full
from fedsim.learning.params import Layout
from fedsim.seeds import RandomStream
from protocols._dual_rule import ClippedCavity, Consensus, MeanFactor, Silent, clipped_cavity, proper
from protocols._site_algorithm import (
    DIAGONAL,
    FULL,
    POINT,
    ExponentialFamily,
    LocalProblem,
    SiteAlgorithm,
    SiteFit,
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


AT = At((1,) * K)


@dataclass(frozen=True)
class Member(SiteAlgorithm):
    """A member with these constants, whose client's problem is not solved here."""

    kind: str
    rho: float
    gamma: float
    rho_server: float
    silent: Silent = "participants"

    name: ClassVar[str] = "member"
    paper: ClassVar[str] = "none"
    default_model: ClassVar[str] = "logistic"

    @property
    def family(self) -> ExponentialFamily:
        return {"isotropic": POINT, "diagonal": DIAGONAL, "full": FULL}[self.kind]

    def prior(self, like: Tensor) -> Gaussian:
        return self.family.isotropic(like, DELTA)

    def penalty(self, at: At) -> float:
        return self.rho

    def cavity(self, q_g: Gaussian, site: Gaussian, at: At) -> Gaussian:
        return cavity_of(self.rho, q_g, site)

    def dual_step(self, q_k: Gaussian, q_g: Gaussian, at: At) -> Gaussian:
        return (q_k / q_g) ** self.gamma

    def server_step(self, prior: Gaussian, sites: Gaussian, mean_q: MeanFactor, at: At) -> Gaussian:
        merged = prior * sites * mean_q ** (self.rho_server * at.K)
        return merged if self.kind == "isotropic" else merged ** (1 / (1 + self.rho_server * at.K))

    def exponents(self, at: At) -> tuple[float, float]:
        return self.rho_server, self.gamma

    def solve(self, problem: LocalProblem) -> SiteFit:
        raise NotImplementedError


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
    member = Member(kind, 0.3, gamma, 0.1)
    dual = member.initial_dual(q, AT)
    assert dual.z is None
    assert float(dual.site.shift.norm()) == 0
    assert member.to_send(dual, local, q, AT) is local
    after = member.next_dual(dual, local, q, AT)
    assert torch.equal(after.site.shift, member.change(local, q, AT).shift)

    last = replace(member, silent="last")
    start = last.initial_dual(q, AT)
    assert start.z is not None
    assert apart(start.z, q**0.1) < TIGHT
    other = draw(5, kind)
    for result in (local, Gaussian(other.shift, q.precision) if fixed else other):
        before = start
        sent = last.to_send(start, result, q, AT)
        start = last.next_dual(start, sent, q, AT)
        assert start.z is not None
        expected = before.site * last.change(result, q, AT)
        assert error(start.site.shift, expected.shift) < TIGHT  # measured 3e-16
        assert apart(start.z, result**0.1 * expected) < TIGHT


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_lossy_codec_site_and_z_still_stand_for_one_q_k(kind: str) -> None:
    """z is what was sent; the site is the one whose q_k gives this z."""
    fixed = kind == "isotropic"
    q, local = draw(1, kind), draw(2, kind)
    local = Gaussian(local.shift, q.precision) if fixed else local
    member = Member(kind, 0.3, 0.2, 0.1, silent="last")
    dual = member.initial_dual(q, AT)
    sent = member.to_send(dual, local, q, AT)
    rounded = Gaussian(
        sent.shift.bfloat16().double(), 0.0 if fixed else torch.as_tensor(sent.precision).bfloat16().double()
    )
    after = member.next_dual(dual, rounded, q, AT)
    assert after.z is not None and dual.z is not None
    assert apart(after.z, dual.z * rounded) < TIGHT
    # t' = t (q_k / q)^gamma has q_k = q (t' / t)^(1/gamma)
    implied = q * (after.site / dual.site) ** (1 / 0.2)
    assert apart(implied**0.1 * after.site, after.z) < TIGHT
    assert 1e-5 < error(implied.shift, local.shift) < 0.1  # the codec was lossy


# ---- the server's part


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_silent_clients_count_as_the_mean_or_as_their_last(kind: str) -> None:
    ctx = Context(
        torch.zeros(D, dtype=torch.float64), Layout.vector(D), (1,) * K, 1, 1, RandomStream(0, "server", 1)
    )
    q, heard = draw(1, kind), {1: draw(2, kind), 3: draw(3, kind)}
    rho = 0.25
    a = 1 / (1 + rho * K)
    mean = (heard[1] * heard[3]) ** 0.5
    for silent, counted in (
        ("participants", [mean, heard[1], mean, heard[3]]),
        ("last", [q, heard[1], q, heard[3]]),
    ):
        member = Member(kind, rho, rho, rho, silent=silent)  # type: ignore[arg-type]
        dual, server = member.initial_dual(q, AT), member.consensus(q, AT)
        sums = member._sums(q, server.total)
        for x in heard.values():
            sent = member.to_send(dual, x, q, AT)
            up = member.family.upload(dual, sent, x, q, train_loss=0.0, dual_slack=0.0, capped=0.0)
            factors = member.with_upload(sums.factors, up, sums.q, None, at=AT)
            sums = sums.with_factors(*factors, sums.count + 1)
        server = member.from_sums(server, None, sums, ctx)
        expected = member.prior(ctx.start) * member.change(heard[1], q, AT) * member.change(heard[3], q, AT)
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
        member = Member("diagonal", 0.3, 0.2, 0.1, silent=silent)  # type: ignore[arg-type]
        server, dual = member.consensus(q, AT), member.initial_dual(q, AT)
        assert isinstance(server, Consensus) and not server.started
        assert apart(server.total * q, (dual.z or dual.site) ** K * q) < TIGHT
