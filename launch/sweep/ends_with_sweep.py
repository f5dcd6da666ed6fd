"""Make a sweep's fork server, which imports this module first, end with the sweep, even during imports.

Otherwise, the server would notice the sweep's end only after importing torch and after its last child's end.
"""

from __future__ import annotations

import os

from launch.processes.fork_server import die_with_parent

SWEEP = "FEDSIM_SWEEP"
"""The environment variable with the process id of the sweep."""

if SWEEP in os.environ and __name__ != "__main__":
    parent = int(os.environ[SWEEP])
    if parent == os.getppid():
        die_with_parent(parent)
