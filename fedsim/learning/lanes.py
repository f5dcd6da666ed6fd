"""Several clients at once in one process: L lanes, and one launch for the gradients of all of them.

A lane computes one task, in a coroutine of its own and with a network of its own, whose buffers are rows of
(L, P). The code of algorithms and solvers is that of one client: where it asks for the gradient of a batch,
its lane stops, and once all lanes have stopped or ended, one launch (fedsim.learning.stacked) computes what
they have asked for. Lanes take turns by their numbers, and there are no threads.

Every launch has L lanes, used or not, and as many rows as a batch has at most, so that the bits of a task
depend on L, and neither on its lane nor on the other tasks. What is computed in evaluation mode (curvature,
predictions) is computed by the lane's own network, as without lanes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from fedsim.learning.frozen import is_frozen
from fedsim.learning.params import Net
from fedsim.learning.stack import Stack
from fedsim.learning.stacked import Part, StackedNet


class LaneNet(Net):
    """The network of one lane. A gradient in training mode is computed in a launch of all lanes."""

    def __init__(self, of: Net, number: int, weights: Tensor, grads: Tensor, lanes: Lanes) -> None:
        shared = {id(tensor): tensor for tensor in _frozen(of.module)}
        super().__init__(copy.deepcopy(of.module, shared), of.device, of.likelihood)
        weights.copy_(self.weights)
        self.number, self.weights, self.grads = number, weights, grads
        self._bind()
        self._lanes, self._rows = lanes, 0

    def release(self) -> None:
        """Do nothing: the buffers are rows of those of all lanes."""

    def expect(self, rows: int) -> None:
        self._rows = min(rows, self._lanes.most)

    def loss_gradient(self, inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        """As Net has it. A batch of more rows than were announced is computed alone."""
        if self.module.training and len(targets) <= self._rows:
            return self._lanes.gradient(self._rows, Part(self.number, inputs, targets, weight))
        return super().loss_gradient(inputs, targets, weight)


def _frozen(module: nn.Module) -> Iterator[Tensor]:
    """What all lanes have in common, because nothing changes it."""
    yield from (p for p in module.parameters() if not p.requires_grad)
    for part in module.modules():
        if is_frozen(part):
            yield from part.buffers(recurse=False)


class _Lane:
    """One lane and the job that it carries out, if it has one."""

    def __init__(self, net: LaneNet) -> None:
        self.net = net
        self.job: greenlet | None = None
        self.asked: tuple[int, Part] | None = None
        """The rows of the launch that it waits for, and its part."""
        self.loss: Tensor | None = None
        """Of the last launch, until it goes on."""
        self.spent = self.since = 0
        """Nanoseconds that it has used, up to the moment `since` from which it runs."""


class Lanes:
    """L lanes and their launches. Jobs are functions without arguments; in one, `current` is its network."""

    def __init__(self, net: Net, count: int, most: int) -> None:
        """net: to copy. most: the examples of the largest client, of which a batch has at most all."""
        self.most, self._main = most, getcurrent()
        weights, grads = (Stack.zeros(count, (net.layout.size,), net.weights).values for _ in range(2))
        self._of = net
        self._weights, self._grads = weights, grads
        self._lanes = [_Lane(LaneNet(net, i, weights[i], grads[i], self)) for i in range(count)]
        self._stacked: dict[tuple[int, ...], StackedNet] = {}
        self._before_launch: Callable[[], None] = lambda: None

    @property
    def free(self) -> bool:
        """Whether a job can start."""
        return any(lane.job is None for lane in self._lanes)

    @property
    def busy(self) -> bool:
        """Whether a job has not ended."""
        return any(lane.job is not None for lane in self._lanes)

    @property
    def current(self) -> LaneNet | None:
        """The network of the job from which this is asked; None elsewhere."""
        lane = self._running()
        return None if lane is None else lane.net

    def _running(self) -> _Lane | None:
        here = getcurrent()
        return next((lane for lane in self._lanes if lane.job is here), None)

    def clock(self) -> int:
        """Nanoseconds that the present job has used: of a launch its share. Elsewhere, of any clock."""
        now, lane = time.monotonic_ns(), self._running()
        return now if lane is None else lane.spent + now - lane.since

    def watch(self, hook: Callable[..., None]) -> None:
        """Have something called before every launch, and before a forward pass of any lane's own network."""
        self._before_launch = hook
        for lane in self._lanes:
            lane.net.module.register_forward_pre_hook(hook)

    # ---- jobs

    def start(self, job: Callable[[], Any]) -> None:
        """Give a job to a free lane; it begins with the next `advance`."""
        lane = next(lane for lane in self._lanes if lane.job is None)
        lane.job, lane.asked, lane.loss = greenlet(job), None, None

    def advance(self) -> list[Any]:
        """Let all jobs go on until they ask for a gradient or end, and compute what they ask for if none has
        ended, since a free lane may get another job first.

        Returns:
            What the jobs that have ended have returned.

        Raises:
            BaseException: What a job raises; its lane is free then.
        """
        self._main, ended = getcurrent(), []
        enabled, state = torch.is_grad_enabled(), torch.get_rng_state()
        for lane in self._lanes:
            job = lane.job
            if job is None or lane.asked is not None:
                continue
            lane.since, loss, lane.loss = time.monotonic_ns(), lane.loss, None
            job.parent = self._main
            try:
                result = job.switch() if loss is None else job.switch(loss)
            finally:
                lane.spent += time.monotonic_ns() - lane.since
                torch.set_grad_enabled(enabled)
                torch.set_rng_state(state)
                if job.dead:
                    lane.job = None
            if job.dead:
                ended.append(result)
        if not ended:
            self._launch()
        return ended

    def alone(self, job: Callable[[], Any]) -> Any:
        """Carry out one job in these lanes, which are free; return what it returns."""
        self.start(job)
        while not (ended := self.advance()):
            pass
        return ended[0]

    def close(self) -> None:
        """End all jobs."""
        for lane in self._lanes:
            job, lane.job = lane.job, None
            if job is not None:
                job.throw(GreenletExit)

    # ---- gradients

    def gradient(self, rows: int, part: Part) -> Tensor:
        """Wait, in a job, for the launch that computes its part; return the mean loss."""
        lane = self._lanes[part.lane]
        lane.asked = rows, part
        enabled, state = torch.is_grad_enabled(), torch.get_rng_state()
        loss: Tensor = self._main.switch()
        torch.set_grad_enabled(enabled)
        torch.set_rng_state(state)
        return loss

    def _launch(self) -> None:
        """Compute the parts of most lanes that ask for the same shape. A launch writes the gradients of all
        lanes, so that the others' turn comes when these have used theirs."""
        by_shape: dict[tuple[int, ...], list[tuple[_Lane, Part]]] = {}
        for lane in self._lanes:
            if lane.asked is not None:
                rows, part = lane.asked
                by_shape.setdefault((rows, *part.inputs.shape[1:]), []).append((lane, part))
        if not by_shape:
            return
        self._before_launch()
        shape, asking = max(by_shape.items(), key=lambda item: len(item[1]))
        began = time.monotonic_ns()
        losses = self._stack(shape).gradient([part for _, part in asking])
        share = (time.monotonic_ns() - began) // len(asking)
        for (lane, _), loss in zip(asking, losses, strict=True):
            lane.asked, lane.loss, lane.spent = None, loss, lane.spent + share

    def _stack(self, shape: tuple[int, ...]) -> StackedNet:
        if shape not in self._stacked:
            modules = [lane.net.module for lane in self._lanes]
            of = (self._of.layout, self._weights, self._grads, self._of.likelihood)
            self._stacked[shape] = StackedNet(modules, *of, shape)
        return self._stacked[shape]
