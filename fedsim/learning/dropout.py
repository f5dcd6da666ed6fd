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

    def __init__(self, p: float, draws: Draws) -> None:
        super().__init__(p)
        self._draws = draws

    def forward(self, input: Tensor) -> Tensor:
        generator = self._draws.generator
        if generator is None or not self.training or not 0.0 < self.p < 1.0:
            return F.dropout(input, self.p, self.training)
        keep = 1.0 - self.p
        return input * input.new_empty(input.shape).bernoulli_(keep, generator=generator).div_(keep)


def seed_dropout(module: nn.Module) -> Draws | None:
    """Replace every nn.Dropout by a SeededDropout; return their Draws, or None if there is no nn.Dropout."""
    draws = Draws()
    replaced = False
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                layer = SeededDropout(child.p, draws)
                layer.train(child.training)
                setattr(parent, name, layer)
                replaced = True
    return draws if replaced else None
