"""The node agent on the coordinator's own machine, in a run that also has remote workers.

Workers of this machine then join as remote workers do: with a key, over CURVE. All workers of a run are thus
of one kind, and their messages and bytes do not depend on their machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from launch.processes.fork_server import die_with_parent
from workers.storage.atomic_files import disk_errors
from workers.transport.join_credentials import JoinCredentials
from workers.transport.tcp_address import TcpAddress

END = 10.0
"""Seconds for the agent to end with the run, before it is killed."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here
"""Addresses at which to listen but not to connect, and the address to which this machine connects."""


class LocalNode:
    """A `fedsim node` for the run's workers with the highest numbers; it ends with this process."""

    def __init__(self, join: Path, *, threads: int, devices: str, data_dir: str | None) -> None:
        """Start the agent. join: its workers' join file. threads: cores per worker. devices: as in node."""
        keys = JoinCredentials.read(join)
        here = TcpAddress.to_connect(keys.url, "address")
        here = replace(here, host=ANYWHERE.get(here.host, here.host))
        logs = join.parent / "logs"
        command = [
            *(sys.executable, "-m", "launch", "node", "--join", str(join), "--seat", str(keys.first)),
            *("--workers", str(len(keys.workers)), "--threads", str(threads), "--devices", devices),
            *("--connect", str(here), "--logs", str(logs)),
            *(("--data-dir", data_dir) if data_dir else ()),
        ]
        parent = os.getpid()
        with disk_errors("cannot start the workers of this machine"):
            logs.mkdir(exist_ok=True)
            with open(logs / "node.log", "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=lambda: die_with_parent(parent),
                    start_new_session=True,  # Ctrl-C is for the coordinator, which commits first
                )

    def end(self, gently: bool) -> None:
        """Wait until the agent has ended with the run, or end it; none of its processes is left."""
        if not gently:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
