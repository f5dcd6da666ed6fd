"""Recordings of training steps, which the device repeats without Python in one task after another.

A step of a small network has about forty kernels. On a GPU, launching them from Python takes longer than
computing them. A recording launches all of them at once. They are the same kernels on the same addresses, so
the results have the same bits. Everything that a step reads or writes must be in buffers with fixed
addresses, which exist as long as the network. A task copies its values into these buffers and its results out
of them. The device selects the batch by a counter that the step itself advances, so one recording can have
several steps. A recorded step must not read a number from the device. A recording fixes Python numbers, so
they are part of its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from fedsim.wire.schema import map_tensors

Work = Callable[[], object]
"""A function that launches kernels on buffers with fixed addresses."""
Record = Callable[[Work, Sequence[torch.Generator]], Callable[[], object]]
"""A function that executes work once and returns a function that repeats it. Work may draw from the given
generators; a repetition draws from their current states."""

STEPS = 8
"""Number of training steps in one recording. Recordings of a single step execute the remainder."""
KEPT = 64
"""Largest number of recordings of a network. The least recently used recording is dropped."""
T = TypeVar("T")


def _nothing(*_: object) -> None:
    pass


class Recordings:
    """The buffers, generators and recordings of one network on its device."""

    def __init__(self, record: Record, device: torch.device, steps: int = STEPS) -> None:
        self.steps = steps
        self.before: Callable[..., None] = _nothing
        """A function that is called before every repetition, in place of a hook of the forward pass."""
        self.settle: Callable[[], None] = _nothing
        """A function that is called before a number is read that the device may still be computing."""
        self.refusals: dict[str, None] = {}
        """The reasons why steps were not recorded, each once."""
        self._record, self._device = record, device
        self._buffers: dict[Hashable, Tensor] = {}
        self._generators: dict[str, torch.Generator] = {}
        self._repeats: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._warm: set[Hashable] = set()

    def hold(self, name: str, value: T) -> T:
        """Copy the value's tensors into the buffers of this name; return the value with these buffers."""
        numbered = count()

        def buffer(tensor: Tensor) -> Tensor:
            key = (name, next(numbered), tuple(tensor.shape), tensor.dtype)
            if key not in self._buffers:
                self._buffers[key] = torch.empty_like(
                    tensor, device=self._device, memory_format=torch.contiguous_format
                )
            return self._buffers[key].copy_(tensor, non_blocking=True)

        return map_tensors(value, buffer)

    def hold_rows(self, name: str, rows: Tensor) -> Tensor:
        """Copy rows (n, ...) to the beginning of a buffer, which is as long as the largest n so far.
        A buffer that must grow gets a new address, so all recordings are dropped."""
        old = self._buffers.get(name)
        if old is None or old.shape[1:] != rows.shape[1:] or old.dtype != rows.dtype or len(old) < len(rows):
            self._buffers[name] = torch.empty_like(
                rows, device=self._device, memory_format=torch.contiguous_format
            )
            self._repeats.clear()
        self._buffers[name][: len(rows)].copy_(rows, non_blocking=True)
        return self._buffers[name]

    def generator(self, name: str, seed: int) -> torch.Generator:
        """Return the device's generator of this name, seeded with `seed`."""
        if name not in self._generators:
            self._generators[name] = torch.Generator(self._device)
            self._repeats.clear()  # the recordings do not know the new generator
        return self._generators[name].manual_seed(seed)

    def run(self, key: Hashable, times: int, step: Work) -> None:
        """Execute `step` the given number of `times`.

        The first step under a key is not recorded, because libraries initialise themselves in it. Later steps
        are recorded the first time and then repeated.
        """
        if key not in self._warm:
            self._warm.add(key)
            step()
            times -= 1
        whole, rest = divmod(times, self.steps)
        for steps, repeats in ((self.steps, whole), (1, rest)):
            for _ in range(repeats):
                self._repeat((key, steps), steps, step)

    def _repeat(self, key: Hashable, steps: int, step: Work) -> None:
        repeat = self._repeats.get(key)
        if repeat is not None:
            self._repeats.move_to_end(key)
            self.before()
            repeat()
            return

        def work() -> None:
            for _ in range(steps):
                step()

        self._repeats[key] = self._record(work, tuple(self._generators.values()))
        if len(self._repeats) > KEPT:
            self._repeats.popitem(last=False)

    def once(self, work: Work) -> Callable[[], object]:
        """Execute and record work; return the function that repeats it, without storing the recording."""
        return self._record(work, tuple(self._generators.values()))

    def refuse(self, why: str) -> None:
        """Note and print, once, a reason why steps are not recorded."""
        if why not in self.refusals:
            self.refusals[why] = None
            print(f"training steps are not recorded: {why}", flush=True)


def cuda_graphs() -> Record:
    """Return a Record that makes CUDA graphs on the current GPU, with one memory pool for all graphs."""
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
    kept: list[torch.cuda.CUDAGraph] = []

    def record(work: Work, generators: Sequence[torch.Generator]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()  # captured, not computed yet
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        graph.replay()
        kept[:] = [graph]  # a pool is only usable while one of its graphs exists
        return graph.replay

    return record
