"""Rules of diagonal_ggn for the supported layers, and the check that refuses other layers.

A rule turns the gradient of a layer's output into per-example squared gradients of the layer's parameters.
Source: see fedsim.learning.curvature.diagonal_ggn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.errors import UsageError


@dataclass(frozen=True, eq=False)
class Rule:
    """The rule by which a layer type turns output gradients d (n, ...) into summed squared gradients.

    `prepare(module, input)` computes the part that does not depend on the column.
    `squares(prepared, d, weight)` returns the squares for the weight (elements in order, in any shape) and
    for the bias, both summed over n. `axes(module)` is the smallest number of axes of the input, including
    the first axis, the examples.
    """

    axes: Callable[[Any], int]
    prepare: Callable[[Any, Tensor], Tensor]
    squares: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _linear_squares(a: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_n g^2 with g = sum_t d_t a_t' per example; a: (n, T, I), d: (n, ..., O)."""
    d = d.reshape(len(d), -1, weight.shape[0])
    g = torch.bmm(d.transpose(1, 2), a)
    return g.square_().sum(0), d.sum(1).square_().sum(0)


def _conv_squares(u: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_n g^2 with g = d u' per example; u: (n, I*kh*kw, L) from unfold, d: (n, O, h, w)."""
    d = d.flatten(2)
    g = torch.bmm(d, u.transpose(1, 2))
    return g.square_().sum(0), d.sum(2).square_().sum(0)


def _channel_squares(xhat: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squares of a scale and a shift per channel, shared by positions; xhat, d: (n, C, ...)."""
    n, channels = d.shape[:2]
    gamma = (d * xhat).reshape(n, channels, -1).sum(2)
    return gamma.square_().sum(0), d.reshape(n, channels, -1).sum(2).square_().sum(0)


def _layer_norm_squares(xhat: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squares of a scale and a shift, shared by positions; xhat, d: (n, ..., *weight.shape)."""
    gamma = (d * xhat).reshape(len(d), -1, weight.numel()).sum(1)
    return gamma.square_().sum(0), d.reshape(len(d), -1, weight.numel()).sum(1).square_().sum(0)


def _embedding_squares(ids: Tensor, d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_n g^2 with g = the sums of d over each id's positions; ids: (n, ...), d: (n, ..., D).
    The id len(weight) is padding, whose row is not trained."""
    rows, n = len(weight) + 1, len(ids)
    keys = (torch.arange(n, device=ids.device)[:, None] * rows + ids.reshape(n, -1)).reshape(-1)
    known, at = torch.unique(keys, return_inverse=True)
    sums = d.new_zeros(len(known), weight.shape[1]).index_add_(0, at, d.reshape(-1, weight.shape[1]))
    squares = d.new_zeros(rows, weight.shape[1]).index_add_(0, known % rows, sums.square_())
    return squares[:-1], d.new_zeros(0)


def _ids(m: nn.Embedding, x: Tensor) -> Tensor:
    return x if m.padding_idx is None else x.masked_fill(x == m.padding_idx, m.num_embeddings)


def _unfold(m: nn.Conv2d, x: Tensor) -> Tensor:
    # The cast is needed because module attributes are typed as tuples of any length.
    return F.unfold(x, m.kernel_size, m.dilation, cast("tuple[int, int]", m.padding), m.stride)


def _batch_norm_input(m: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    return F.batch_norm(x, m.running_mean, m.running_var, training=False, eps=m.eps)


RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: Rule(lambda m: 2, lambda m, x: x.reshape(len(x), -1, m.in_features), _linear_squares),
    nn.Conv2d: Rule(lambda m: 4, _unfold, _conv_squares),
    nn.GroupNorm: Rule(lambda m: 2, lambda m, x: F.group_norm(x, m.num_groups, eps=m.eps), _channel_squares),
    nn.BatchNorm1d: Rule(lambda m: 2, _batch_norm_input, _channel_squares),
    nn.BatchNorm2d: Rule(lambda m: 4, _batch_norm_input, _channel_squares),
    nn.LayerNorm: Rule(
        lambda m: len(m.normalized_shape) + 1,
        lambda m, x: F.layer_norm(x, m.normalized_shape, eps=m.eps),
        _layer_norm_squares,
    ),
    nn.Embedding: Rule(lambda m: 1, _ids, _embedding_squares),
}


GRADIENTS_ALONE = "choose an algorithm that needs no curvature, such as fedlap"


def error(name: str, module: nn.Module, why: str) -> UsageError:
    """Return the UsageError, one line with a remedy, for a layer that is not supported."""
    where = f"layer {name!r}" if name else "the model itself"
    out = f"freeze its parameters (--freeze) or {GRADIENTS_ALONE}"
    return UsageError(f"diagonal_ggn cannot handle {where} ({type(module).__name__}): {why}; {out}")


def check_layers(module: nn.Module) -> dict[nn.Module, str]:
    """Return modules with trained parameters and their names; raise a UsageError if one has no exact rule."""
    layers: dict[nn.Module, str] = {}
    owners: dict[int, str] = {}
    for name, m in module.named_modules():
        if isinstance(m, _BatchNorm) and m.running_mean is None:
            raise error(name, m, "without running statistics it mixes the examples of a batch")
        own = dict(m.named_parameters(recurse=False, remove_duplicate=False))
        if not any(p.requires_grad for p in own.values()):
            continue  # frozen layers only have to pass gradients on
        # Exact types only: a subclass may compute something else from the same parameters.
        if type(m) not in RULES or not own.keys() <= {"weight", "bias"}:
            known = ", ".join(t.__name__ for t in RULES)
            raise error(name, m, f"parameters {sorted(own)} are not those of one of {known}")
        if "forward" in vars(m):
            raise error(name, m, "its forward method has been replaced")
        if isinstance(m, nn.Conv2d):
            if m.padding_mode != "zeros" or isinstance(m.padding, str):
                raise error(name, m, "only padding by a number of zeros is supported")
            if m.groups != 1:
                raise error(name, m, "grouped convolutions are not supported")
        if isinstance(m, nn.Embedding) and (m.max_norm is not None or m.scale_grad_by_freq or m.sparse):
            raise error(name, m, "max_norm, scale_grad_by_freq and sparse gradients are not supported")
        for key, parameter in own.items():
            if id(parameter) in owners:
                raise error(name, m, f"its {key} is shared with {owners[id(parameter)]!r}")
            owners[id(parameter)] = f"{name}.{key}".lstrip(".")
        layers[m] = name
    if not layers:
        raise error("", module, "it has no trained parameters")
    return layers
