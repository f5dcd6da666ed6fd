"""Server optimisers, which use the averaged client delta as a gradient.

    sgd      m <- beta m + Delta                     w <- w - lr m
    adagrad  m <- beta m + (1-beta) Delta            v <- v + Delta^2
    adam     the same m                              v <- beta2 v + (1-beta2) Delta^2
    yogi     the same m                              v <- v - (1-beta2) Delta^2 sign(v - Delta^2)
             w <- w - lr m / (sqrt(v) + tau)         the last three; all element-wise

Source: Reddi et al. 2021, arXiv:2003.00295, Algorithm 2. As there, v starts at tau^2 and there is no bias
correction. A round without uploads changes nothing.
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

    server_decay: the learning rate of the f-th fold is server_lr * server_decay^(f-1).
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
    """m and v (P,) float64, and the number of rounds folded so far."""

    first: Tensor
    second: Tensor
    folds: int = 0


def moments(how: ServerOptimiser, start: Tensor) -> ServerMoments:
    """The initial moments m = 0 and v = tau^2, for weights like `start` (P,)."""
    zero = torch.zeros_like(start, dtype=torch.float64)
    return ServerMoments(zero, zero + how.tau**2)


def step(
    how: ServerOptimiser, state: ServerMoments, weights: Tensor, delta: Tensor
) -> tuple[Tensor, ServerMoments]:
    """Take one step of the rule; return weights (P,) float64 and the next state. delta points uphill."""
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
