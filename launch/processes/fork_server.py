"""Start workers by forking a process that has already imported torch.

Ten workers cost about one CPU-second instead of thirteen, and share the memory of torch. The server only
imports: it has no ZeroMQ context, makes no CUDA call (a forked process could not use the GPU after one), and
limits libraries to one thread. The kernel ends the server with the coordinator (PR_SET_PDEATHSIG is the first
thing that the server sets), and every worker with the server.

The coordinator talks to it over a socket pair with JSON datagrams:
    {"start": {...}}            ->  {"started": index, "pid": pid}
    a worker has ended          ->  {"ended": index, "status": exit code, negative for a signal}
End of file ends the server and the workers.

ForkServer, the coordinator's side, starts the server by forking the coordinator. A process that has done
nothing but import is safe to fork, and forking it saves a second import of torch: 300 MB and more than a
CPU-second. A process with threads, or one in which another program has imported torch (pytest, a
notebook), starts a new interpreter instead.
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
"""--threads sets the threads per task; by themselves, libraries use one thread. Tensors of 2 MiB and more use
huge pages: a new tensor of 65 MB then costs a third (docs/decisions/026-large-models.md)."""
_libc = ctypes.CDLL(None, use_errno=True)


def _pristine() -> bool:
    """Return True if no code of torch or numpy can have run in this process."""
    return "torch" not in sys.modules and "numpy" not in sys.modules


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exit if the parent has already ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int, packages: Sequence[str] = ()) -> None:
    """Run the server. fd: its end of the socket pair. packages: imported once, for all workers."""
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
            os._exit(0)  # the coordinator is gone; PDEATHSIG takes the workers
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
    """Import what every worker needs before the first fork, and initialise the BLAS by one product.

    There is no backward pass, because autograd's engine must not be started before a fork.
    """
    import numpy.ma  # noqa: F401 (np.unique imports it late: 12 MB in every worker)
    import torch

    import workers.worker.remote  # noqa: F401

    for package in packages:
        with suppress(UsageError):  # a worker that needs it reports the error
            needed(package, "the run's model")
    torch.set_num_threads(1)
    torch.nn.functional.linear(torch.zeros(32, 8), torch.zeros(8, 8))


def _become_worker(spec: dict[str, Any]) -> None:
    """Set log file, environment and cores in the child, then run the worker's main function."""
    code = 1
    try:
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(spec["env"])
        os.sched_setaffinity(0, spec["cores"])
        if "edge" in spec:
            from workers.edge.main import run_edge as run
        elif "join" in spec:  # the coordinator is on another machine
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
            fresh: Always start a new interpreter, which shares nothing with this process.
            packages: Further packages for this run's workers, imported once and shared by all workers.
        """
        self._packages = tuple(packages)
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output: IO[bytes] = _temporary_file()
        pristine = not fresh and _pristine()
        if pristine:  # Ctrl-C may end the import
            os.environ.update(ENVIRONMENT)
            importlib.import_module("workers.worker.main")
            gc.collect()
            gc.freeze()  # a collection would touch, and so unshare, every object's page
        # Ctrl-C reaches the whole foreground group; the coordinator alone decides what it means
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.pid = self._fork(theirs) if pristine and _threads() == 1 else self._spawn(theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
            theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        self._status: int | None = None
        self.output = ""
        """The server's output, once it has ended."""

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
        """Close the link, wait, and kill the server after `patience` seconds; return its exit code."""
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


def _temporary_file() -> IO[bytes]:
    """Open a file without a name, for the output of the server.

    Raises:
        DiskError: if no temporary file can be made.
    """
    try:
        return tempfile.TemporaryFile()
    except OSError as e:
        raise DiskError(f"cannot make a temporary file: {e.strerror}") from None


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
