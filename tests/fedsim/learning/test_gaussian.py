"""Gaussian factors by natural parameters: algebra against log densities, penalties against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.learning.gaussian import Distance, Gaussian, Penalty

P = 6
EXACT = 1e-13  # relative, float64; the algebra is a handful of roundings


def vector(seed: int) -> Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factor(seed: int, kind: str) -> Gaussian:
    """A proper Gaussian with a random mean."""
    precision = vector(seed + 50).exp()
    return Gaussian.at(vector(seed), precision if kind == "diagonal" else float(precision[0]))


def log_factor(g: Gaussian, w: Tensor) -> Tensor:
    """shift . w - 1/2 w' S w."""
    return g.shift @ w - 0.5 * (g.precision * w * w).sum()


KINDS = [("diagonal", "diagonal"), ("isotropic", "isotropic"), ("diagonal", "isotropic")]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_algebra_is_that_of_the_densities(kinds: tuple[str, str]) -> None:
    a, b, w = factor(1, kinds[0]), factor(2, kinds[1]), vector(3)
    la, lb = log_factor(a, w), log_factor(b, w)
    torch.testing.assert_close(log_factor(a * b, w), la + lb, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(log_factor(a / b, w), la - lb, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(log_factor(a**0.3, w), 0.3 * la, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(log_factor(a**-1, w), -la, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_product_has_the_precision_weighted_mean(kinds: tuple[str, str]) -> None:
    a, b = factor(1, kinds[0]), factor(2, kinds[1])
    product = a * b
    expected = (a.precision * vector(1) + b.precision * vector(2)) / (a.precision + b.precision)
    torch.testing.assert_close(product.mean, expected, rtol=EXACT, atol=EXACT)
    back = product / b
    torch.testing.assert_close(back.mean, vector(1), rtol=1e-12, atol=1e-12)  # a difference


@pytest.mark.parametrize("kind", ["diagonal", "isotropic"])
def test_at_is_the_gaussian_of_this_mean_in_float64(kind: str) -> None:
    mean = vector(1).float()
    precision = vector(2).exp().float() if kind == "diagonal" else 0.3
    g = Gaussian.at(mean, precision)
    assert g.shift.dtype == torch.float64
    assert not isinstance(g.precision, Tensor) or g.precision.dtype == torch.float64
    torch.testing.assert_close(g.mean, mean.double(), rtol=EXACT, atol=0)


def test_a_site_may_have_zero_or_negative_precision() -> None:
    site = Gaussian(vector(1), 0.0)
    q = Gaussian.at(vector(2), 2.0)
    torch.testing.assert_close((q / site).mean, vector(2) - vector(1) / 2.0, rtol=EXACT, atol=EXACT)
    assert (site / q).precision == -2.0


def test_operations_leave_their_operands_alone() -> None:
    a, b = factor(1, "diagonal"), factor(2, "diagonal")
    before = [t.clone() for g in (a, b) for t in (g.shift, torch.as_tensor(g.precision))]
    a * b, a / b, a**0.5, a.mean, a.to(torch.zeros(1))
    after = [t for g in (a, b) for t in (g.shift, torch.as_tensor(g.precision))]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_to_takes_the_dtype_of_the_weights() -> None:
    narrow = factor(1, "diagonal").to(torch.zeros(1))
    assert narrow.shift.dtype == torch.float32
    assert isinstance(narrow.precision, Tensor)
    assert narrow.precision.dtype == torch.float32
    assert factor(1, "isotropic").to(torch.zeros(1)).precision == factor(1, "isotropic").precision


def value(penalty: Penalty, w: Tensor) -> Tensor:
    if isinstance(penalty, Gaussian):
        return -log_factor(penalty, w)
    return penalty.strength / 2 * (w - penalty.centre).norm()


@pytest.mark.parametrize(
    "penalty",
    [
        factor(1, "diagonal"),
        factor(1, "isotropic"),
        factor(1, "diagonal") / factor(2, "diagonal"),
        Gaussian(vector(1), 0.0) ** -1,
        Distance(vector(1), 0.7),
    ],
    ids=["diagonal", "isotropic", "quotient", "linear", "distance"],
)
def test_penalty_gradient_is_that_of_autograd(penalty: Penalty) -> None:
    w = vector(9).requires_grad_()
    (expected,) = torch.autograd.grad(value(penalty, w), w)
    there = vector(8)
    grads = there.clone()
    penalty.add_gradient(w.detach(), grads)  # adds to what is there
    torch.testing.assert_close(grads - there, expected, rtol=1e-12, atol=1e-12)


def test_distance_pulls_with_half_its_strength_whatever_the_distance() -> None:
    for scale in (1e-3, 1.0, 1e3):
        grads = torch.zeros(P, dtype=torch.float64)
        Distance(vector(1), 0.7).add_gradient(vector(1) + scale * vector(2), grads)
        assert float(grads.norm()) == pytest.approx(0.35, rel=1e-12)


def test_distance_has_no_gradient_at_its_centre() -> None:
    grads = vector(3)
    Distance(vector(1), 0.7).add_gradient(vector(1), grads)
    assert torch.equal(grads, vector(3))
