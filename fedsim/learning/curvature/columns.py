"""The columns of the cross-entropy's Hessian in the logits, H = S S': what the diagonal GGN pulls back.

    H = diag(p) - p p',    S = diag(sqrt p) - p sqrt(p)',    p = softmax(z)

Of a sequence, every place has a softmax of its own. Sketches have columns whose squared pullbacks sum to the
diagonal in expectation: S r with random signs r.

Source: as fedsim.learning.curvature.diagonal_ggn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def columns_of(logits: Tensor, columns: str, generator: torch.Generator | None) -> list[Tensor]:
    """Columns (n, C) whose squared pullbacks sum to the diagonal, exactly or in expectation."""
    p = logits.softmax(1)
    root = p.sqrt()
    n, classes = p.shape

    # With at most two classes the two largest columns are all of them.
    if columns == "exact" or (columns == "top2_sign" and classes <= 2):
        unit = torch.eye(classes, dtype=p.dtype, device=p.device)
        return list(root.T[:, :, None] * (unit[:, None, :] - p))

    def times(r: Tensor) -> Tensor:
        """S_n r_n for r (n, C)."""
        scaled = root * r
        return scaled - p * scaled.sum(1, keepdim=True)

    assert generator is not None
    # Drawn on the generator's own device, so that the device of the model does not matter.
    bits = torch.randint(2, (n, classes), generator=generator, device=generator.device)
    signs = (2 * bits - 1).to(device=p.device, dtype=p.dtype)
    if columns == "sign":
        return [times(signs)]
    # |s_c|^2 = p_c (1 - 2 p_c + sum_j p_j^2)
    norms = p * (1 - 2 * p + p.square().sum(1, keepdim=True))
    largest = norms.topk(2, dim=1).indices
    rest = signs.scatter(1, largest, 0.0)
    return [*map(times, F.one_hot(largest, classes).to(p.dtype).unbind(1)), times(rest)]


def columns_of_places(
    logits: Tensor, places: Tensor, columns: str, generator: torch.Generator | None
) -> Sequence[Tensor]:
    """The columns of logits (n, T, C), of which the places (n, T) count: as columns_of, each place with a
    softmax of its own. A sketch has signs that are independent from place to place."""
    p = logits.softmax(2)
    if columns == "exact":
        return _EachPlace(p, places)
    assert generator is not None
    root, classes = p.sqrt() * places[:, :, None], p.shape[2]

    def times(r: Tensor) -> Tensor:
        scaled = root * r
        return scaled - p * scaled.sum(2, keepdim=True)

    bits = torch.randint(2, tuple(p.shape), generator=generator, device=generator.device)
    signs = (2 * bits - 1).to(device=p.device, dtype=p.dtype)
    if columns == "sign":
        return [times(signs)]
    norms = p * (1 - 2 * p + p.square().sum(2, keepdim=True))
    largest = norms.topk(min(2, classes), dim=2).indices
    units = [signs * F.one_hot(each, classes).to(p.dtype) for each in largest.unbind(2)]
    return [*map(times, units), times(signs.scatter(2, largest, 0.0))]


@dataclass(frozen=True, eq=False)
class _EachPlace(Sequence[Tensor]):
    """The T C exact columns (n, T, C) of sequences, computed one by one; p: (n, T, C), places: (n, T)."""

    p: Tensor
    places: Tensor

    def __len__(self) -> int:
        return self.p.shape[1] * self.p.shape[2]

    def __getitem__(self, i: Any) -> Any:
        place, c = divmod(i, self.p.shape[2])
        column, p = torch.zeros_like(self.p), self.p[:, place]
        unit = F.one_hot(torch.tensor(c, device=p.device), p.shape[1]).to(p.dtype)
        column[:, place] = self.places[:, place, None] * p[:, c, None].sqrt() * (unit - p)
        return column
