"""Compute several tasks at once in one worker, each on its own CUDA stream.

A small network's kernels use a small part of a GPU, so kernels of several clients can run at the same time.
One thread launches them: each task is a coroutine with its own network, recordings (CUDA graphs of training
steps) and stream. A task yields to the others before it repeats a recording and while it waits for a number
from the device. It launches the same kernels as it would alone, so its result does not depend on other tasks.

The tasks are not threads, because the capture of a CUDA graph fails while another thread launches kernels,
and because threads that launch kernels wait for the interpreter lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from fedsim.problem import Problem

if TYPE_CHECKING:
    from greenlet import greenlet

AHEAD = 16
"""The number of recordings that a lane may launch ahead of the device. The device thus has work while the
thread encodes an upload or evaluates."""
NAP = 1e-4
"""Seconds to sleep between two checks of a busy device."""

Work = Callable[[Problem], object]


class Stream(Protocol):
    """A queue of kernels on the device."""

    def enter(self) -> None:
        """Make this the stream of all kernels that are launched from now on."""

    def mark(self) -> Callable[[], bool]:
        """Return a function that tells whether all kernels launched here until now have finished."""


class CudaStream:
    """A stream of the network's GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # it has set up the networks

    def enter(self) -> None:
        torch.cuda.set_stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.query


class Lane:
    """A place for one task at a time: a problem with its own network, and a stream."""

    def __init__(self, problem: Problem, stream: Stream, heartbeat: Callable[..., None]) -> None:
        self.problem, self._stream, self._heartbeat = problem, stream, heartbeat
        self._task: greenlet | None = None
        self._marks: deque[Callable[[], bool]] = deque()
        self._until: Callable[[], bool] | None = None
        """A function that tells whether the task may continue; None if the task does not wait."""
        if (recordings := problem.net.recordings) is not None:
            recordings.before, recordings.settle = self._repeats, self._settles

    @property
    def busy(self) -> bool:
        return self._task is not None

    @property
    def ready(self) -> bool:
        """True if the lane has a task that does not wait for the device."""
        return self._task is not None and (self._until is None or self._until())

    def start(self, work: Work) -> None:
        """Start a task, and return when the task first yields or ends."""
        from greenlet import greenlet

        self._task = greenlet(work)
        self._switch(self.problem)

    def advance(self) -> None:
        """Continue the task until it yields again or ends."""
        self._switch()

    def close(self) -> None:
        """Abort the task, if any."""
        if self._task is not None:
            self._task.throw()
            self._task = None

    def _switch(self, *arguments: Problem) -> None:
        assert self._task is not None
        self._stream.enter()
        self._until = None
        try:
            self._task.switch(*arguments)
        finally:
            if self._task.dead:
                self._task = None
                self._marks.clear()

    def _repeats(self) -> None:
        """Yield to other tasks until at most AHEAD launched recordings are pending."""
        self._marks.append(self._stream.mark())
        self._give_way(self._marks.popleft() if len(self._marks) > AHEAD else None)
        self._heartbeat()

    def _settles(self) -> None:
        """Yield to other tasks until the device has finished all kernels of this task."""
        self._marks.clear()
        self._give_way(self._stream.mark())
        self._heartbeat()

    def _give_way(self, until: Callable[[], bool] | None) -> None:
        assert self._task is not None and self._task.parent is not None
        if self.problem.net.draws_globally:
            return  # do not yield: other tasks would draw from the same generator
        self._until = until
        with torch.enable_grad():  # tasks expect it; the own setting is restored
            self._task.parent.switch()


class Lanes:
    """The lanes of a worker; with a single lane, tasks are computed as they arrive."""

    def __init__(
        self,
        problems: Sequence[Problem],
        heartbeat: Callable[..., None],
        stream: Callable[[torch.device], Stream] = CudaStream,
    ) -> None:
        """Make one lane for each problem. problems: copies of a problem with a network each (Problem.beside).
        heartbeat: called while tasks compute."""
        self._alone = problems[0] if len(problems) == 1 else None
        self._lanes: list[Lane] = []
        for problem in problems:
            problem.net.before_forward(heartbeat)
            if self._alone is None:
                self._lanes.append(Lane(problem, stream(problem.net.device), heartbeat))
            elif problem.net.recordings is not None:
                problem.net.recordings.before = heartbeat

    @property
    def busy(self) -> bool:
        """True if a task is being computed."""
        return any(lane.busy for lane in self._lanes)

    @property
    def free(self) -> bool:
        """True if another task can be started."""
        return self._alone is not None or not all(lane.busy for lane in self._lanes)

    def start(self, work: Work) -> None:
        """Start a task in a free lane."""
        if self._alone is not None:
            work(self._alone)
        else:
            next(lane for lane in self._lanes if not lane.busy).start(work)

    def advance(self) -> None:
        """Continue every task that does not wait for the device; sleep for NAP seconds if all wait.

        Raises:
            Exception: If a task raises one.
        """
        ready = [lane for lane in self._lanes if lane.ready]
        for lane in ready:
            lane.advance()
        if not ready and self.busy:
            time.sleep(NAP)

    def close(self) -> None:
        """Abort all tasks without replies."""
        for lane in self._lanes:
            lane.close()
