"""The first import of a sweep's fork server, which makes the server end with the sweep, even during imports.

Without it, the server would notice the end only after importing torch and after its last child has ended.
"""

from __future__ import annotations

import os

from launch.processes.fork_server import die_with_parent

SWEEP = "FEDSIM_SWEEP"
"""The variable that names the sweep's process."""

if SWEEP in os.environ and __name__ != "__main__":
    parent = int(os.environ[SWEEP])
    if parent == os.getppid():
        die_with_parent(parent)
