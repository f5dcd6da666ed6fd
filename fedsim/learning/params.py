"""All parameters of a network as one flat float32 vector, and the module whose leaves are its views.

The vector is what crosses the wire, what the optimiser updates in one kernel and what prox terms,
duals and priors act on; nothing is ever concatenated or scattered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedsim.errors import UsageError
from fedsim.learning.frozen import kept_in_evaluation
from fedsim.learning.likelihoods import CATEGORICAL, Likelihood
from fedsim.learning.recorded_step import Recorder
from fedsim.seeds import seeded_torch


@dataclass(frozen=True)
class Slice:
    """The position of one named parameter in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The order of trained parameters in the flat vector: module.parameters() order, each row-major."""

    slices: tuple[Slice, ...]

    @staticmethod
    def of(module: nn.Module) -> Layout:
        slices, offset = [], 0
        for name, parameter in _trained(module):
            slices.append(Slice(name, tuple(parameter.shape), offset, parameter.numel()))
            offset += parameter.numel()
        return Layout(tuple(slices))

    @staticmethod
    def vector(size: int) -> Layout:
        """One unnamed block of `size` values, for problems without a network."""
        return Layout((Slice("w", (size,), 0, size),))

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(s.size for s in self.slices)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of `vector` (P,) by parameter name."""
        return {s.name: vector[s.offset : s.offset + s.size].view(s.shape) for s in self.slices}


class Net:
    """A module on flat buffers: `weights` and `grads` (P,) float32; its trained leaves are views of them.

    The buffers are the scratch space of one task; no result is ever read from them later. `weights`
    does not require gradients, so that each view can be a leaf; backward adds into the views of
    `grads` in place. Zero them with `grads.zero_()`, never with set_to_none, which drops the views.
    """

    def __init__(
        self, module: nn.Module, device: torch.device | None = None, likelihood: Likelihood = CATEGORICAL
    ) -> None:
        device = device or torch.device("cpu")
        names = [n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
        if len(names) != len(_trained(module)):
            raise UsageError("the model shares a parameter between modules; views would untie it silently")
        for name, parameter in _trained(module):
            if parameter.dtype != torch.float32:
                raise UsageError(f"a model trains in float32; {name} has {parameter.dtype}")
        module = module.to(device)
        self.module = module
        self.device = device
        self.likelihood = likelihood
        self.layout = Layout.of(module)
        self.weights = torch.cat([p.detach().reshape(-1) for _, p in _trained(module)])
        self.grads = torch.zeros_like(self.weights)
        grads = self.layout.unflatten(self.grads)
        for name, view in self.layout.unflatten(self.weights).items():
            leaf = module.get_parameter(name)  # the same object, because a model may also hold it elsewhere
            leaf.data, leaf.grad = view, grads[name]
        self._evaluating = kept_in_evaluation(module)
        self.stochastic = any(_may_draw(m) for m in module.modules())
        """A forward pass in training mode may draw from torch's own generators."""
        self.recorder: Recorder | None = None
        """If there is one, training steps are recorded with it where that is possible."""

    def noise(self, key: int) -> AbstractContextManager[None]:
        """A block in which the module's own draws (dropout) come from `key`, without changing other
        generators."""
        return seeded_torch(key, self.device) if self.stochastic else nullcontext()

    def train(self) -> None:
        """Go into training mode, except for frozen modules with running statistics."""
        self.module.train()
        for part in self._evaluating:
            part.eval()

    def load(self, weights: Tensor) -> None:
        self.acquire()
        self.weights.copy_(weights)

    def release(self) -> None:
        """Free the memory of both buffers until they are acquired or loaded; on a GPU do nothing."""
        if self.device.type == "cpu":
            for buffer in (self.weights, self.grads):
                buffer.untyped_storage().resize_(0)

    def acquire(self) -> None:
        """Give released buffers memory again, with any values; parameters stay views of them."""
        for buffer in (self.weights, self.grads):
            if not buffer.untyped_storage().nbytes():
                buffer.untyped_storage().resize_(buffer.nbytes)

    def snapshot(self) -> Tensor:
        """A copy of the current weights, safe to send."""
        return self.weights.clone()

    def loss_gradient(self, inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        """Write weight * grad(mean loss) into `grads`; return the mean (0-d, detached)."""
        self.grads.zero_()
        loss = self.likelihood.loss(self.module(inputs), targets)
        if not loss.requires_grad:
            raise UsageError(
                "no trained parameter reaches the model's outputs: its forward computes them without "
                "gradients (torch.no_grad, detach)"
            )
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def logits(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """The network's outputs (n, C) at `weights`, in evaluation mode, without gradients."""
        self.load(weights)
        self.module.eval()
        with torch.no_grad():
            outputs: Tensor = self.module(inputs)
        return outputs


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _may_draw(module: nn.Module) -> bool:
    """True for dropout of any kind, and for modules of a user's own, whose forward may do anything."""
    own = not type(module).__module__.startswith("torch.nn.modules.")
    return own or isinstance(module, _DropoutNd | nn.RReLU)
