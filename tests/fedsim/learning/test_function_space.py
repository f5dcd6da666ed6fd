"""Memory points and the function term: weights, gradients against float64 autograd, the server's minimum."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from fedsim.errors import WireError
from fedsim.learning.function_space import FunctionTerm, Held, Memory, choose
from fedsim.learning.gaussian import Gaussian
from fedsim.learning.params import Net
from fedsim.learning.solvers.first_order import minimise_memory
from tests.support.tolerances import moved, term_gradient

SIDE, CLASSES = 4, 3
ROUNDINGS = 60
"""On the way to a gradient: sums of 4 and 5 terms forwards, of 3 and 5 backwards, over 6 rows; some forty
operations."""


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def net_of(hidden: int = 0) -> Net:
    torch.manual_seed(0)
    if not hidden:
        return Net(nn.Sequential(nn.Flatten(), nn.Linear(SIDE, CLASSES, bias=False)))
    return Net(nn.Sequential(nn.Flatten(), nn.Linear(SIDE, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)))


def term_of(seed: int, rows: int = 6) -> FunctionTerm:
    g = draws(seed)
    inputs = torch.randn(rows, 1, SIDE, generator=g)
    targets = torch.randn(rows, CLASSES, generator=g).softmax(dim=1)
    return FunctionTerm(inputs, targets, torch.rand(rows, generator=g) + 0.5)


def formula(net: Net, weights: Tensor, term: FunctionTerm) -> Tensor:
    """sum_i weight_i * - sum_c target_ic log softmax(f(x_i; w))_c in float64."""
    module = net.module.double()
    outputs = torch.func.functional_call(
        module, net.layout.unflatten(weights), (term.inputs.double(),)
    ).log_softmax(dim=1)
    net.module.float()
    return -(term.weights.double() * (term.targets.double() * outputs).sum(dim=1)).sum()


def gradient(net: Net, weights: Tensor, term: FunctionTerm) -> Tensor:
    net.load(weights)
    net.grads.zero_()
    term.add_gradient(net)
    return net.grads.clone()


@pytest.mark.parametrize("hidden", [0, 5], ids=["logistic", "mlp"])
@pytest.mark.parametrize("difference", [False, True], ids=["labels", "difference"])
def test_the_gradient_is_that_of_the_formula(hidden: int, difference: bool) -> None:
    term = term_of(1)
    if difference:
        term = FunctionTerm(term.inputs, term.targets - term_of(2).targets, term.weights)
    net = net_of(hidden)
    weights = torch.randn(net.layout.size, generator=draws(5))
    result = gradient(net, weights, term).double()
    exact_at = weights.double().requires_grad_()
    (exact,) = torch.autograd.grad(formula(net_of(hidden), exact_at, term), exact_at)
    assert float(exact.norm()) > 0.1
    error = moved(term_gradient(net, term), weights, term.inputs, term.targets, roundings=ROUNDINGS)
    assert float((result - exact).norm()) < error < 1e-4 * float(exact.norm())


def test_the_gradient_is_added_to_what_is_there() -> None:
    net, weights = net_of(), torch.randn(SIDE * CLASSES, generator=draws(5))
    alone = gradient(net, weights, term_of(1))
    net.grads.fill_(2.0)
    term_of(1).add_gradient(net)
    torch.testing.assert_close(net.grads, alone + 2, rtol=1e-6, atol=1e-6)


# ---- memory


def data() -> tuple[Tensor, Tensor]:
    """Bytes; the first of an example is its number. Class 0 has 10 examples, 1 has 1, 3 has 4."""
    targets = torch.tensor([0, 3, 0, 0, 1, 0, 3, 0, 0, 3, 0, 0, 0, 3, 0])
    inputs = torch.randint(17, (15, 1, SIDE), generator=draws(0)).to(torch.uint8)
    inputs[:, 0, 0] = torch.arange(15)
    return inputs, targets


@pytest.mark.parametrize(("points", "selected"), [(1, [1, 1, 1]), (2, [2, 1, 2]), (9, [9, 1, 4]), (0, [])])
def test_memory_has_that_many_points_of_every_class_that_is_there(points: int, selected: list[int]) -> None:
    inputs, targets = data()
    memory = choose(inputs, targets, points, draws(1))
    assert memory.inputs.dtype == torch.uint8
    assert memory.inputs.shape == (sum(selected), SIDE)
    numbers = memory.inputs[:, 0].tolist()
    assert len(set(numbers)) == len(numbers)
    assert torch.equal(memory.inputs, inputs[numbers].flatten(1))
    classes = targets[numbers].tolist()
    assert classes == sorted(classes)  # class by class
    assert [n for _, n in sorted(Counter(classes).items())] == selected
    if not points:
        assert memory.weights.shape == (0,)
        return
    assert float(memory.weights.sum()) == pytest.approx(15, rel=1e-6)
    of_class = {c: memory.weights[torch.tensor(classes) == c] for c in (0, 1, 3)}
    for c, n in ((0, 10), (1, 1), (3, 4)):
        assert float(of_class[c].sum()) == pytest.approx(n, rel=1e-6)
        assert len(set(of_class[c].tolist())) == 1


def test_points_are_drawn_from_the_generator() -> None:
    inputs, targets = data()

    def drawn(seed: int) -> Memory:
        return choose(inputs, targets, 1, draws(seed))

    assert torch.equal(drawn(1).inputs, drawn(1).inputs)
    first = Counter(int(drawn(seed).inputs[0, 0]) for seed in range(60))
    assert set(first) <= set((targets == 0).nonzero()[:, 0].tolist())
    assert len(first) == 10  # each of ten is missed by 60 draws with probability 0.002


# ---- memory of several clients


def held(owner: int, count: int) -> Held:
    return Held.of(torch.full((count, 2), owner), torch.arange(1.0, count + 1), owner)


def test_labels_follow_their_memory_into_the_order_of_owners() -> None:
    memory, labels = Held.nothing(), torch.zeros(0, 0)
    for owner, count in ((2, 2), (0, 1)):
        first = Memory(torch.full((count, 2), owner), torch.arange(1.0, count + 1))
        memory, labels = memory.labelled(labels, owner, torch.full((count, 3), float(owner)), first)
    assert memory.owners.tolist() == [0, 2, 2] and labels[:, 0].tolist() == [0.0, 2.0, 2.0]
    before = labels.clone()
    same, second = memory.labelled(labels, 2, torch.full((2, 3), 9.0), None)
    assert same is memory and second[:, 0].tolist() == [0.0, 9.0, 9.0]
    assert torch.equal(labels, before)
    assert memory.rows(memory.owners != 2).owners.tolist() == [0]


@pytest.mark.parametrize(("owner", "count", "again"), [(1, 3, False), (1, 2, True), (5, 1, False)])
def test_labels_that_do_not_fit_the_memory_are_refused(owner: int, count: int, again: bool) -> None:
    first = Memory(torch.zeros(count, 2), torch.ones(count)) if again else None
    with pytest.raises(WireError, match=f"client {owner} labels {count} points; the server has"):
        held(1, 2).labelled(torch.zeros(2, 3), owner, torch.zeros(count, 3), first)


# ---- the server's problem


def objective(net: Net, weights: Tensor, term: FunctionTerm, cavity: Gaussian) -> Tensor:
    log_pull = cavity.shift @ weights - 0.5 * (cavity.precision * weights * weights).sum()
    return formula(net, weights, term) - log_pull


PULL = Gaussian(torch.randn(SIDE * CLASSES, generator=draws(7), dtype=torch.float64), 0.5)


def test_minimise_memory_lowers_its_objective_towards_the_minimum() -> None:
    term, start = term_of(1), PULL.shift.float()
    values = []
    for steps in (0, 20, 200, 2000):
        result = minimise_memory(net_of(), start, term, PULL, steps=steps, lr=1e-2)
        values.append(float(objective(net_of(), result.double(), term, PULL).detach()))
    assert values[0] > values[1] > values[2] > values[3]
    exact = start.double().requires_grad_()
    newton = torch.optim.LBFGS(
        [exact], max_iter=500, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        newton.zero_grad()
        value = objective(net_of(), exact, term, PULL)
        value.backward()
        return value

    newton.step(evaluate)
    assert float(exact.grad.norm()) < 1e-6  # type: ignore[union-attr]
    # the problem is strongly convex (0.5), and Adam has 2000 steps of at most 0.01 for a way of about 1
    optimum = exact.detach()
    assert float((result.double() - optimum).norm() / optimum.norm()) < 1e-3


def test_minimise_memory_does_not_train_dropout() -> None:
    torch.manual_seed(0)
    net = Net(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(SIDE, CLASSES, bias=False)))
    net.module.train()
    state = torch.get_rng_state()
    result = minimise_memory(net, PULL.shift.float(), term_of(1), PULL, steps=5, lr=1e-2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(
        result, minimise_memory(net_of(), PULL.shift.float(), term_of(1), PULL, steps=5, lr=1e-2)
    )
