"""The C library's heap: what is kept for the next message, and what is given back to the machine.

docs/decisions/026-large-models.md and 039-memory-or-time.md have the measurements. Nothing happens where the
C library has no such functions.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MAPPED = 256 << 20
"""Bytes from which a buffer is mapped by itself, and given back when it is freed."""
SAVE_MEMORY = "FEDSIM_SAVE_MEMORY"
"""The environment variable; 1: already from MAPPED_SAVING bytes on, and no broadcast waits beside a task."""
MAPPED_SAVING = 16 << 20
INT_MAX = 2**31 - 1
"""The largest value that mallopt accepts."""
LARGE = 1 << 20
"""Parameters from which memory between two tasks counts for more than the time to get it again."""


def set_malloc_thresholds() -> None:
    """Give back what the set-up left behind, then keep what training and messages free, in one heap.

    Buffers come and go with every message and batch; mapping them anew each time costs a worker 5 % of its
    time in page faults, and with vectors of 65 MB half of it.
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
    """Give back the gaps of the heap, if a vector of `params` numbers is large.

    After every task this would cost more time than the memory is worth.

    Vectors of 4 and of 8 bytes a number come and go in different orders, so that after a few tasks half of
    the heap is gaps in which the next vector does not fit.
    """
    libc = ctypes.CDLL(None)
    if params >= LARGE and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def keep_vectors_apart(params: int) -> None:
    """Map every buffer above a float32 vector of `params` numbers by itself, if that is large.

    What stays in the heap has one size, so that what is freed fits what is needed next, and the coordinator
    need not give gaps back after every round (docs/decisions/037-fresh-pages.md). A worker has more float64
    vectors than float32 ones, and keeps them.
    """
    libc = ctypes.CDLL(None)
    if params >= LARGE and hasattr(libc, "mallopt") and not saves_memory():
        libc.mallopt(M_MMAP_THRESHOLD, min(6 * params, INT_MAX))


def saves_memory(params: int = LARGE) -> bool:
    """Return whether to save memory at the cost of time, with a model of `params` numbers."""
    return params >= LARGE and os.environ.get(SAVE_MEMORY) == "1"
