"""What malloc does with large buffers."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def set_malloc_thresholds() -> None:
    """Give back what the set-up left behind, then keep what training and messages free.

    Large buffers come and go with every message and batch; mapping them anew each time costs a worker
    5 % of its time in page faults. Does nothing where the C library has no such settings.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.malloc_trim(0)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    libc.mallopt(M_TOP_PAD, 1 << 24)
