"""An unnamed file for data that does not fit into memory.

Freed space is reused, because new pages of the page cache can cost ten times as much as writing
(docs/decisions/026-large-models.md). The file disappears with its process, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedsim.errors import DiskError
from fedsim.wire.envelope import Buffer
from workers.storage.atomic_files import disk_errors, patiently


@dataclass(frozen=True, order=True)
class Region:
    """A range of bytes in the file: the position of the first one, and their number."""

    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size


class SpillFile:
    """Regions of one file. Only one thread at a time may call reserve or free; all may write and read."""

    def __init__(self, folder: Path) -> None:
        """Create the file in a folder; create the folder if it does not exist."""
        self._label = f"spooled uploads in {folder}"
        with disk_errors(self._label):
            folder.mkdir(exist_ok=True)
            self._file, name = patiently(lambda: tempfile.mkstemp(".upload", dir=folder))
            weakref.finalize(self, os.close, self._file)
            os.unlink(name)
        self._free: list[Region] = []
        """The free regions, in ascending order; no two are adjacent."""
        self._end = 0

    def reserve(self, size: int) -> Region:
        """Return a part of the smallest free region with at least `size` bytes, or extend the file."""
        fitting = [r for r in self._free if r.size >= size]
        if not fitting:
            at_the_end = self._free and self._free[-1].end == self._end
            begin = self._free.pop().begin if at_the_end else self._end
            self._end = begin + size
            return Region(begin, size)
        smallest = min(fitting, key=lambda r: r.size)
        self._free.remove(smallest)
        if smallest.size > size:
            self._add(Region(smallest.begin + size, smallest.size - size))
        return Region(smallest.begin, size)

    def free(self, region: Region) -> None:
        """Make a region available to be overwritten."""
        if region.size:
            self._add(region)

    def _add(self, region: Region) -> None:
        merged: list[Region] = []
        for r in sorted([*self._free, region]):
            if merged and merged[-1].end == r.begin:
                r = Region(merged[-1].begin, merged.pop().size + r.size)
            merged.append(r)
        self._free = merged

    def write(self, region: Region, frames: Sequence[Buffer]) -> None:
        """Write frames one after another into a region of their size."""
        at = region.begin
        with disk_errors(self._label):
            for frame in frames:
                data = memoryview(frame).cast("B")
                while data.nbytes:  # the kernel takes at most 2 GiB at a time
                    done = os.pwrite(self._file, data, at)
                    data, at = data[done:], at + done

    def read(self, region: Region) -> memoryview:
        """Return a region's bytes in new memory, so that decoded fields may be views of them."""
        data, at = torch.empty(region.size, dtype=torch.uint8).numpy().data, 0
        with disk_errors(self._label):
            while at < region.size:
                done = os.preadv(self._file, [data[at:]], region.begin + at)
                if not done:
                    raise DiskError(f"{self._label}: the file has been cut off")
                at += done
        return data
