"""Start workers by forking a process that has already imported torch.

Ten workers start in about one CPU-second instead of thirteen, and share the memory of torch. The server only
imports modules. It has no ZeroMQ context, limits libraries to one thread, and makes no CUDA call, because a
forked process could then not use the GPU. The kernel kills the server when the coordinator ends, and every
worker when the server ends (PR_SET_PDEATHSIG, which the server sets first).

The coordinator and the server exchange JSON datagrams over a socket pair:
    {"start": {...}}            ->  {"started": index, "pid": pid}
    a worker has ended          ->  {"ended": index, "status": exit code, negative for a signal}
When the coordinator closes the socket, the server and the workers end.

ForkServer, the coordinator's side, starts the server by forking the coordinator. This saves a second import
of torch (300 MB and more than a CPU-second), and is safe because the coordinator has only imported modules.
If the process has several threads, or another program in it has imported torch (pytest, a notebook),
ForkServer starts a new interpreter instead.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from fedsim.errors import DiskError, UsageError
from fedsim.extras import needed

PR_SET_PDEATHSIG = 1
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_DYNAMIC": "FALSE",
    "MKL_DYNAMIC": "FALSE",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Libraries use one thread, unless --threads sets another number per task. Tensors of 2 MiB and more use huge
pages, which reduce the cost of a new 65 MB tensor to a third (docs/decisions/026-large-models.md)."""
_libc = ctypes.CDLL(None, use_errno=True)


def _pristine() -> bool:
    """Return True if no code of torch or numpy can have run in this process."""
    return "torch" not in sys.modules and "numpy" not in sys.modules


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; exit if the parent has already ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int, packages: Sequence[str] = ()) -> None:
    """Run the server on its end `fd` of the socket pair. Import `packages` once, for all workers."""
    link = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    _preload(packages)
    gc.collect()
    gc.freeze()
    link.send(b'{"ready": true}')
    children: dict[int, int] = {}
    while True:
        select.select([link.fileno(), woken], [], [])
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            _tell(link, {"ended": children.pop(pid), "status": code})
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        try:
            request = link.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        if not request:
            os._exit(0)  # the coordinator has ended; PDEATHSIG ends the workers
        spec = json.loads(request)["start"]
        server = os.getpid()
        pid = os.fork()
        if not pid:
            die_with_parent(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            link.close()
            _become_worker(spec)
        children[pid] = spec["index"]
        _tell(link, {"started": spec["index"], "pid": pid})


def _tell(link: socket.socket, message: dict[str, Any]) -> None:
    try:
        link.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)


def _preload(packages: Sequence[str]) -> None:
    """Import the modules that every worker needs, and initialise the BLAS by one matrix product.

    A backward pass would start autograd's engine, which must not run before a fork.
    """
    import numpy.ma  # noqa: F401 (np.unique imports it late: 12 MB in every worker)
    import torch

    import workers.worker.remote  # noqa: F401

    for package in packages:
        with suppress(UsageError):  # a worker that needs the package reports the error
            needed(package, "the run's model")
    torch.set_num_threads(1)
    torch.nn.functional.linear(torch.zeros(32, 8), torch.zeros(8, 8))


def _become_worker(spec: dict[str, Any]) -> None:
    """Set the child's log file, environment and cores, then run the worker's main function."""
    code = 1
    try:
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(spec["env"])
        os.sched_setaffinity(0, spec["cores"])
        if "join" in spec:  # the coordinator is on another machine
            from workers.worker.remote import run_joined as run
        else:
            from workers.worker.main import run
        code = run(spec)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- the coordinator's side


class ForkServer:
    """A running fork server: its pid, this end of the link, and its output."""

    def __init__(self, fresh: bool = False, packages: Sequence[str] = ()) -> None:
        """Start the server, which the kernel ends when the calling thread ends.

        Args:
            fresh: Always start a new interpreter, which shares no memory with this process.
            packages: Further packages that this run's workers need; they are imported once, for all workers.
        """
        self._packages = tuple(packages)
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output: IO[bytes] = _temporary_file()
        pristine = not fresh and _pristine()
        if pristine:  # Ctrl-C, which is blocked below, may end the import
            os.environ.update(ENVIRONMENT)
            importlib.import_module("workers.worker.main")
            gc.collect()
            gc.freeze()  # a collection would write to, and so unshare, every object's page
        # Ctrl-C reaches every process of the foreground group, but only the coordinator handles it
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.pid = self._fork(theirs) if pristine and _threads() == 1 else self._spawn(theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
            theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._status: int | None = None
        self.output = ""
        """The server's output, after it has ended."""

    def _fork(self, theirs: socket.socket) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.link.close()
            os.dup2(self._output.fileno(), 1)
            os.dup2(self._output.fileno(), 2)
            main(theirs.detach(), self._packages)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _spawn(self, theirs: socket.socket) -> int:
        parent = os.getpid()
        paths = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.processes.fork_server", str(theirs.fileno()), *self._packages],
            pass_fds=[theirs.fileno()],
            preexec_fn=lambda: die_with_parent(parent),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
        )
        self._process.returncode = 0  # reaped by end(), not by Popen
        return self._process.pid

    def end(self, patience: float) -> int:
        """Close the link, and wait for the server; kill it after `patience` seconds. Return its exit code."""
        if self._status is None:
            self.link.close()
            deadline = time.monotonic() + patience
            if not select.select([self._pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            try:
                _, status = os.waitpid(self.pid, 0)
            except ChildProcessError:  # the user's program ignores SIGCHLD, or waits for all children itself
                status = 0
            os.close(self._pidfd)
            self._status = os.waitstatus_to_exitcode(status)
            self._output.seek(0)
            self.output = self._output.read().decode(errors="replace")
            self._output.close()
        return self._status


def _temporary_file() -> IO[bytes]:
    """Open an unnamed file for the output of the server; raise DiskError if that fails."""
    try:
        return tempfile.TemporaryFile()
    except OSError as e:
        raise DiskError(f"cannot make a temporary file: {e.strerror}") from None


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
