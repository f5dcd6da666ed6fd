"""Training steps that a device repeats without Python.

A step of a small network is some forty kernels, and on a GPU starting them from Python takes longer than
computing them. All of a step's buffers (network, optimiser, penalties) stay where they are during a task, so
a step can be recorded and repeated: the same kernels on the same addresses, hence the same bits, in one
launch.

A recorded step must not read a number from the device, and its only input is the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Work = Callable[[], Tensor]
"""Kernels on buffers that stay where they are; it returns the buffer of its result."""
Record = Callable[[Work], tuple[Callable[[], object], Tensor]]
"""Executes work once; returns a function that repeats it, and the buffer of its result."""


def _nothing(*_: object) -> None:
    pass


@dataclass
class Recorder:
    """A device's way of recording. before: called before every repetition, like a forward hook."""

    record: Record
    before: Callable[..., None] = _nothing


class RecordedStep:
    """A step on a batch of rows, recorded at its second call. A batch of another size is computed as it is.

    The first call is not recorded, because libraries set themselves up in it.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], recorder: Recorder, size: int) -> None:
        """step: from the rows (size,) int64 of a batch to its loss (0-d); its work is on other buffers."""
        self._step, self._recorder, self._size = step, recorder, size
        self._warm = False
        self._rows: Tensor | None = None
        self._repeat: Callable[[], object]
        self._result: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the loss, in a buffer that is valid until the next call."""
        if len(rows) != self._size:
            return self._step(rows)
        if not self._warm:
            self._warm = True
            return self._step(rows)
        if self._rows is None:
            own = rows.clone()
            self._repeat, self._result = self._recorder.record(lambda: self._step(own))
            self._rows = own
            return self._result
        self._rows.copy_(rows)
        self._recorder.before()
        self._repeat()
        return self._result


def cuda_graphs() -> Recorder:
    """Record as CUDA graphs on the current GPU. All graphs take their memory from one pool.

    Not run on a GPU so far (docs/benchmarks.md#gpu): tests/support/tape.py stands for it on a CPU.
    """
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
    kept: list[torch.cuda.CUDAGraph] = []

    def record(work: Work) -> tuple[Callable[[], object], Tensor]:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = work()  # nothing is computed yet
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        graph.replay()
        kept[:] = [graph]  # torch cannot reuse a pool after all of its graphs are deleted
        return graph.replay, result

    return Recorder(record)
