"""The full generalised Gauss-Newton matrix (GGN), for models of up to a few thousand parameters.

    GGN = sum_n J_n' H_n J_n = sum_n M_n M_n',    M_n = J_n' S_n (P, C),    J_n = dz_n/dw (C, P)

with H_n = S_n S_n' and S_n as in diagonal_ggn.py, which computes the diagonal of this matrix. If the logits
are linear in the parameters, z_n = W a_n, the block of classes c and d is sum_n H_n[c, d] a_n a_n'. The
blocks then take one product of (C^2, n) with (n, I^2) instead of (P, nC) with (nC, P).

Source: the Hessian of full-covariance Bayesian ADMM, arXiv:2506.13150, App. D.2, where VON trains logistic
regression. For this model the GGN is the Hessian.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fedsim.errors import UsageError
from fedsim.learning.curvature.layer_calls import FEW, check_functional, eagerly, torch_func_errors

MEMORY = 64 << 20
"""Largest number of bytes of the matrices M_n computed at one time."""


def full_ggn(module: nn.Module, chunks: Iterable[Tensor], *, memory: int = MEMORY) -> Tensor:
    """Compute sum_n J_n' H_n J_n of the SUMMED cross-entropy, over the trained module.parameters().

    Args:
        module: network from (m, *shape) to logits (m, C), with examples independent of each other. The caller
            puts it in evaluation mode. Parameters and their .grad do not change.
        chunks: batches (m, *shape) in the parameters' dtype, on their device.
        memory: largest size in bytes of M (m, C, P). Larger chunks are cut, with the same result.

    Returns:
        Symmetric matrix (P, P), accumulated in the parameters' dtype and on their device. The unit is nats
        per squared unit of the parameters.

    Raises:
        UsageError: if the model does not return logits (m, C), if an example's logits depend on other
            examples, or if torch.func cannot differentiate the model.
    """
    weights = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    sample = next(iter(weights.values()))
    total = sample.new_zeros([sum(w.numel() for w in weights.values())] * 2)
    last, checked = _linear_head(module), False
    for x in chunks:
        if len(x) and not checked:
            if last is not None and not _is_linear(*last, module, x[:FEW]):
                last = None
            if last is None:
                check_functional(module, weights, x)
            checked = True
        with torch.no_grad(), eagerly():
            logits: Tensor = module(x)
        if logits.dim() != 2 or len(logits) != len(x):
            raise UsageError(
                f"full_ggn: the model must return logits ({len(x)}, classes), got {tuple(logits.shape)}"
            )
        p = logits.softmax(1)
        if last is not None:
            body, head = last
            with torch.no_grad():
                _add_linear(p, body(x), head, total)
            continue
        root = p.sqrt()
        # columns[n, c] = sqrt(p_c) (e_c - p)
        columns = torch.diag_embed(root) - root[:, :, None] * p[:, None, :]
        rows = max(1, memory // (len(total) * logits.shape[1] * total.element_size()))
        for some, seeds in zip(torch.split(x, rows), torch.split(columns, rows), strict=True):
            m = _pullbacks(module, weights, some, seeds)
            total.addmm_(m.T, m)
    return total


def _pullbacks(module: nn.Module, weights: dict[str, Tensor], x: Tensor, columns: Tensor) -> Tensor:
    """Return the matrices M_n' of all examples, stacked to (n C, P), from columns (n, C, C)."""

    def one(example: Tensor, seeds: Tensor) -> Tensor:
        def logits(values: dict[str, Tensor]) -> Tensor:
            out: Tensor = functional_call(module, values, (example[None],))[0]
            return out

        back = vjp(logits, weights)[1]
        parts: dict[str, Tensor] = vmap(lambda seed: back(seed)[0])(seeds)
        return torch.cat([parts[name].flatten(1) for name in weights], 1)

    with eagerly(), torch_func_errors("full_ggn"):
        pulled: Tensor = vmap(one)(x, columns)
    return pulled.flatten(0, 1)


def _linear_head(module: nn.Module) -> tuple[nn.Module, nn.Linear] | None:
    """Return the module that computes a_n and the last layer; None unless only a last Linear is trained."""
    layers = list(module) if type(module) is nn.Sequential else [module]
    if not layers or type(layers[-1]) is not nn.Linear:
        return None
    body = nn.Sequential(*layers[:-1])
    if any(p.requires_grad for p in body.parameters()) or not all(
        p.requires_grad for p in layers[-1].parameters()
    ):
        return None
    return body, layers[-1]


def _is_linear(body: nn.Module, head: nn.Linear, module: nn.Module, x: Tensor) -> bool:
    """Return whether only the head uses its parameters, and no hook changes the head's output."""
    with torch.enable_grad():
        features: Tensor = body(x)
    if features.requires_grad:
        return False
    with torch.no_grad():
        return torch.allclose(F.linear(features, head.weight, head.bias), module(x), equal_nan=True)


def _add_linear(p: Tensor, a: Tensor, head: nn.Linear, total: Tensor) -> None:
    """Add the GGN of logits W a + bias (n, C) with probabilities p (n, C), for a (n, I)."""
    h = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    classes, side = p.shape[1], a.shape[1]
    size = classes * side
    squares = (a[:, :, None] * a[:, None, :]).flatten(1)
    blocks = (h.flatten(1).T @ squares).view(classes, classes, side, side)
    # the flat vector is W row by row, then the bias: its indices are (c, i), then c
    total[:size, :size].view(classes, side, classes, side).add_(blocks.transpose(1, 2))
    if head.bias is not None:
        mixed = (h.flatten(1).T @ a).view(classes, classes, side)
        total[size:, :size].view(classes, classes, side).add_(mixed)
        total[:size, size:].view(classes, side, classes).add_(mixed.transpose(1, 2))
        total[size:, size:].add_(h.sum(0))
