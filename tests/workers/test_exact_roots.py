"""Under portable numerics torch's square root is the correctly rounded one, in every way of calling it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.exact_roots import FUNCTIONS, use_exact_roots


@pytest.fixture
def exact() -> Iterator[None]:
    use_exact_roots(True)
    yield
    use_exact_roots(False)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": torch.sqrt,
    "in place": lambda x: x.clone().sqrt_(),
    "out": lambda x: torch.sqrt(x, out=torch.empty(0, dtype=x.dtype)),
    "foreach": lambda x: torch._foreach_sqrt([x])[0],
    "vmap": lambda x: torch.vmap(torch.sqrt)(x.reshape(64, -1)).reshape(-1),
    "strided": lambda x: torch.stack([x, -x], 1)[:, 0].sqrt(),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", WAYS)
def test_roots_are_rounded_correctly(way: str, dtype: torch.dtype) -> None:
    """Of MKL's, some 400 of these are not."""
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0), dtype=dtype)
    assert np.array_equal(WAYS[way](x).numpy(), np.sqrt(x.numpy()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_types_and_gradients_are_torchs(name: str) -> None:
    function, eps = getattr(torch, name), 2**-23
    cases = [
        torch.linspace(-1, 1, 7),
        torch.tensor(0.25),
        torch.tensor([0, 1]),
        torch.tensor([0.5], dtype=torch.bfloat16),
        torch.tensor([0.3 + 0.1j]),
        torch.empty(0, 3),
        torch.rand(3, 4).T,
        torch.rand(3, 1).expand(3, 4),
    ]
    expected = [function(x) for x in cases]
    point = torch.tensor([0.3, 0.7], requires_grad=True)
    (slope,) = torch.autograd.grad(function(point).sum(), point)
    use_exact_roots(True)
    try:
        for x, before in zip(cases, expected, strict=True):
            now = function(x)
            assert now.dtype == before.dtype and now.shape == before.shape
            torch.testing.assert_close(now, before, rtol=4 * eps, atol=eps, equal_nan=True)
        (now,) = torch.autograd.grad(function(point).sum(), point)
        torch.testing.assert_close(now, slope, rtol=8 * eps, atol=0.0)
    finally:
        use_exact_roots(False)
    assert all(
        torch.equal(function(x).nan_to_num(9), y.nan_to_num(9)) for x, y in zip(cases, expected, strict=True)
    )


def test_it_may_be_asked_for_twice_and_is_undone_once() -> None:
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    before = x.sqrt()
    for exact in (True, True, False, False):
        use_exact_roots(exact)
    assert torch.equal(x.sqrt(), before)
