"""Diagonal of the empirical Fisher information: squared log-likelihood gradients at the TRUE labels.
Source: Liu & Zheng, Eq. 13-15, arXiv:2102.01936v1. The empirical Fisher does not estimate the GGN: see
docs/references/curvature-and-solvers.md#empirical-fisher."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedsim.errors import UsageError
from fedsim.learning.curvature.diagonal_ggn import contracts, squared_pullback
from fedsim.learning.curvature.layer_calls import check_functional, eagerly, torch_func_errors
from fedsim.learning.params import Net


def squared_gradients(net: Net, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Compute sum_i (grad log p(y_i | x_i, w))^2 over the examples, (P,), in evaluation mode.

    The function uses one backward pass with a contraction per layer if this is exact, else vmap.

    Raises:
        UsageError: if neither method is exact.
    """
    net.load(weights)
    net.eval()
    if not net.likelihood.sequences and contracts(net.module):
        with suppress(UsageError):  # vmap may still be exact
            return squared_pullback(net.module, inputs, lambda outputs: _uphill(net, outputs, targets))
    values = {name: p.detach() for name, p in net.module.named_parameters() if p.requires_grad}
    check_functional(net.module, values, inputs)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits: Tensor = functional_call(net.module, parameters, (x[None],))
        return net.likelihood.loss(logits, y[None])

    with eagerly(), torch_func_errors("the empirical Fisher"):
        each = vmap(grad(loss), in_dims=(None, 0, 0))(values, inputs, targets)
    return torch.cat([each[name].flatten(1).square().sum(0) for name in values])


def _uphill(net: Net, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of each example's loss with respect to its outputs, (n, C)."""
    leaf = outputs.requires_grad_(True)
    with torch.enable_grad():
        loss = net.likelihood.loss(leaf, targets)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient * len(targets)
