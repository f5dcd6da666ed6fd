"""Bounds of rounding errors that hold for every kernel, because they do not assume an order of additions.

A processor's kernels add in an order of their own, so two correct float32 results differ, and by how much is
a property of the numbers that are added. A tolerance that was read off one machine says nothing of the next.

Notation: u is the unit roundoff, 2^-24 in float32; gamma(n) = n u / (1 - n u).

- n roundings one after another change a number by a factor 1 + theta with |theta| <= gamma(n) (Lemma 3.1).
- A sum of n terms, or a product of two vectors of length n, has an error of at most gamma(n) times the sum of
  the absolute values of its terms, in any order (sections 3.1 and 4.2). Where terms cancel, this is far more
  than gamma(n) times the result.
- The computed product is the exact one of vectors whose entries differ by at most gamma(n) of themselves
  (equation 3.4). So a chain of products and smooth functions is exact for factors that differ by so much, and
  its error is how far its result moves when they do (`moved`).

References:
    N. J. Higham: Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, chapters 3 and 4.
    https://doi.org/10.1137/1.9780898718027
    N. J. Higham, T. Mary: A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 2019.
    https://doi.org/10.1137/18M1226312
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from fedsim.learning.function_space import FunctionTerm
from fedsim.learning.params import Net

DRAWS = 20


def gamma(roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """The largest relative change of a number by so many roundings one after another."""
    nu = roundings * torch.finfo(dtype).eps / 2
    assert nu < 0.1, "so many roundings leave no digit that could be compared"
    return nu / (1 - nu)


def moved(function: Callable[..., Tensor], *inputs: Tensor, roundings: int) -> float:
    """A bound of the error of one float32 evaluation, as a Euclidean norm; two evaluations differ by two.

    Every entry of the inputs is multiplied by 1 + gamma(roundings) or 1 - gamma(roundings), with random
    signs, and the function is evaluated in float64. The signs of real roundings are as good as random, too,
    and n of them add up to about sqrt(n) u (Higham and Mary): a factor of about sqrt(n) is in reserve.

    Args:
        function: What was computed in float32, for float64 inputs.
        inputs: All numbers that enter products and sums: weights as well as examples.
        roundings: On the longest way from an input to the result: the lengths of its sums, and one for each
            other operation.
    """
    exact, *nearby = (function(*x) for x in _near(inputs, gamma(roundings)))
    return max(float((near - exact).norm()) for near in nearby)


def _near(inputs: tuple[Tensor, ...], share: float) -> list[tuple[Tensor, ...]]:
    """The inputs in float64, as they are and DRAWS times with every entry changed by +- share of itself."""
    draws = torch.Generator().manual_seed(0)
    signs = [[2 * torch.randint(2, x.shape, generator=draws) - 1 for x in inputs] for _ in range(DRAWS)]
    exact = tuple(x.double() for x in inputs)
    return [exact, *(tuple(x * (1 + share * s) for x, s in zip(exact, each, strict=True)) for each in signs)]


def loss_gradient(net: Net, targets: Tensor, weight: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
    """net.loss_gradient in float64, for `moved`.

    Returns:
        A function of weights (P,) and inputs: the loss and the gradient of weight * loss, (1 + P,).
    """
    module, layout = deepcopy(net.module).double(), net.layout
    targets = targets.double() if targets.is_floating_point() else targets

    def computed(weights: Tensor, inputs: Tensor) -> Tensor:
        at = weights.detach().clone().requires_grad_()
        outputs = torch.func.functional_call(module, layout.unflatten(at), (inputs,))
        loss = net.likelihood.loss(outputs, targets)
        (gradient,) = torch.autograd.grad(weight * loss, at)
        return torch.cat([loss.detach()[None], gradient])

    return computed


def squared_gradients(net: Net, targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """In float64, for `moved`: of weights (P,) and inputs, the sum over examples of squared gradients."""
    each = [loss_gradient(net, y[None]) for y in targets]

    def computed(weights: Tensor, inputs: Tensor) -> Tensor:
        one_by_one = [of(weights, x[None])[1:].square() for of, x in zip(each, inputs, strict=True)]
        return torch.stack(one_by_one).sum(0)

    return computed


def term_gradient(net: Net, term: FunctionTerm) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """term.add_gradient in float64, for `moved`: of weights (P,), the term's inputs and its targets."""
    module, layout, each = deepcopy(net.module).double(), net.layout, term.weights.double()

    def gradient(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        at = weights.detach().clone().requires_grad_()
        outputs = torch.func.functional_call(module, layout.unflatten(at), (inputs,))
        value = -(each * (targets * outputs.log_softmax(dim=1)).sum(dim=1)).sum()
        return torch.autograd.grad(value, at)[0]

    return gradient
