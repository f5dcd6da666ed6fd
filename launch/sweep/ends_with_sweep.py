"""The first import of a sweep's fork server: it ends with the sweep, also while it still imports.

By itself it would notice only once it has imported torch, and not before the last of its children has ended.
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
