"""The models of the papers: sizes, initialisation, shapes, errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.errors import UsageError
from fedsim.learning.curvature.diagonal_ggn import best_chunk, diagonal_ggn
from fedsim.learning.models.registry import MODELS, build_model

CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)
CONVOLUTIONAL = ("cnn_zenke", "cnn_acar", "cnn_mcmahan", "resnet20")
DENSE = tuple(name for name in MODELS if name not in CONVOLUTIONAL)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("logistic", MNIST, 10, 7_840),
        ("mlp", MNIST, 10, 178_110),
        ("mlp_small", (1, 8, 8), 10, 64 * 100 + 100 + 1010),
        ("mlp_500_300", MNIST, 10, 545_810),
        ("cnn_zenke", CIFAR, 10, 1_250_858),
        ("cnn_acar", CIFAR, 10, 797_962),
        ("cnn_mcmahan", CIFAR, 10, 878_538),
        ("resnet20", CIFAR, 100, 275_572),
        ("resnet20", CIFAR, 10, 269_722),
    ],
)
def test_parameter_counts_are_those_of_the_papers(
    name: str, shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    assert count(build_model(name, shape, classes)) == parameters


def test_registry_names_itself() -> None:
    assert all(key == info.name and info.description for key, info in MODELS.items())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [MNIST, CIFAR], ids=["mnist", "cifar"])
def test_maps_batches_to_logits(name: str, shape: tuple[int, ...]) -> None:
    net = build_model(name, shape, 7)
    assert net(torch.rand(2, *shape)).shape == (2, 7)
    assert net(torch.rand(1, *shape)).shape == (1, 7)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_take_tables(name: str) -> None:
    assert build_model(name, (42,), 2)(torch.rand(3, 42)).shape == (3, 2)


@pytest.mark.parametrize(
    ("name", "side"), [("cnn_zenke", 10), ("cnn_acar", 16), ("cnn_mcmahan", 16), ("resnet20", 1)]
)
def test_smallest_image(name: str, side: int) -> None:
    net = build_model(name, (1, side, side + 1), 3)
    assert net(torch.rand(2, 1, side, side + 1)).shape == (2, 3)
    if side > 1:
        with pytest.raises(UsageError, match=rf"{name}.*\(1, {side - 1}, 40\).*at least {side}"):
            build_model(name, (1, side - 1, 40), 3)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_convolutional_models_refuse_tables(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}.*\(42,\)"):
        build_model(name, (42,), 2)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="did you mean 'resnet20'"):
        build_model("resnet-20", CIFAR, 10)
    with pytest.raises(UsageError, match=r"'mlp'.*at least 2 classes, got 1"):
        build_model("mlp", (4,), 1)
    with pytest.raises(UsageError, match=r"'mlp'.*got \(\)"):
        build_model("mlp", (), 2)
    with pytest.raises(UsageError, match=r"'mlp'.*got \(3, 0\)"):
        build_model("mlp", (3, 0), 2)


def test_mlp_starts_like_the_released_code() -> None:
    """Default nn.Linear init in order, from the global generator and nothing else."""
    torch.manual_seed(42)
    expected = [p for width in ((784, 200), (200, 100), (100, 10)) for p in nn.Linear(*width).parameters()]
    torch.manual_seed(42)
    result = build_model("mlp", MNIST, 10).parameters()
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_logistic_starts_at_zero() -> None:
    parameters = list(build_model("logistic", MNIST, 10).parameters())
    assert len(parameters) == 1
    assert not parameters[0].any()


def test_mlp_activations() -> None:
    assert sum(isinstance(m, nn.Sigmoid) for m in build_model("mlp", MNIST, 10).children()) == 2
    assert sum(isinstance(m, nn.ReLU) for m in build_model("mlp_small", MNIST, 10).children()) == 1


def test_resnet_weights_are_kaiming_normal() -> None:
    torch.manual_seed(0)
    net = build_model("resnet20", CIFAR, 10)
    for m in net.modules():
        if isinstance(m, nn.Conv2d) and m.weight.numel() > 2000:
            fan_in = m.weight[0].numel()
            # The standard deviation of more than 2000 normal draws is within 1.6 % of its
            # expectation (one sigma): 6 % is about four.
            assert m.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.06)


def test_resnet_shortcut_keeps_every_second_pixel() -> None:
    """With the second normalisation at zero a block is relu of its shortcut (option A)."""
    net = build_model("resnet20", CIFAR, 10)
    block = net.get_submodule("stage2_block1")
    nn.init.zeros_(block.get_submodule("norm2").weight)  # type: ignore[arg-type]
    x = torch.rand(2, 16, 6, 6)
    out = block(x)
    assert out.shape == (2, 32, 3, 3)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.parametrize("name", MODELS)
def test_has_a_curvature_and_no_activation_in_place(name: str) -> None:
    torch.manual_seed(1)
    net = build_model(name, MNIST, 10)
    assert not any(getattr(m, "inplace", False) for m in net.modules())
    assert best_chunk(net, torch.zeros(1, *MNIST)) == (32 if name in CONVOLUTIONAL else 512)
    x = torch.rand(2, *MNIST)
    h = diagonal_ggn(net, [x], columns="sign", generator=torch.Generator().manual_seed(0))
    assert h.shape == (count(net),)
    assert h.isfinite().all()
    assert (h >= 0).all()
    assert h.any()
