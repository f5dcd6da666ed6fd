"""Share one copy of a model's frozen tensors and initial weights among all processes of a machine.

The coordinator writes the frozen tensors, which are not trained, to one file of the run folder, and the
initial weights to another. Every process maps these files in place of its own copies. The mapped pages are
shared, so they need memory only once. No process has to trust the files: a worker reports the digest of the
mapped frozen tensors when it registers, and uses the mapped initial weights only if they equal its own.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.learning.frozen import frozen_tensors, put_frozen
from fedsim.wire.codecs import raw_bytes
from workers.storage.atomic_files import disk_errors, write_atomically

FILE = "frozen"
START = "start"
LEAST = 1 << 20
"""The minimum number of bytes for which a file is written."""
SMALL = 1 << 12
"""Each process keeps its own copies of tensors with fewer bytes."""
ALIGNMENT = 64


def write_frozen(module: nn.Module, folder: Path) -> Path | None:
    """Write the frozen part of a model on the CPU; return the file, or None if it is too small to share."""
    tensors = _large(module)
    if _size(tensors) < LEAST:
        return None
    write_atomically(folder / FILE, (_raw(t) for _, t in tensors))
    return folder / FILE


def map_frozen(module: nn.Module, folder: Path) -> bool:
    """Replace the module's frozen tensors by those of the file, and free their memory; return True.

    Return False and change nothing if there is no file or its size is wrong.
    """
    tensors, path = _large(module), folder / FILE
    if not tensors or not path.is_file() or path.stat().st_size != _size(tensors):
        return False
    mapped, offset = _mapped(path), 0
    for name, own in tensors:
        shared = torch.frombuffer(mapped, dtype=own.dtype, count=own.numel(), offset=offset).view(own.shape)
        put_frozen(module, [(name, shared)])
        offset += _padded(own)
    return True


def write_start(start: Tensor, folder: Path) -> Path | None:
    """Write the initial weights (P,) on the CPU; return the file, or None if they are too few to share."""
    if start.nbytes < LEAST:
        return None
    write_atomically(folder / START, [raw_bytes(start)])
    return folder / START


def map_start(start: Tensor, folder: Path) -> bool:
    """Replace the initial weights (P,) by the file's; return False if the file is missing or differs."""
    path = folder / START
    if not path.is_file() or path.stat().st_size != start.nbytes:
        return False
    shared = torch.frombuffer(_mapped(path), dtype=start.dtype)
    if not torch.equal(shared, start):
        return False
    start.data = shared
    return True


def _mapped(path: Path) -> mmap.mmap:
    with disk_errors(path), path.open("rb") as file:
        # copy-on-write, although nothing is ever written: torch warns about read-only memory
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _large(module: nn.Module) -> list[tuple[str, Tensor]]:
    every = ((name, t) for name, t in frozen_tensors(module) if t.device.type == "cpu")
    return [(name, t) for name, t in every if t.nbytes >= SMALL]


def _size(tensors: list[tuple[str, Tensor]]) -> int:
    return sum(_padded(t) for _, t in tensors)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _raw(tensor: Tensor) -> bytes:
    return raw_bytes(tensor).tobytes().ljust(_padded(tensor), b"\0")
