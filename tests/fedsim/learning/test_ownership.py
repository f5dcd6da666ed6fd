"""A tensor is written over where its owner gave it up, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedsim.learning import gaussian
from fedsim.learning.blocks import accumulating, by_blocks
from fedsim.learning.ownership import give_up, keep, owned, spent
from fedsim.learning.solvers.first_order import LocalTraining, Moments, stepper


@dataclass(frozen=True)
class Pair:
    x: Tensor
    scale: Tensor


def pair() -> Pair:
    return Pair(torch.arange(100.0), torch.tensor(3.0))


def test_only_what_is_large_is_given_up() -> None:
    small, large = torch.ones(4), torch.ones(5)
    give_up((small, large), above=16)
    assert owned(large) is large
    assert owned(small) is not small
    assert torch.equal(owned(small), small)
    assert spent((small, large)) is None
    value = (large, torch.tensor(1.0))
    assert spent(value) is value


def test_adam_takes_moments_that_are_given_up_and_copies_others() -> None:
    gradient, weights = torch.full((3,), 0.5), [torch.zeros(3), torch.zeros(3)]
    kept = Moments(torch.ones(3), torch.ones(3), 7)
    mine = give_up(Moments(torch.ones(3), torch.ones(3), 7), above=0)
    steps = [stepper(w, LocalTraining(), m) for w, m in zip(weights, (kept, mine), strict=True)]
    for step in steps:
        step(gradient)
    assert torch.equal(*weights)
    assert torch.equal(kept.first, torch.ones(3))
    after = steps[1].moments(1)
    assert after is not None and after.first is mine.first and not torch.equal(mine.first, torch.ones(3))


def test_what_is_kept_again_is_not_spent() -> None:
    value = give_up(pair(), above=0)
    keep(value)
    assert spent(value) is None


@pytest.mark.parametrize(("size", "parts"), [(28, [28]), (29, [7, 7, 7, 7, 1])])
def test_a_vector_is_cut_where_the_cache_does_not_hold_it(
    size: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "BLOCK", 7)
    seen = []

    def formula(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x + 1

    assert torch.equal(by_blocks(formula, torch.zeros(size)), torch.ones(size))
    assert seen == parts


@dataclass(frozen=True)
class Stepper:
    scale: float

    @accumulating
    def step(self, total: Tensor, x: Tensor, *, factor: float) -> Tensor:
        return total + self.scale * factor * x


@pytest.mark.parametrize("gone", [False, True])
def test_a_sum_is_written_over_where_its_owner_gave_it_up(
    gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "BLOCK", 7)
    total = give_up(torch.arange(100.0), above=0 if gone else 1 << 20)
    result = Stepper(2.0).step(total, torch.ones(100), factor=3.0)
    assert torch.equal(result, torch.arange(100.0) + 6)
    assert (result is total) == gone


@pytest.mark.parametrize("gone", [False, True])
def test_a_formula_in_blocks_writes_over_what_is_given_up(
    gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "BLOCK", 7)
    value = give_up(pair(), above=0 if gone else 1 << 20)
    result = by_blocks(lambda p: Pair(p.x * p.scale, p.scale + 1), value, out=spent(value))
    assert torch.equal(result.x, 3 * torch.arange(100.0)) and result.scale == 4
    assert (result.x is value.x) == gone
    assert torch.equal(value.x, pair().x) != gone


def test_a_result_of_another_dtype_is_written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian, "BLOCK", 7)
    value = pair()
    result = by_blocks(lambda p: Pair(p.x.double() / 3, p.scale), value, out=value)
    assert torch.equal(result.x, torch.arange(100.0).double() / 3)
    assert torch.equal(value.x, pair().x)
