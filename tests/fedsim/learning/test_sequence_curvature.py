"""The diagonal GGN of sequences and of embeddings, against the dense Jacobian of every place.

"Relative error" is |result - exact| / |exact|, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.curvature.diagonal_ggn import contracts, diagonal_ggn
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.params import Net
from fedsim.learning.shards import SEQUENCES_AT_ONCE, Shard
from fedsim.seeds import RandomStream

EXACT = 1e-12
WORDS, CLASSES, PLACES = 6, 4, 3


class Tagger(nn.Module):
    """Ids (n, T) to logits (n, T, C); every place sees the mean of all."""

    def __init__(self, **of_embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 3, **of_embedding)
        self.inner, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.inner(self.embed(ids.long()))))
        logits: Tensor = self.out(h + h.mean(1, keepdim=True))
        return logits


class Texts(Tagger):
    """Ids (n, T) to one row of logits (n, C)."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mean(1)


def example(kind: Callable[..., nn.Module] = Tagger, **of_embedding: Any) -> tuple[nn.Module, Tensor, Tensor]:
    """A net in float64, ids (5, T) with repetitions, and which places count; none does of the last row."""
    torch.manual_seed(0)
    net = kind(**of_embedding).double()
    ids = torch.tensor([[1, 1, 2], [3, 4, 5], [0, 2, 0], [5, 5, 5], [1, 2, 3]])
    places = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)
    return net, ids, places


def brute_force(net: nn.Module, x: Tensor, places: Tensor | None = None) -> Tensor:
    """sum_n sum_t diag(J' H J) over the places that count."""
    net.eval()
    parameters = list(net.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for n, row in enumerate(x):
        logits = net(row[None])[0]
        for t, z in enumerate(logits if logits.dim() == 2 else logits[None]):
            if places is not None and not places[n, t]:
                continue
            rows = [torch.autograd.grad(z_c, parameters, retain_graph=True) for z_c in z]
            jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
            p = z.detach().softmax(0)
            hessian = torch.diag(p) - torch.outer(p, p)
            total += torch.einsum("cp,cd,dp->p", jacobian, hessian, jacobian)
    return total


def error(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


@pytest.mark.parametrize("padding", [None, 0])
def test_embeddings_equal_brute_force(padding: int | None) -> None:
    """Also of an id that comes twice in an example; the row of the padding is not trained."""
    net, x, _ = example(Texts, padding_idx=padding)
    result = diagonal_ggn(net, torch.split(x, 2))
    assert error(result, brute_force(net, x)) < EXACT
    assert bool((result[:3] == 0).all()) == (padding == 0)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_that_are_refused(options: dict[str, Any]) -> None:
    net, x, _ = example(Texts, **options)
    with pytest.raises(UsageError, match=r"'embed' .*max_norm, scale_grad_by_freq and sparse"):
        diagonal_ggn(net, [x])
    assert not contracts(net)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_place_that_counts_has_a_softmax_of_its_own(size: int) -> None:
    net, x, places = example()
    result = diagonal_ggn(net, torch.split(x, size), counted=torch.split(places, size))
    assert error(result, brute_force(net, x, places)) < EXACT


@pytest.mark.parametrize("columns", ["sign", "top2_sign"])
def test_sketches_of_sequences_are_unbiased(columns: str) -> None:
    """The mean of 4,000 draws is within 4 %, and ten times closer than one draw (theory: 63)."""
    net, x, places = example()
    draws, exact = 4000, brute_force(net, x, places)
    generator = torch.Generator().manual_seed(3)
    many = (a.repeat(draws, 1).split(1000) for a in (x, places))
    inputs, counted = many
    total = diagonal_ggn(net, inputs, columns=columns, generator=generator, counted=counted)
    one = diagonal_ggn(net, [x], columns=columns, generator=generator, counted=[places])
    assert error(total / draws, exact) < min(0.04, error(one, exact) / 10)


def test_logits_that_are_no_sequences_are_refused() -> None:
    net, x, places = example(Texts)
    with pytest.raises(UsageError, match=r"logits \(5, 3, 'classes'\) for 5 sequences"):
        diagonal_ggn(net, [x], counted=[places])


def test_a_shards_curvature_is_that_of_its_summed_loss() -> None:
    """N_k times the mean over the places that have a target."""
    net, x, places = example()
    x, places = (a.repeat(SEQUENCES_AT_ONCE, 1)[: SEQUENCES_AT_ONCE + 3] for a in (x, places))
    targets = torch.where(places, torch.ones_like(x), -1)
    exact = brute_force(net, x, places) * len(x) / int(places.sum())
    trained = Net(net.float(), likelihood=likelihood("token_classes"))
    weights = trained.weights.clone()
    result = Shard(trained, x, targets, 1.0).curvature(weights, "exact", RandomStream(0, "curvature"))
    assert error(result.double(), exact) < 1e-5
