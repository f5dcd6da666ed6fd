"""The networks of the papers, built for the shape of a data set (fedsim.learning.models.registry).

Short names of the papers: v1/v2 = Federated ADMM from Bayesian Duality (arXiv:2506.13150);
FedLap = Connecting Federated ADMM to Bayes (arXiv:2501.17325); Gaussian product = arXiv:2102.01936v1.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.errors import UsageError

Shape = tuple[int, ...]


def image(name: str, shape: Shape, smallest: int = 1) -> tuple[int, int, int]:
    """Return `shape` as (channels, height, width); raise a UsageError if an image is too small."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UsageError(
            f"model {name!r} cannot take inputs of shape {shape}: it needs (channels, height, "
            f"width) with height and width of at least {smallest}; choose a dense model such as "
            "'mlp' or another dataset"
        )
    return shape[0], shape[1], shape[2]


def logistic(bias: bool) -> Callable[[Shape, int], nn.Module]:
    """Return a builder of logistic regression with zero weights (no bias: bayes-admm LinearModel, L8-21)."""

    def build(shape: Shape, classes: int) -> nn.Module:
        out = nn.Linear(math.prod(shape), classes, bias=bias)
        for parameter in out.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(OrderedDict[str, nn.Module](flatten=nn.Flatten(), out=out))

    return build


def mlp(hidden: tuple[int, ...], activation: type[nn.Module]) -> Callable[[Shape, int], nn.Module]:
    """Return a builder of d - hidden... - classes with one activation after each hidden layer."""

    def build(shape: Shape, classes: int) -> nn.Module:
        layers = OrderedDict[str, nn.Module](flatten=nn.Flatten())
        width = math.prod(shape)
        for i, units in enumerate(hidden, start=1):
            layers[f"fc{i}"] = nn.Linear(width, units)
            layers[f"act{i}"] = activation()
            width = units
        layers["out"] = nn.Linear(width, classes)
        return nn.Sequential(layers)

    return build


def cnn_zenke(shape: Shape, classes: int) -> nn.Module:
    """Build two blocks conv3x3 (pad 1) - conv3x3 - pool - dropout, then FC 512 (bayes-admm CifarNet)."""
    channels, *sides = image("cnn_zenke", shape, smallest=10)
    # In each block the unpadded convolution removes 2 pixels; the pool halves the side, rounding down.
    height, width = (((side - 2) // 2 - 2) // 2 for side in sides)
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 32, 3, padding=1),
            act1=nn.ReLU(),
            conv2=nn.Conv2d(32, 32, 3),
            act2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            drop2=nn.Dropout(0.25),
            conv3=nn.Conv2d(32, 64, 3, padding=1),
            act3=nn.ReLU(),
            conv4=nn.Conv2d(64, 64, 3),
            act4=nn.ReLU(),
            pool4=nn.MaxPool2d(2),
            drop4=nn.Dropout(0.25),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * height * width, 512),
            act5=nn.ReLU(),
            drop5=nn.Dropout(0.5),
            out=nn.Linear(512, classes),
        )
    )


def _two_conv5(
    name: str, shape: Shape, classes: int, convs: tuple[int, int], dense: tuple[int, ...]
) -> nn.Module:
    """Build two blocks conv5x5 (no padding) - ReLU - max pool 2, then dense layers with ReLU."""
    channels, *sides = image(name, shape, smallest=16)
    height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(channels, convs[0], 5),
        act1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(convs[0], convs[1], 5),
        act2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
    )
    features = convs[1] * height * width
    for i, units in enumerate(dense, start=1):
        layers[f"fc{i}"] = nn.Linear(features, units)
        layers[f"act{i + 2}"] = nn.ReLU()
        features = units
    layers["out"] = nn.Linear(features, classes)
    return nn.Sequential(layers)


def cnn_acar(shape: Shape, classes: int) -> nn.Module:
    """Build conv5x5 64, conv5x5 64, FC 384-192 (FedDyn's CIFAR CNN; bayes-admm FedDynCifarCNN)."""
    return _two_conv5("cnn_acar", shape, classes, convs=(64, 64), dense=(384, 192))


def cnn_mcmahan(shape: Shape, classes: int) -> nn.Module:
    """Build conv5x5 32, conv5x5 64, FC 512, without padding (Gaussian-product code, CIFAR)."""
    return _two_conv5("cnn_mcmahan", shape, classes, convs=(32, 64), dense=(512,))


class _ResidualBlock(nn.Module):
    """conv3x3 - GroupNorm - ReLU - conv3x3 - GroupNorm, plus the shortcut, then ReLU.

    The shortcut is option A of He et al. (2016): the identity, or every second pixel if the block halves the
    image. New channels are filled with zeros, half before and half after the old channels.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        self.stride = stride
        self.extra = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, ceil(h / stride), ceil(w / stride))."""
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        skip = x[:, :, :: self.stride, :: self.stride]
        if self.extra:
            skip = F.pad(skip, (0, 0, 0, 0, self.extra, self.extra))
        return torch.relu(out + skip)


def resnet20(shape: Shape, classes: int) -> nn.Module:
    """Build ResNet-20, widths 16/32/64, 3 blocks each, GroupNorm with 2 groups (v2, bayes-admm L202-290).

    The weights of the convolutions and of the dense layer are initialised by kaiming_normal_; the dense
    layer's bias keeps its default.
    """
    channels, _, _ = image("resnet20", shape)
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(channels, 16, 3, padding=1, bias=False), norm=nn.GroupNorm(2, 16), act=nn.ReLU()
    )
    width = 16
    for stage, outputs in enumerate((16, 32, 64), start=1):
        for block in range(1, 4):
            stride = 2 if stage > 1 and block == 1 else 1
            layers[f"stage{stage}_block{block}"] = _ResidualBlock(width, outputs, stride)
            width = outputs
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["out"] = nn.Linear(width, classes)
    net = nn.Sequential(layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return net
