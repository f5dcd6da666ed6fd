"""The networks of the papers, built for the shape of a dataset.

Every model maps a float32 batch (n, *shape) to outputs (n, classes); a sequence model maps ids
(n, T), exact in float32, to (n, T, classes). Dense models flatten by themselves, so a table (42,)
and an image (1, 28, 28) both fit; convolutional models take (channels, height, width) of any size
that leaves at least one pixel before the first dense layer.

Initialisation is PyTorch's default if nothing else is said, layer by layer in the order of the
forward pass, drawn from torch's global generator: `torch.manual_seed(seed)` and then `build_model`
gives the start of the released code (bayes-admm `models.py`, `train.py` L195-225). No activation
works in place, so that layer outputs may be recorded by hooks.

Short names of papers: v1/v2 = Federated ADMM from Bayesian Duality (arXiv:2506.13150);
FedLap = Connecting Federated ADMM to Bayes (arXiv:2501.17325); Gaussian product = arXiv:2102.01936v1.
tff_models has those of FedPA.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import plugins
from fedsim.errors import UsageError, unknown
from fedsim.learning.models.shapes import Shape, image
from fedsim.learning.models.tff_models import cnn_emnist, lstm, resnet18_gn


@dataclass(frozen=True)
class ModelInfo:
    """One entry of the registry: `build(shape, classes)` returns a freshly initialised module.

    sequence: it has outputs for every place of a row of tokens, not one row of outputs per example.
    """

    name: str
    description: str
    build: Callable[[Shape, int], nn.Module]
    sequence: bool = False


def build_model(name: str, shape: Shape, classes: int, likelihood: str = "categorical") -> nn.Module:
    """The model `name`, or path/to/file.py:NAME, for inputs (n, *shape) and `classes` outputs.

    Draws the initialisation from torch's global generator; the caller seeds it.
    Raises UsageError for an unknown name, for an empty shape or too few classes, when the model cannot
    take inputs of this shape or its outputs do not suit the likelihood, and for what is wrong with a
    user's own.
    """
    if name not in MODELS and not plugins.is_spec(name):
        raise unknown("model", name, MODELS)
    if not shape or any(side < 1 for side in shape):
        raise UsageError(f"model {name!r}: an input shape needs sides of at least 1, got {shape}")
    if likelihood == "categorical" and classes < 2:
        raise UsageError(f"model {name!r}: a classifier needs at least 2 classes, got {classes}")
    sequence = likelihood == "tokens"
    if name not in MODELS:
        return _users_model(name, shape, classes, (2, *shape, classes) if sequence else (2, classes))
    if MODELS[name].sequence is not sequence:
        fit = ", ".join(info.name for info in MODELS.values() if info.sequence is sequence)
        has = "one row of outputs per example" if sequence else "outputs at every place of a sentence"
        raise UsageError(
            f"model {name!r} has {has}, and this data set's targets are {likelihood}; choose from: {fit}"
        )
    return MODELS[name].build(shape, classes)


def _users_model(spec: str, shape: Shape, classes: int, expected: Shape) -> nn.Module:
    """A new module from the callable NAME(shape, classes) of a user's file, tried on two blank examples,
    of which it must make a tensor of the `expected` shape."""
    owner = f"--model {plugins.short(spec)}"
    with torch.random.fork_rng(devices=[]):  # executing the file may draw, but only the first time
        build = plugins.load(spec, "--model")
    if not callable(build) or isinstance(build, nn.Module):
        raise UsageError(
            f"{owner} is a {type(build).__name__}; name a class or function that makes a new torch.nn.Module "
            "from (shape, classes)"
        )
    with plugins.user_code_errors(spec, "--model", f"calling it with shape {shape} and {classes} classes"):
        module = build(shape, classes)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{owner} must return a torch.nn.Module; it returned a {type(module).__name__}")
    with (
        plugins.user_code_errors(spec, "--model", f"a forward pass of two examples of shape {shape}"),
        torch.no_grad(),
    ):
        out = module.eval()(torch.zeros(2, *shape))
    if not isinstance(out, Tensor) or out.shape != expected:
        came = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise UsageError(
            f"{owner} must give one logit per class: for two examples of shape {shape} a tensor of shape "
            f"{expected}; it gave {came}"
        )
    trained = [p.requires_grad for p in module.parameters()]
    if not trained or not all(trained):
        raise UsageError(
            f"{owner}: all parameters are trained, so there must be some, all with requires_grad"
        )
    return module.train()


def _logistic(bias: bool) -> Callable[[Shape, int], nn.Module]:
    """Logistic regression from zero weights; without bias it is bayes-admm's LinearModel (L8-21)."""

    def build(shape: Shape, classes: int) -> nn.Module:
        out = nn.Linear(math.prod(shape), classes, bias=bias)
        for parameter in out.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(OrderedDict[str, nn.Module](flatten=nn.Flatten(), out=out))

    return build


def _mlp(hidden: tuple[int, ...], activation: type[nn.Module]) -> Callable[[Shape, int], nn.Module]:
    """A builder of d - hidden... - classes with one activation after each hidden layer."""

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


def _cnn_zenke(shape: Shape, classes: int) -> nn.Module:
    """Two blocks conv3x3 (pad 1) - conv3x3 - pool - dropout, then FC 512 (bayes-admm CifarNet)."""
    channels, *sides = image("cnn_zenke", shape, smallest=10)
    # Per block: the unpadded convolution takes 2, the pool halves (rounding down).
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
    """Twice conv5x5 (no padding) - ReLU - max pool 2, then ReLU dense layers."""
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


def _cnn_acar(shape: Shape, classes: int) -> nn.Module:
    """conv5x5 64, conv5x5 64, FC 384-192 (FedDyn's CIFAR CNN; bayes-admm FedDynCifarCNN)."""
    return _two_conv5("cnn_acar", shape, classes, convs=(64, 64), dense=(384, 192))


def _cnn_mcmahan(shape: Shape, classes: int) -> nn.Module:
    """conv5x5 32, conv5x5 64, FC 512, without padding (Gaussian-product code, CIFAR)."""
    return _two_conv5("cnn_mcmahan", shape, classes, convs=(32, 64), dense=(512,))


class _ResidualBlock(nn.Module):
    """conv3x3 - GroupNorm - ReLU - conv3x3 - GroupNorm, plus the shortcut, then ReLU.

    Shortcut of option A (He et al. 2016): the identity; where the block halves the image, every
    second pixel, with the new channels filled with zeros, half before and half after the old.
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
        """(n, inputs, h, w) -> (n, outputs, ceil(h / stride), ceil(w / stride))."""
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        skip = x[:, :, :: self.stride, :: self.stride]
        if self.extra:
            skip = F.pad(skip, (0, 0, 0, 0, self.extra, self.extra))
        return torch.relu(out + skip)


def _resnet20(shape: Shape, classes: int) -> nn.Module:
    """ResNet-20, widths 16/32/64, 3 blocks each, GroupNorm with 2 groups (v2, bayes-admm L202-290).

    kaiming_normal on the weights of convolutions and of the dense layer, whose bias keeps the
    default init.
    """
    channels, _, _ = image("resnet20", shape)
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        norm=nn.GroupNorm(2, 16),
        act=nn.ReLU(),
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


_ALL = (
    ModelInfo("logistic", "logistic regression, no bias, zero init (v1/v2, FedLap)", _logistic(bias=False)),
    ModelInfo("logistic_bias", "logistic regression with bias, zero init", _logistic(bias=True)),
    ModelInfo("mlp", "d-200-100-C, sigmoid (v1/v2, FedLap)", _mlp((200, 100), nn.Sigmoid)),
    ModelInfo("mlp_small", "d-100-C, ReLU (this project's main job on digits)", _mlp((100,), nn.ReLU)),
    ModelInfo("mlp_500_300", "d-500-300-C, ReLU (Gaussian product)", _mlp((500, 300), nn.ReLU)),
    ModelInfo("cnn_zenke", "4 conv3x3, dropout, FC 512 (v1/v2, FedLap: CifarNet)", _cnn_zenke),
    ModelInfo("cnn_acar", "2 conv5x5 of 64, FC 384-192 (FedDyn; v1/v2)", _cnn_acar),
    ModelInfo("cnn_mcmahan", "conv5x5 32-64, FC 512 (McMahan; Gaussian product)", _cnn_mcmahan),
    ModelInfo("resnet20", "ResNet-20, GroupNorm, option-A shortcuts (v2: CIFAR-100)", _resnet20),
    ModelInfo("cnn_emnist", "conv3x3 32-64, max pool, FC 128, dropout (FedPA: EMNIST-62)", cnn_emnist),
    ModelInfo("resnet18_gn", "ResNet-18 v2, GroupNorm (FedPA: CIFAR-100)", resnet18_gn),
    ModelInfo(
        "lstm", "embedding 96, LSTM 670, dense 96 (FedPA: StackOverflow next words)", lstm, sequence=True
    ),
)
MODELS: Mapping[str, ModelInfo] = MappingProxyType({info.name: info for info in _ALL})
