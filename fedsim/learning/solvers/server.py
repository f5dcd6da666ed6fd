"""Server optimisers, which use the averaged client delta as a gradient.

    sgd      m <- beta m + Delta              w <- w - lr m
    others   m <- beta m + (1-beta) Delta     w <- w - lr m / (sqrt(v) + tau)
    adagrad  v <- v + Delta^2
    adam     v <- beta2 v + (1-beta2) Delta^2
    yogi     v <- v - (1-beta2) Delta^2 sign(v - Delta^2)

All operations are element-wise. A round without uploads changes nothing.
Source: Reddi et al. 2021, arXiv:2003.00295, Algorithm 2, with v = tau^2 at the start and no bias correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor


@dataclass(frozen=True)
class ServerOptimiser:
    """Settings of a server optimiser; beta2 and tau are for the adaptive rules.

    server_decay: the learning rate of the f-th step is server_lr * server_decay^(f-1).
    """

    rule: Annotated[
        Literal["sgd", "adagrad", "adam", "yogi"], Meta(description="how the server uses the averaged change")
    ] = "sgd"
    server_lr: Annotated[float, Meta(gt=0, description="learning rate of the server")] = 1.0
    beta: Annotated[float, Meta(ge=0, lt=1, description="momentum of the server's averaged change")] = 0.0
    beta2: Annotated[
        float, Meta(ge=0, lt=1, description="of adam and yogi: share of the old in the average of squares")
    ] = 0.99
    tau: Annotated[
        float, Meta(gt=0, description="of the adaptive rules: added to the square root of that average")
    ] = 1e-3
    server_decay: Annotated[
        float, Meta(gt=0, le=1, description="factor of server_lr per round in which an upload was folded")
    ] = 1.0


@dataclass(frozen=True)
class ServerMoments:
    """m and v, (P,) float64, and the number of steps so far; a step is a round with uploads."""

    first: Tensor
    second: Tensor
    folds: int = 0


def moments(how: ServerOptimiser, start: Tensor) -> ServerMoments:
    """Return the initial moments m = 0 and v = tau^2, for weights like `start` (P,)."""
    zero = torch.zeros_like(start, dtype=torch.float64)
    return ServerMoments(zero, zero + how.tau**2)


def step(
    how: ServerOptimiser, state: ServerMoments, weights: Tensor, delta: Tensor
) -> tuple[Tensor, ServerMoments]:
    """Take a step with the gradient `delta`; return the weights (P,) float64 and the next moments."""
    lr, square = how.server_lr * how.server_decay**state.folds, delta * delta
    if how.rule == "sgd":
        first = how.beta * state.first + delta
        return weights - lr * first, ServerMoments(first, state.second, state.folds + 1)
    first = how.beta * state.first + (1 - how.beta) * delta
    if how.rule == "adagrad":
        second = state.second + square
    elif how.rule == "adam":
        second = how.beta2 * state.second + (1 - how.beta2) * square
    else:
        second = state.second - (1 - how.beta2) * square * torch.sign(state.second - square)
    moved = weights - lr * first / (second.sqrt() + how.tau)
    return moved, ServerMoments(first, second, state.folds + 1)
