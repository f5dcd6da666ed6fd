"""Settings of the C library's heap: which memory is kept for reuse, and which is returned to the system.

docs/decisions/026-large-models.md and 039-memory-or-time.md have the measurements. The functions do nothing
if the C library has neither mallopt nor malloc_trim.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MAPPED = 256 << 20
"""Buffers of at least this many bytes are mapped separately, and returned to the system when freed."""
SAVE_MEMORY = "FEDSIM_SAVE_MEMORY"
"""Environment variable: if 1, MAPPED_SAVING applies, and tasks of large models are not sent in advance."""
MAPPED_SAVING = 16 << 20
INT_MAX = 2**31 - 1
"""The largest value that mallopt accepts."""
LARGE = 1 << 20
"""A model with at least this many parameters is large; SAVE_MEMORY trades time for its memory."""


def set_malloc_thresholds() -> None:
    """Return free memory to the system now. Keep memory freed later in one heap, for reuse.

    Every message and batch allocates and frees buffers. Mapping them again each time costs a worker 5 % of
    its time in page faults, and half of its time with vectors of 65 MB.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.malloc_trim(0)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_THRESHOLD, MAPPED_SAVING if saves_memory() else MAPPED)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    libc.mallopt(M_TOP_PAD, 1 << 24)


def give_back(params: int) -> None:
    """Return the gaps in the heap to the system if a model of `params` parameters is large.

    float32 and float64 vectors are not freed in the order of their allocation. After a few tasks, half of the
    heap is gaps that are too small for the next vector. Calling this after every task would cost more time
    than the memory is worth.
    """
    libc = ctypes.CDLL(None)
    if params >= LARGE and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def keep_vectors_apart(params: int) -> None:
    """For a large model, map buffers of at least 6 bytes per parameter (float64 vectors) separately.

    All vectors in the heap then have the same size, and freed space fits the next vector. The coordinator
    need not return gaps after each round (docs/decisions/026-large-models.md). Workers do not call this: they
    have more float64 vectors than float32 ones, and keep both in the heap.
    """
    libc = ctypes.CDLL(None)
    if params >= LARGE and hasattr(libc, "mallopt") and not saves_memory():
        libc.mallopt(M_MMAP_THRESHOLD, min(6 * params, INT_MAX))


def saves_memory(params: int = LARGE) -> bool:
    """Return whether to save memory at the cost of time with a model of `params` parameters."""
    return params >= LARGE and os.environ.get(SAVE_MEMORY) == "1"
