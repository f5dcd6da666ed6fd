"""One copy of a model's frozen part, and of the start of training, for all processes of a machine.

The coordinator writes the tensors that are not trained into one file of the run folder, and the initial
weights into another, and every process maps these files in place of its own copies. The pages are the
kernel's, so that they count once, however many workers there are. The files are no messages, and nobody has
to believe them: a worker says the digest of its frozen part, as mapped, when it registers, and compares the
start with its own before it takes it.
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
"""Bytes that are worth a file."""
SMALL = 1 << 12
"""Smaller tensors stay where they are."""
ALIGNMENT = 64


def write_frozen(module: nn.Module, folder: Path) -> Path | None:
    """Write the frozen part of a model on the CPU; return the file, or None if it is too small for one."""
    tensors = _large(module)
    if _size(tensors) < LEAST:
        return None
    write_atomically(folder / FILE, (_raw(t) for _, t in tensors))
    return folder / FILE


def map_frozen(module: nn.Module, folder: Path) -> bool:
    """Put the file's tensors in the place of the module's own, whose memory is freed.

    Return False, and change nothing, without the file or with one of another size.
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
    """Write the initial weights (P,), on the CPU; return the file, or None if they are too few for one."""
    if start.nbytes < LEAST:
        return None
    write_atomically(folder / START, [raw_bytes(start)])
    return folder / START


def map_start(start: Tensor, folder: Path) -> bool:
    """Let the initial weights (P,) be the file's; return False if there is none with the same bits."""
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
        # copy on write: torch warns of memory that it cannot write, and nothing ever writes it
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
