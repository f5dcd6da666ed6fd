"""Low-rank adapters of peft in models of one's own, as in docs/examples/hub.py: values and curvature."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.learning.curvature.diagonal_ggn import diagonal_ggn
from fedsim.learning.curvature.full_ggn import full_ggn

HUB = Path(__file__).resolve().parents[3] / "docs" / "examples" / "hub.py"


@pytest.fixture(scope="module")
def hub() -> dict[str, Any]:
    return runpy.run_path(str(HUB))


def adapted(build: Callable[[tuple[int, ...], int], nn.Module], shape: tuple[int, ...]) -> nn.Module:
    """Build a model with adapters that are not at their start, where B is 0."""
    torch.manual_seed(5)
    module = build(shape, 3).double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return module


def test_the_curvature_of_adapters_is_that_of_brute_force(hub: dict[str, Any]) -> None:
    module = adapted(hub["mlp_adapters"], (1, 8, 8))
    x = torch.randn(6, 1, 8, 8).double()
    exact = full_ggn(module, [x]).diagonal()
    assert exact.min() >= 0 < exact.norm()
    assert (diagonal_ggn(module, [x]) - exact).norm() <= 1e-13 * exact.norm()


def test_the_curvature_of_adapters_in_attention_is_that_of_brute_force(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    BertConfig(vocab_size=30, max_position_embeddings=16, **sizes).save_pretrained(tmp_path)
    monkeypatch.setenv("MODEL", str(tmp_path))
    module = adapted(hub["text_adapters"], (6,))
    ids = torch.randint(1, 30, (4, 6)).double()
    exact = diagonal_ggn(module, [ids])
    assert (exact - by_rows(module, ids)).norm() <= 1e-13 * exact.norm()


def by_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the diagonal GGN, (P,), by one backward pass per example and class."""
    trained = [p for p in module.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64)
    for row in inputs:
        logits = module(row[None])[0]
        p = logits.softmax(0).detach()
        for c in range(len(p)):
            column = p[c].sqrt() * (torch.eye(len(p))[c] - p)
            gradients = torch.autograd.grad(logits, trained, column, retain_graph=True)
            total += torch.cat([g.flatten() for g in gradients]).square()
    return total
