"""The diagonal of the empirical Fisher information: squared gradients of the log-likelihood of the TRUE
labels (Liu & Zheng, Eq. 13-15, arXiv:2102.01936v1). It estimates something else than the GGN: see
docs/references/curvature-and-solvers.md#empirical-fisher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedsim.learning.curvature.diagonal_ggn import contracts, squared_pullback
from fedsim.learning.params import Net
from fedsim.learning.shards import QuadraticShard, Shard


def squared_gradients(net: Net, weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """sum_i (grad log p(y_i | x_i, w))^2 over the examples given: (P,), evaluation mode.

    By one backward pass and a contraction per layer where all layers have a rule for it, else by vmap.
    """
    net.load(weights)
    if net.likelihood.name != "tokens" and contracts(net.module):
        return squared_pullback(net.module, inputs, lambda outputs: _uphill(net, outputs, targets))
    net.module.eval()
    values = {name: p.detach() for name, p in net.module.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits: Tensor = functional_call(net.module, parameters, (x[None],))
        return net.likelihood.loss(logits, y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(values, inputs, targets)
    return torch.cat([each[name].flatten(1).square().sum(0) for name in values])


def _uphill(net: Net, outputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of every example's own loss in its outputs (n, C)."""
    leaf = outputs.requires_grad_(True)
    with torch.enable_grad():
        loss = net.likelihood.loss(leaf, targets)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient * len(targets)


def mean_fisher(shard: Shard | QuadraticShard, weights: Tensor, chunk: int = 64) -> Tensor:
    """(1/N_k) sum_i (grad log p(y_i | x_i, w))^2: (P,). Of a quadratic client: the diagonal of A / N_k,
    which is what the Fisher information of a linear-Gaussian model is."""
    if isinstance(shard, QuadraticShard):
        return shard.hessian.diagonal() / shard.size
    total = torch.zeros_like(weights)
    chunks = (torch.split(part, chunk) for part in (shard.inputs, shard.targets))
    for inputs, targets in zip(*chunks, strict=True):
        total += squared_gradients(shard.net, weights, shard.floats(inputs), targets)
    return total / shard.size
