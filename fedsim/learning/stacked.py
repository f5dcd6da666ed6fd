"""The gradients of L networks at once: the layers of one network on rows of L.

A stack is a tensor (L, *shape) in which every lane's part begins at a multiple of ALIGNED numbers. Without
that the product of two matrices depends on where in a batch it stands: MKL chooses its kernel by the address,
so that of 600 random layers 49 give other bits in another lane of contiguous stacks, and none of aligned ones
(tests/benchmarks/lanes.py). For a like reason activations work on the stack with its padding: it has no
remainder, which ATen would compute with another kernel.

Batched are Linear layers whose parameters are all trained, and ReLU, Sigmoid, Tanh and Flatten next to them;
the loss is if targets are classes. Everything else is computed lane by lane, from the lane's own module and
with as many rows as it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.likelihoods import CATEGORICAL, Likelihood
from fedsim.learning.params import Layout, Net
from fedsim.learning.stack import Stack

ACTIVATIONS = (nn.ReLU, nn.Sigmoid, nn.Tanh)


@dataclass(frozen=True)
class Part:
    """What one lane brings to a launch: a batch of n examples, at most as many as the launch has rows."""

    lane: int
    inputs: Tensor
    targets: Tensor
    weight: float

    @property
    def rows(self) -> int:
        """n."""
        return len(self.targets)


class Step(ABC):
    """A part of the network for all lanes; it keeps what its backward pass needs."""

    @abstractmethod
    def forward(self, x: Stack, parts: Sequence[Part]) -> Stack: ...

    @abstractmethod
    def backward(self, d: Stack, parts: Sequence[Part]) -> Stack | None:
        """Write the gradients of its parameters; return that of its input if a step before needs it."""


@dataclass
class View(Step):
    """Flatten: another shape of every example. end: its last dimension that is flattened."""

    end: int
    _before: tuple[int, ...] = ()

    def forward(self, x: Stack, parts: Sequence[Part]) -> Stack:
        self._before = x.shape
        return x.shaped(*torch.empty(x.shape, device="meta").flatten(1, self.end).shape)

    def backward(self, d: Stack, parts: Sequence[Part]) -> Stack:
        return d.shaped(*self._before)


@dataclass
class LinearStep(Step):
    """y = x W' + b, and dW = d' x, db = sum of d, dx = d W, as batched products.

    weight, weight_grad (L, O, I), bias, bias_grad (L, O) are views of the lanes' buffers.
    """

    weight: Tensor
    weight_grad: Tensor
    bias: Tensor | None
    bias_grad: Tensor | None
    passes_on: bool
    _y: Stack | None = None
    _dx: Stack | None = None
    _x: Stack | None = None

    def forward(self, x: Stack, parts: Sequence[Part]) -> Stack:
        lanes, (out, _) = len(self.weight), self.weight.shape[1:]
        self._x = x
        if self._y is None:
            self._y = Stack.zeros(lanes, (*x.shape[:-1], out), self.weight)
        flat, result = self._rows(x), self._rows(self._y)
        if self.bias is None:
            torch.bmm(flat, self.weight.mT, out=result)
        else:
            torch.baddbmm(self.bias[:, None], flat, self.weight.mT, out=result)
        return self._y

    def backward(self, d: Stack, parts: Sequence[Part]) -> Stack | None:
        assert self._x is not None
        slope = self._rows(d)
        torch.bmm(slope.mT, self._rows(self._x), out=self.weight_grad)
        if self.bias_grad is not None:
            torch.sum(slope, 1, out=self.bias_grad)
        if not self.passes_on:
            return None
        if self._dx is None:
            self._dx = Stack.zeros(len(self.weight), self._x.shape, self.weight)
        torch.bmm(slope, self.weight, out=self._rows(self._dx))
        return self._dx

    @staticmethod
    def _rows(x: Stack) -> Tensor:
        return x.values.view(len(x.storage), -1, x.shape[-1])


@dataclass
class Activation(Step):
    """In place, behind a Linear step, which does not need its result."""

    kind: type[nn.Module]
    _y: Tensor | None = None

    def forward(self, x: Stack, parts: Sequence[Part]) -> Stack:
        do: Mapping[type[nn.Module], Callable[[Tensor], Tensor]] = {
            nn.ReLU: torch.relu_,
            nn.Sigmoid: torch.sigmoid_,
            nn.Tanh: torch.tanh_,
        }
        self._y = do[self.kind](x.storage)
        return x

    def backward(self, d: Stack, parts: Sequence[Part]) -> Stack:
        y, aten = self._y, torch.ops.aten
        if self.kind is nn.ReLU:
            return Stack(aten.threshold_backward(d.storage, y, 0), d.shape)
        backward = aten.sigmoid_backward if self.kind is nn.Sigmoid else aten.tanh_backward
        return Stack(backward(d.storage, y), d.shape)


@dataclass
class Loop(Step):
    """Layers that are computed lane by lane; modules: one per lane.

    trains: some of their parameters are trained, and their gradients go where the lane's module has them.
    """

    modules: Sequence[nn.Module]
    trains: bool
    passes_on: bool
    _done: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _y: Stack | None = None
    _dx: Stack | None = None

    def forward(self, x: Stack, parts: Sequence[Part]) -> Stack:
        lanes, values = len(x.storage), x.values
        for part in parts:
            inputs = values[part.lane, : part.rows].detach()
            with torch.set_grad_enabled(self.trains or self.passes_on):
                result = self.modules[part.lane](inputs.requires_grad_(self.passes_on))
            self._done[part.lane] = inputs, result
            if self._y is None:
                self._y = Stack.zeros(lanes, (x.shape[0], *result.shape[1:]), x.storage)
            _write(self._y, part, result.detach())
        assert self._y is not None
        self._dx = self._dx or (Stack.zeros(lanes, x.shape, x.storage) if self.passes_on else None)
        return self._y

    def backward(self, d: Stack, parts: Sequence[Part]) -> Stack | None:
        values = d.values
        for part in parts:
            inputs, result = self._done.pop(part.lane)
            if self.trains or self.passes_on:
                torch.autograd.backward(result, values[part.lane, : part.rows])
            if self._dx is not None:
                assert inputs.grad is not None
                _write(self._dx, part, inputs.grad)
        return self._dx


def _write(stack: Stack, part: Part, rows: Tensor) -> None:
    """Copy a lane's rows; those behind them are 0, so that they hold nothing of another client."""
    lane = stack.lanes[part.lane]
    if part.rows == len(lane):
        lane.copy_(rows)
    else:
        lane[: part.rows].copy_(rows)
        lane[part.rows :].zero_()


# ---- which layers are batched


@dataclass(frozen=True)
class Group:
    """One batched layer, or a run of layers that are computed lane by lane, by their names in the module."""

    batched: bool
    layers: list[tuple[str, nn.Module]]


def groups_of(module: nn.Module) -> list[Group]:
    """The layers of a network in their order, as they are computed in lanes.

    Flatten is batched where it only gives the input or a batched layer another shape, and an activation only
    behind a batched Linear layer, whose result it overwrites.
    """
    groups: list[Group] = []
    source = "input"
    for name, layer in _layers(module):
        linear = type(layer) is nn.Linear and all(p.requires_grad for p in layer.parameters())
        flat = type(layer) is nn.Flatten and layer.start_dim == 1 and source != "loop"
        batched = linear or flat or (type(layer) in ACTIVATIONS and source == "linear")
        if linear or not batched:
            source = "linear" if linear else "loop"
        if batched or not groups or groups[-1].batched:
            groups.append(Group(batched, []))
        groups[-1].layers.append((name, layer))
    return groups


def _layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials; of any other module, itself, because its forward may do anything."""
    if type(module) is not nn.Sequential:
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _layers(child, f"{prefix}.{name}".lstrip("."))


def check_lanes(net: Net, lanes: int, threads: int) -> None:
    """Check that the gradients of several clients can be computed at once.

    Raises:
        UsageError: If they cannot, or if nothing would be computed at once.
    """
    if lanes == 1:
        return
    if threads > 1:
        raise UsageError("--lanes: threads would divide a launch between lanes; give --threads 1")
    if net.stochastic:
        raise UsageError(
            "--lanes: a forward pass of this model may draw random numbers (dropout, or a module of its "
            "own), and clients would share them; choose a model of torch's own layers without dropout, or "
            "--lanes 1"
        )
    if not any(group.batched and type(group.layers[0][1]) is nn.Linear for group in groups_of(net.module)):
        raise UsageError(
            "--lanes: this model has no trained Linear layer in a Sequential, the only layers that several "
            "clients compute at once; give --lanes 1"
        )


class StackedNet:
    """L networks of one architecture for launches of a fixed number of rows, so that all shapes are fixed."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layout: Layout,
        weights: Tensor,
        grads: Tensor,
        likelihood: Likelihood,
        shape: tuple[int, ...],
    ) -> None:
        """Prepare the steps.

        Args:
            modules: One per lane, with views of its rows as parameters.
            layout: Of a row of `weights`.
            weights: (L, P), every row aligned.
            grads: The same.
            likelihood: The loss.
            shape: Of the inputs of one lane, (rows, ...).
        """
        self._likelihood, self._grads = likelihood, grads
        lanes, rows = len(modules), shape[0]
        self._inputs = Stack.zeros(lanes, shape, weights)
        self._targets = torch.zeros(lanes, rows, dtype=torch.int64, device=weights.device)
        self._means, self._scales = torch.zeros(2, lanes, rows, device=weights.device)
        """1/n and weight/n in the rows of a lane's batch, 0 behind them."""
        self._filled: dict[int, tuple[int, float]] = {}
        self._slope: Stack | None = None
        self._steps: list[Step] = []
        self._loops = False
        passes_on = False
        for group in groups_of(modules[0]):
            name, layer = group.layers[0]
            names = [name for name, _ in group.layers]
            if not group.batched:
                each = [nn.Sequential(*(m.get_submodule(n) for n in names)) for m in modules]
                trains = any(p.requires_grad for p in each[0].parameters())
                self._steps.append(Loop(each, trains, passes_on))
                passes_on, self._loops = passes_on or trains, self._loops or trains
            elif isinstance(layer, nn.Flatten):
                self._steps.append(View(layer.end_dim))
            elif isinstance(layer, nn.Linear):
                self._steps.append(_linear(name, layout, weights, grads, passes_on))
                passes_on = True
            else:
                self._steps.append(Activation(type(layer)))

    def gradient(self, parts: Sequence[Part]) -> list[Tensor]:
        """Write weight * grad(mean loss) of every part into its lane's row of grads; return the mean losses.

        A lane without a part, and the rows behind a short batch, are computed all the same where layers are
        batched; what they hold changes no other lane.
        """
        with torch.no_grad():
            for part in parts:
                _write(self._inputs, part, part.inputs)
            if self._loops:
                self._grads.zero_()
            x = self._inputs
            for step in self._steps:
                x = step.forward(x, parts)
            losses, d = self._loss(x, parts)
            slope: Stack | None = d
            for step in reversed(self._steps):
                if slope is None:
                    break
                slope = step.backward(slope, parts)
        return losses

    def _loss(self, outputs: Stack, parts: Sequence[Part]) -> tuple[list[Tensor], Stack]:
        """The mean losses and the gradient of all losses by the outputs."""
        if self._slope is None:
            self._slope = Stack.zeros(len(outputs.storage), outputs.shape, outputs.storage)
        if self._likelihood is CATEGORICAL:
            return self._categorical(outputs, parts, self._slope)
        losses = []
        for part in parts:
            own = outputs.values[part.lane, : part.rows].detach().requires_grad_()
            with torch.enable_grad():
                loss = self._likelihood.loss(own, part.targets)
                (slope,) = torch.autograd.grad(loss * part.weight, own)
            _write(self._slope, part, slope)
            losses.append(loss.detach())
        return losses, self._slope

    def _categorical(self, outputs: Stack, parts: Sequence[Part], slope: Stack) -> tuple[list[Tensor], Stack]:
        """The gradient of the sum over rows of cross-entropy times weight/n, and behind a batch times 0."""
        for part in parts:
            lane, n = part.lane, part.rows
            self._targets[lane, :n] = part.targets
            if self._filled.get(lane) != (n, part.weight):
                self._filled[lane] = n, part.weight
                self._means[lane, :n], self._scales[lane, :n] = 1 / n, part.weight / n
                for filled in (self._means, self._scales):
                    filled[lane, n:] = 0.0
            if n < outputs.shape[0]:
                self._targets[lane, n:] = 0
        flat = outputs.values.flatten(0, 1).detach().requires_grad_()
        with torch.enable_grad():
            by_row = F.cross_entropy(flat, self._targets.flatten(), reduction="none")
        (gradient,) = torch.autograd.grad(by_row, flat, self._scales.flatten())
        slope.values.copy_(gradient.view(len(outputs.storage), *outputs.shape))
        losses = (by_row.detach().view_as(self._means) * self._means).sum(1).unbind()
        return [losses[part.lane] for part in parts], slope


def _linear(name: str, layout: Layout, weights: Tensor, grads: Tensor, passes_on: bool) -> LinearStep:
    """The step of a Linear layer, whose parameters lie in every row of `weights` as the layout says."""
    views: list[dict[str, Tensor]] = [{}, {}]
    for s in layout.slices:
        owner, _, leaf = s.name.rpartition(".")
        if owner == name:
            for by_name, of in zip(views, (weights, grads), strict=True):
                by_name[leaf] = of[:, s.offset : s.offset + s.size].view(len(of), *s.shape)
    (own, slopes) = views
    return LinearStep(own["weight"], slopes["weight"], own.get("bias"), slopes.get("bias"), passes_on)
