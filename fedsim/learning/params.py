"""One flat float32 vector of a network's trained parameters; the module's parameters are views of it.

The vector is sent over the wire. Optimisers, prox terms, duals and priors work on the whole vector, so
parameters are never concatenated or split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedsim.errors import UsageError
from fedsim.learning.dropout import SeededDropout, seed_dropout
from fedsim.learning.frozen import kept_in_evaluation, running_statistics
from fedsim.learning.likelihoods import CATEGORICAL, Likelihood
from fedsim.learning.module_state import ModuleState
from fedsim.learning.recordings import Recordings
from fedsim.seeds import RandomStream, seeded_torch

if TYPE_CHECKING:
    from fedsim.learning.shards import Shard

T = TypeVar("T")


@dataclass(frozen=True)
class Slice:
    """The position of one named parameter in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The positions of the trained parameters in the flat vector, in the order of module.parameters().

    Each parameter is flattened row by row. A parameter that several modules share appears once, under its
    first name.
    """

    slices: tuple[Slice, ...]

    @staticmethod
    def of(module: nn.Module) -> Layout:
        return Layout.named(_trained(module))

    @staticmethod
    def named(tensors: Iterable[tuple[str, Tensor]]) -> Layout:
        """Lay out named tensors in the order given."""
        slices, offset = [], 0
        for name, tensor in tensors:
            slices.append(Slice(name, tuple(tensor.shape), offset, tensor.numel()))
            offset += tensor.numel()
        return Layout(tuple(slices))

    @staticmethod
    def vector(size: int) -> Layout:
        """Return the layout of one parameter "w" with `size` values, for problems without a network."""
        return Layout((Slice("w", (size,), 0, size),))

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(s.size for s in self.slices)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of `vector` (P,) by parameter name."""
        return {s.name: vector[s.offset : s.offset + s.size].view(s.shape) for s in self.slices}


class Net:
    """A module whose trained parameters and gradients are views of `weights` and `grads`, (P,) float32.

    Both buffers are scratch space: nothing reads them after the task. `weights` itself does not require
    gradients, so each view can be a leaf. backward() adds to the views of `grads` in place. Zero the
    gradients with `grads.zero_()`; set_to_none would drop the views.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None = None,
        likelihood: Likelihood = CATEGORICAL,
        statistics: str = "",
    ) -> None:
        """Move the parameters into the buffers. statistics: Experiment.statistics."""
        device = device or torch.device("cpu")
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
            leaf = module.get_parameter(name)  # other modules may share this object
            leaf.data, leaf.grad = view, grads[name]
        self.kept = kept_in_evaluation(module, statistics)
        """The modules that stay in evaluation mode."""
        self._normalising = running_statistics(module) if statistics in ("local", "average") else {}
        running = [
            (f"{prefix}.{name}".lstrip("."), buffer)
            for prefix, part in self._normalising.items()
            for name, buffer in part.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        self.running = Layout.named(running)
        """The layout of `statistics`, (R,) float32: the running statistics that training changes."""
        self.statistics = torch.cat([self.weights[:0], *(b.reshape(-1) for _, b in running)])
        for name, view in self.running.unflatten(self.statistics).items():
            module.get_buffer(name).data = view
        self._dropout = seed_dropout(module)
        self.stochastic = any(_may_draw(m) for m in module.modules())
        """True if a forward pass in training mode may draw from torch's global generators."""
        self.recordings: Recordings | None = None
        """If not None, training steps are recorded where possible."""
        self.draws_globally = False
        """True inside a `noise` block that has seeded torch's global generators for this network."""
        self._trial: str | None = None
        self.kept_state: ModuleState | None = None
        """What the module keeps besides its parameters and is restored before every use; None: nothing."""

    @contextmanager
    def noise(self, key: int) -> Iterator[None]:
        """Seed the module's random draws (dropout) with `key` in a block; then restore torch's generators."""
        globally = self.draws_globally
        with seeded_torch(key, self.device) if self.stochastic else nullcontext():
            self.draws_globally = globally or self.stochastic
            if self._dropout is not None:
                self._dropout.generator = self._generator("dropout", key)
            try:
                yield
            finally:
                self.draws_globally = globally
                if self._dropout is not None:
                    self._dropout.generator = None

    def draws(self, rng: RandomStream, part: str) -> torch.Generator:
        """Return a newly seeded generator on the network's device for the task's draws named `part`."""
        return self._generator(part, rng.key(part))

    def _generator(self, name: str, seed: int) -> torch.Generator:
        if self.recordings is None:
            return torch.Generator(self.device).manual_seed(seed)
        return self.recordings.generator(name, seed)

    def refuse(self, why: str) -> None:
        """Note why training steps are not recorded; do nothing if there are no recordings."""
        if self.recordings is not None:
            self.recordings.refuse(why)

    def hold(self, name: str, value: T) -> T:
        """Return the value in buffers with fixed addresses if steps are recorded, else unchanged.
        The next task overwrites these buffers; `owned_copy` returns a tensor that is safe to keep."""
        return value if self.recordings is None else self.recordings.hold(name, value)

    def hold_rows(self, name: str, rows: Tensor) -> Tensor:
        """Hold rows (n, ...) if later tasks may have more rows; the returned buffer may be longer."""
        return rows if self.recordings is None else self.recordings.hold_rows(name, rows)

    @property
    def asks_freely(self) -> bool:
        """True if reading a number from the device is free: on a CPU, without recordings."""
        return self.recordings is None and self.device.type == "cpu"

    def owned_copy(self, held: Tensor) -> Tensor:
        """Return a tensor that is safe to keep after the task: a copy of `held` if steps are recorded."""
        return held if self.recordings is None else held.clone()

    def number(self, name: str, value: float) -> float | Tensor:
        """Return a scalar whose value may differ between tasks, as a float or a 0-d float32 tensor.
        It is a tensor on a GPU and if steps are recorded, because a recording fixes Python numbers."""
        if self.asks_freely:
            return value
        return self.hold(name, torch.tensor(value, dtype=torch.float32, device=self.device))

    def trial(self, shard: Shard, size: int) -> str:
        """Compare recorded with unrecorded gradients on two batches of the shard, once for this network.

        Returns:
            The reason why the network's training steps cannot be recorded; "" if they can.
        """
        if self.running.slices:
            return "it has running statistics, which every step changes"
        if self._trial is None:
            assert self.recordings is not None
            self._trial = _trial(self, self.recordings, shard, min(size, shard.size))
        return self._trial

    def state(self) -> ModuleState:
        """Record what the module keeps besides the buffers of this network (fedsim.learning.module_state)."""
        return ModuleState(self.module, (self.weights, self.grads, self.statistics))

    def restore(self) -> None:
        """Remove what earlier uses have left in the module."""
        if self.kept_state is not None:
            self.kept_state.restore()

    def before_forward(self, hook: Callable[..., None]) -> None:
        """Call `hook` before every forward pass from now on."""
        self.restore()
        self.module.register_forward_pre_hook(hook)
        if self.kept_state is not None:
            self.kept_state = self.state()

    def eval(self) -> None:
        """Set evaluation mode. Nothing is left of earlier uses, such as a value cached for other weights."""
        self.restore()
        self.module.eval()

    def train(self) -> None:
        """Set training mode, except for the modules in `kept`. Nothing is left of earlier uses."""
        self.restore()
        self.module.train()
        for part in self.kept:
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
        """Allocate released buffers again, with arbitrary values; the parameters stay views of them."""
        for buffer in (self.weights, self.grads):
            if not buffer.untyped_storage().nbytes():
                buffer.untyped_storage().resize_(buffer.nbytes)

    def snapshot(self) -> Tensor:
        """Return a copy of the current weights, which is safe to send."""
        return self.weights.clone()

    def loss_gradient(
        self,
        inputs: Tensor,
        targets: Tensor,
        weight: float | Tensor,
        mean_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Write weight * grad(mean loss) into `grads`; return the mean (0-d, detached).

        mean_loss: function of outputs and targets that replaces the likelihood's loss.
        """
        self.grads.zero_()
        loss = (mean_loss or self.likelihood.loss)(self.outputs(inputs), targets)
        if not loss.requires_grad:
            raise UsageError(
                "no trained parameter reaches the model's outputs: its forward computes them without "
                "gradients (torch.no_grad, detach)"
            )
        (loss if isinstance(weight, float) and weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the network's outputs in its current mode.
        For a single example, batch normalisation uses its running statistics unchanged."""
        alone = [part for part in self._normalising.values() if part.training] if len(inputs) == 1 else []
        for part in alone:
            part.eval()
        outputs: Tensor = self.module(inputs)
        for part in alone:
            part.train()
        return outputs

    def logits(self, weights: Tensor, inputs: Tensor, of_batch: bool = False) -> Tensor:
        """Return the network's outputs (n, C) at `weights`, in evaluation mode, without gradients.

        of_batch: batch normalisation uses the statistics of `inputs`; running statistics do not change.
        """
        self.load(weights)
        self.eval()
        before = self.statistics.clone() if of_batch else self.statistics
        for part in self._normalising.values() if of_batch else ():
            part.train()
        with torch.no_grad():
            outputs = self.outputs(inputs)
            if of_batch:
                self.statistics.copy_(before)
        return outputs


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _may_draw(module: nn.Module) -> bool:
    """Return whether a module may use torch's generators: unseeded dropout, RReLU, user-defined modules."""
    if isinstance(module, SeededDropout):
        return False
    own = not type(module).__module__.startswith("torch.nn.modules.")
    return own or isinstance(module, _DropoutNd | nn.RReLU)


def _trial(net: Net, recordings: Recordings, shard: Shard, size: int) -> str:
    rows = torch.arange(shard.size, device=shard.targets.device)
    batches = [shard.batch(part) for part in (rows[:size], rows[-size:])]
    inputs, targets = (recordings.hold(f"trial {i}", part) for i, part in enumerate(batches[0]))

    def gradient(on: tuple[Tensor, Tensor]) -> Tensor:
        with net.noise(1):
            return torch.cat([net.loss_gradient(*on, 1.0).reshape(1), net.grads])

    net.train()
    stochastic, net.stochastic = net.stochastic, False
    with seeded_torch(1, net.device):
        before = _default_states(net.device)
        expected = [gradient(batch) for batch in batches]
        if _default_states(net.device) != before:
            net.stochastic = stochastic
            return "its forward pass draws from torch's own generators"
    result: list[Tensor] = []
    try:
        with net.noise(1):
            repeat = recordings.once(lambda: result.append(net.loss_gradient(inputs, targets, 1.0)))
    except (RuntimeError, AssertionError) as e:
        return f"its forward or backward pass cannot be recorded ({str(e).splitlines()[0]})"
    for batch, gradient_as_it_comes in zip(batches, expected, strict=True):
        inputs.copy_(batch[0])
        targets.copy_(batch[1])
        with net.noise(1):
            repeat()
            again = torch.cat([result[0].reshape(1), net.grads])
        if not torch.equal(again.view(torch.int32), gradient_as_it_comes.view(torch.int32)):
            return "a recorded gradient has other bits than one that is computed as it comes"
    return ""


def _default_states(device: torch.device) -> list[bytes]:
    """Return the states of torch's global generators."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]
