"""A tensor (L, *shape) of L lanes, each of which begins at an aligned address (fedsim.learning.stacked)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGNED = 32
"""Numbers: 128 bytes, two cache lines and two vectors of the widest kind."""


@dataclass(frozen=True)
class Stack:
    """storage (L, stride), contiguous; shape: of one lane."""

    storage: Tensor
    shape: tuple[int, ...]

    @staticmethod
    def zeros(lanes: int, shape: tuple[int, ...], like: Tensor) -> Stack:
        """shape: of one lane."""
        stride = -(-math.prod(shape) // ALIGNED) * ALIGNED
        return Stack(torch.zeros(lanes, stride, dtype=like.dtype, device=like.device), shape)

    @cached_property
    def values(self) -> Tensor:
        """(L, *shape), a view without the padding."""
        size = math.prod(self.shape)
        return self.storage[:, :size].view(len(self.storage), *self.shape)

    @cached_property
    def lanes(self) -> tuple[Tensor, ...]:
        """The values of every lane."""
        return self.values.unbind()

    def shaped(self, *shape: int) -> Stack:
        """The same numbers in another shape."""
        return Stack(self.storage, shape)
