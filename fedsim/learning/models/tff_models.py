"""The networks of the FedPA paper (arXiv:2010.05273), taken there from Reddi et al. (arXiv:2003.00295).

Sources: TensorFlow Federated (TFF) `simulation/baselines` and google-research/federated `utils/models`.
Layers, sizes and initialisation follow these sources, but normal draws are not truncated, unlike in Keras.
The paper's fourth network, `logistic_bias` for tags, is in paper_models.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.models.paper_models import Shape, image


def cnn_emnist(shape: Shape, classes: int) -> nn.Module:
    """Build conv3x3 32, conv3x3 64, max pool, FC 128, with dropout (FedPA; TFF create_conv_dropout_model).

    Weights are Glorot-normal, biases zero.
    """
    channels, *sides = image("cnn_emnist", shape, smallest=6)
    height, width = ((side - 4) // 2 for side in sides)
    net = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 32, 3),
            act1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            act2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            drop2=nn.Dropout(0.25),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * height * width, 128),
            act3=nn.ReLU(),
            drop3=nn.Dropout(0.5),
            out=nn.Linear(128, classes),
        )
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return net


def _norm(channels: int) -> nn.Module:
    """Return GroupNorm with 2 groups, the former default of TensorFlow Addons."""
    return nn.GroupNorm(2, channels, eps=1e-3)


class _PreActivationBlock(nn.Module):
    """Twice GroupNorm - ReLU - conv3x3, plus a shortcut (He et al. 2016b). bare: omit the first two layers.

    Where the number of channels changes, the shortcut is a conv1x1 and a GroupNorm.
    """

    def __init__(self, inputs: int, outputs: int, bare: bool) -> None:
        super().__init__()
        self.norm1 = nn.Identity() if bare else nn.Sequential(_norm(inputs), nn.ReLU())
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.Sequential(_norm(outputs), nn.ReLU())
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), _norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h, w)."""
        residual, skip = self.conv2(self.norm2(self.conv1(self.norm1(x)))), self.shortcut(x)
        total: Tensor = residual + skip
        return total


def resnet18_gn(shape: Shape, classes: int) -> nn.Module:
    """Build ResNet-18 with GroupNorm of 2 groups, as released for CIFAR-100 (Reddi et al. 2021, FedPA).

    Unlike the usual CIFAR variant, it begins with a conv7x7 and a 3x3 max pool, both of stride 2. Then come 2
    blocks each of 64, 128, 256 and 512 channels, all of stride 1, so a 32x32 image is 8x8 in all blocks.
    Convolutions are initialised He-normal, the last layer from N(0, 0.01^2) with zero bias.

    Differs: TFF pads strided layers on one side, this network on both. TFF has an L2 penalty of 1e-4 on the
    weights; here the algorithm chooses the penalty. TFF's images are cropped and standardised.
    """
    channels, _, _ = image("resnet18_gn", shape)
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        norm=_norm(64),
        act=nn.ReLU(),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    width = 64
    for stage, outputs in enumerate((64, 128, 256, 512), start=1):
        for block in (1, 2):
            layers[f"stage{stage}_block{block}"] = _PreActivationBlock(width, outputs, stage == block == 1)
            width = outputs
    layers["last_norm"] = _norm(width)
    layers["last_act"] = nn.ReLU()
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["out"] = nn.Linear(width, classes)
    net = nn.Sequential(layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
    return net


class _WordModel(nn.Module):
    """Embedding - LSTM - dense to the embedding's width - dense to the vocabulary.

    The LSTM's bias is the weight of a constant input 1. PyTorch's own LSTM has a second, redundant bias,
    which would cost bytes on the wire.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding + 1, hidden, bias=False, batch_first=True)
        self.dense = nn.Linear(hidden, embedding)
        self.out = nn.Linear(embedding, vocabulary)
        nn.init.uniform_(self.embed.weight, -0.05, 0.05)
        kernel, recurrent = self.lstm.parameters()
        nn.init.normal_(kernel, std=math.sqrt(2 / embedding))
        with torch.no_grad():
            kernel[:, -1] = 0
            kernel[hidden : 2 * hidden, -1] = 1  # the order of gates is input, forget, cell, output
        nn.init.orthogonal_(recurrent)
        for layer in (self.dense, self.out):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (n, T) to the logits of the next id (n, T, vocabulary)."""
        x = self.embed(ids.long())
        states, _ = self.lstm(torch.cat([x, torch.ones_like(x[..., :1])], dim=-1))
        logits: Tensor = self.out(self.dense(states))
        return logits


def lstm(shape: Shape, classes: int) -> nn.Module:
    """Build embedding 96, LSTM 670, dense 96 (FedPA; TFF create_recurrent_model), with TFF's initialisation.

    Differs: TFF skips padded positions. They are last and have no loss, so the result is the same.
    """
    if len(shape) != 1:
        raise UsageError(f"model 'lstm' cannot take inputs of shape {shape}: it needs rows of word ids, (T,)")
    return _WordModel(classes, embedding=96, hidden=670)
