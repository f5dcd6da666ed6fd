"""Dropout whose masks come from a generator that belongs to the network.

torch's dropout draws from the process's default generator, which concurrently trained networks would share.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Generator, Tensor, nn


class Draws:
    """The generator from which all dropout layers of a network draw; None: torch's default generator."""

    def __init__(self) -> None:
        self.generator: Generator | None = None


class SeededDropout(nn.Dropout):
    """nn.Dropout with masks from `draws`; with a CPU generator the masks are those of nn.Dropout."""

    draws: Draws

    def forward(self, input: Tensor) -> Tensor:
        generator = self.draws.generator
        if generator is None or not self.training or not 0.0 < self.p < 1.0:
            return F.dropout(input, self.p, self.training)
        keep = 1.0 - self.p
        return input * input.new_empty(input.shape).bernoulli_(keep, generator=generator).div_(keep)


def seed_dropout(module: nn.Module) -> Draws | None:
    """Turn every nn.Dropout into a SeededDropout; return their Draws, or None if there is no nn.Dropout.

    The layers stay the objects that they are, with their hooks and attributes.
    """
    draws = Draws()
    layers = [layer for layer in module.modules() if type(layer) is nn.Dropout]
    for layer in layers:
        layer.__class__ = SeededDropout
        layer.draws = draws  # type: ignore[assignment]
    return draws if layers else None
