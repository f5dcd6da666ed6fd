"""fedsim's fedlap_cov and ivon_admm against federated.py, which shares no code with them.

Both get the same data, start and random numbers, so they may differ by rounding only. How far rounding
carries is measured: the reference starts again from weights that are changed by the roundings of a gradient.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tolerances import gamma
from workers.assembly import assemble

ROOT = Path(__file__).resolve().parents[2]
ROUNDINGS = 30
"""The square root of the sums of a gradient, over layers' inputs and outputs, forwards and backwards, and
over a batch: 2 (64 + 200 + 100 + 10) + 32 = 780. Roundings add up as random numbers do (Higham, Mary)."""


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """docs/recipes/table_twice.py; threads and the flushing of denormals are as before afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "recipes"))
    threads = torch.get_num_threads()
    yield importlib.import_module("table_twice")
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def last_mean(twice: ModuleType, experiment: Any, problem: Any) -> Tensor:
    """The reference's mean after the last round, with fedsim's streams."""
    algorithm = twice.reference().ALGORITHMS[experiment.algo](**twice.short(experiment.hyperparameters))
    means = algorithm.means(problem, twice.streams)
    for _ in range(experiment.rounds):
        next(means)
    result: Tensor = next(means)
    return result


def reach_of_rounding(twice: ModuleType, experiment: Any, folder: Path) -> float:
    """The distance of the last mean, relative to its way from the start, from that of a start near by."""
    path = twice.saved(assemble(experiment, None, "cpu"), folder)
    problem = twice.reference().Problem.read(path)
    exact, draws = last_mean(twice, experiment, problem), torch.Generator().manual_seed(0)

    def near(part: Tensor) -> Tensor:
        signs = 2 * torch.randint(2, part.shape, generator=draws) - 1
        return part * (1 + gamma(ROUNDINGS) * signs)

    start = [(near(weight), near(bias)) for weight, bias in problem.start]
    moved = last_mean(twice, experiment, replace(problem, start=start))
    return float(twice.moved(moved, exact, twice.reference().Network(problem.start).start))


def test_the_reference_imports_neither_fedsim_nor_this_repository() -> None:
    tree = ast.parse((Path(__file__).parent / "federated.py").read_text())
    imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert imported - sys.stdlib_module_names == {"collections.abc", "numpy", "torch"}


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_run_is_the_references_up_to_rounding(number: int, twice: ModuleType, tmp_path: Path) -> None:
    experiment = replace(twice.CASES[number].experiment, rounds=min(twice.CASES[number].rounds, 2))
    agreement, reach = twice.with_the_same_streams(experiment), reach_of_rounding(twice, experiment, tmp_path)
    assert agreement.distance <= 2 * reach < 0.01


def test_the_reference_sees_what_cap_dual_changes(twice: ModuleType, tmp_path: Path) -> None:
    experiment = replace(twice.CASES[4].experiment, rounds=2)
    agreement = twice.with_the_same_streams(experiment)
    assert agreement.capped and agreement.distance > 10 * reach_of_rounding(twice, experiment, tmp_path)


def test_hand_written_derivatives_are_those_of_autograd(twice: ModuleType) -> None:
    module, draws = twice.reference(), torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    net = module.Network([(normal(5, 6), normal(5)), (normal(4, 5), normal(4)), (normal(3, 4), normal(3))])
    w, x, y = net.start, normal(20, 6), torch.randint(3, (20,), generator=draws)
    leaf = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(net.forward(leaf, x)[1], y), leaf)
    torch.testing.assert_close(net.gradient(w, x, y), gradient, rtol=1e-10, atol=1e-13)
    jacobian = torch.autograd.functional.jacobian(lambda at: net.forward(at, x)[1], w)
    p = torch.softmax(net.forward(w, x)[1], 1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    diagonal = torch.einsum("ncp,ncd,ndp->p", jacobian, hessian, jacobian)
    torch.testing.assert_close(net.gauss_newton(w, x), diagonal, rtol=1e-10, atol=1e-13)
