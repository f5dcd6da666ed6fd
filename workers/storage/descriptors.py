"""Opening files while other processes take this one's descriptors with idle connections.

workers.transport.ingress_limiter ends such connections, some moments after they were accepted. libzmq accepts
until no descriptor is left, and what opens a file in these moments has to try again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 5.0
"""After so long it is not a matter of moments."""
PAUSE = 0.001


def patiently(call: Callable[[], T]) -> T:
    """Return what `call` returns; call it again while this process has no descriptor left.

    Raises:
        OSError: What `call` raises; that there is no descriptor, after SECONDS.
    """
    until = time.monotonic() + SECONDS
    while True:
        try:
            return call()
        except OSError as e:
            if e.errno != errno.EMFILE or time.monotonic() > until:
                raise
        time.sleep(PAUSE)
