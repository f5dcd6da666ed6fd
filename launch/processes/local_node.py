"""The node agent on the coordinator's machine, in a run that also has remote workers.

The workers of this machine join like remote workers, with a key and over CURVE. Their messages and bytes thus
do not depend on the machine.
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
"""Seconds that the agent has to end with the run before it is killed."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here
"""Addresses for listening on all interfaces, and the addresses for connecting on this machine."""


class LocalNode:
    """A `fedsim node` for the run's highest-numbered workers, which ends with this process."""

    def __init__(self, join: Path, *, threads: int, devices: str, data_dir: str | None) -> None:
        """Start the agent. `join` is its workers' join file, and `threads` the number of cores per worker."""
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
                    start_new_session=True,  # only the coordinator gets Ctrl-C, and commits first
                )

    def end(self, gently: bool) -> None:
        """Wait until the agent has ended with the run (gently), or end it. None of its processes is left."""
        if not gently:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
