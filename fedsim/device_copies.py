"""Copies of tensors on a worker's device, which stay there between tasks while memory allows.

States, broadcasts and examples are created and stored on the CPU. A GPU needs a copy of a client's state and
examples in every round in which its worker trains the client, and a copy of the broadcast for every client.
The copies stay on the GPU while there is memory. A worker on the CPU copies and keeps nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim.wire.schema import map_tensors, tensors_of

T = TypeVar("T")
RecordEvent = Callable[[], Callable[[list[Tensor]], None]]
"""A function to call after copies were started. It returns a second function, which takes the copies, makes
the current stream wait for them, and marks their memory as in use by that stream."""
FREE_SHARE = 0.5
"""The share of a GPU's memory that must stay free, for training and other workers, when a copy is kept."""


def to_cpu(value: T) -> T:
    """Copy a value to the CPU, through pinned buffers if it is on a GPU, and wait once for all tensors."""
    gpus = {t.device for t in tensors_of(value) if t.is_cuda}
    moved = map_tensors(value, lambda t: t.to("cpu", non_blocking=True))
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    return moved


def room_on(device: torch.device) -> Callable[[int], bool]:
    """Return a function that tells whether a copy of `nbytes` may stay on a device; on a CPU, none may."""
    if device.type != "cuda":
        return lambda nbytes: False

    def room(nbytes: int) -> bool:
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused - nbytes >= FREE_SHARE * total

    return room


def events_of(device: torch.device) -> RecordEvent:
    """Return the RecordEvent that makes a stream wait for another stream's copies; it is empty on a CPU."""
    if device.type != "cuda":
        return lambda: lambda tensors: None

    def record_event() -> Callable[[list[Tensor]], None]:
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))

        def wait(tensors: list[Tensor]) -> None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(copied)
            for tensor in tensors:
                tensor.record_stream(stream)

        return wait

    return record_event


class DeviceCopies:
    """The copies that stay on a device, by name. A copy is valid for the stamp with which it was stored.

    The least recently used copy is removed first. Callers must not change the returned tensors.
    """

    def __init__(
        self,
        device: torch.device,
        room: Callable[[int], bool] | None = None,
        copy: Callable[[Tensor], Tensor] | None = None,
        record_event: RecordEvent | None = None,
    ) -> None:
        """Create an empty store. Tests pass room, copy and record_event to do without a GPU."""
        self._room = room or room_on(device)
        self._copy = copy or (lambda tensor: tensor.to(device, non_blocking=True))
        self._record_event = record_event or events_of(device)
        self._kept: OrderedDict[Hashable, tuple[Hashable, Any, Callable[[list[Tensor]], None]]] = (
            OrderedDict()
        )

    def get(self, name: Hashable, stamp: Hashable, value: Callable[[], T]) -> T:
        """Return the copy with this name and stamp; else copy `value()`, and keep that copy if it fits."""
        kept = self._kept.get(name)
        if kept is not None and kept[0] == stamp:
            self._kept.move_to_end(name)
            copied: T = kept[1]
            kept[2](list(tensors_of(copied)))
            return copied
        stored = value()
        copied = map_tensors(stored, self._copy)
        if self._make_room(name, stored):
            self._kept[name] = stamp, copied, self._record_event()
        return copied

    def keep(self, name: Hashable, stamp: Hashable, value: object) -> None:
        """Replace the copy with this name by a copy of `value` for later use, if there is room."""
        if self._make_room(name, value):
            self._kept[name] = stamp, map_tensors(value, self._copy), self._record_event()

    def _make_room(self, name: Hashable, value: object) -> bool:
        self._kept.pop(name, None)
        nbytes = sum(t.nbytes for t in tensors_of(value))
        while not self._room(nbytes):
            if not self._kept:
                return False
            self._kept.popitem(last=False)
        return True
