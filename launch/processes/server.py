"""Starts the fork server (launch.processes.fork_server): by forking this process, or as a new interpreter.

A process that has done nothing but import is safe to fork, and forking it saves a second import of
torch: 300 MB and more than a CPU-second. A process with threads, or one that had torch imported by
somebody else (pytest, a notebook), starts a new interpreter instead.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO

from launch.processes import fork_server

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_DYNAMIC": "FALSE",
    "MKL_DYNAMIC": "FALSE",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Threads per task are set by --threads; what a library would start by itself is one thread."""


class ForkServer:
    """A running fork server: its pid, our end of the link, and what it printed."""

    def __init__(self, fresh: bool = False) -> None:
        """Start it; the kernel ends it when the calling thread ends.

        Args:
            fresh: always as a new interpreter, which shares nothing with this process.
        """
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        pristine = not fresh and "torch" not in sys.modules and "numpy" not in sys.modules
        # Ctrl-C reaches the whole foreground group; the coordinator alone decides what it means
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            if pristine:
                os.environ.update(ENVIRONMENT)
                importlib.import_module("workers.worker.main")
                gc.collect()
                gc.freeze()  # a collection would touch, and so unshare, every object's page
            self.pid = self._fork(theirs) if pristine and _threads() == 1 else self._spawn(theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
            theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._status: int | None = None
        self.output = ""
        """What it printed, once it has ended."""

    def _fork(self, theirs: socket.socket) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            fork_server.die_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.link.close()
            os.dup2(self._output.fileno(), 1)
            os.dup2(self._output.fileno(), 2)
            fork_server.main(theirs.detach())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _spawn(self, theirs: socket.socket) -> int:
        parent = os.getpid()
        paths = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.processes.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            preexec_fn=lambda: fork_server.die_with_parent(parent),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
        )
        self._process.returncode = 0  # reaped by end(), not by Popen
        return self._process.pid

    def end(self, patience: float) -> int:
        """Close the link, wait, kill after `patience` seconds; returns the exit code, also when repeated."""
        if self._status is None:
            self.link.close()
            deadline = time.monotonic() + patience
            if not select.select([self._pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            os.close(self._pidfd)
            self._status = os.waitstatus_to_exitcode(status)
            self._output.seek(0)
            self.output = self._output.read().decode(errors="replace")
            self._output.close()
        return self._status


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
