"""A worker's process: python -m workers.worker DESCRIPTOR, a file with its spec as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from workers.worker.main import run
from workers.worker.remote import run_joined


def run_spec(spec: dict[str, Any]) -> int:
    """Be the worker that a spec of launch.processes.fork_server describes; returns the exit code.

    It is one of this machine's coordinator, or of another one's, if the spec names a join file.
    """
    return run_joined(spec) if "join" in spec else run(spec)


if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb") as handed:
        sys.exit(run_spec(json.load(handed)))
