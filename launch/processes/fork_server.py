"""Starts workers by forking from a process that has already imported torch.

Ten workers cost about one CPU-second instead of thirteen, and share the library's memory. The server
has only imported: no ZeroMQ context, no CUDA call, thread variables 1. It dies with the coordinator
(PR_SET_PDEATHSIG is the first thing it sets) and every worker dies with it. A worker on a GPU
is a fresh interpreter instead (fork, then exec), until forking is shown to be safe there.

The coordinator talks to it over a socket pair with JSON datagrams:
    {"start": {...}}            ->  {"started": index, "pid": pid}
    a worker has ended          ->  {"ended": index, "status": exit code, negative for a signal}
End of file ends everything.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when its parent ends; at once if the parent has ended already."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int) -> None:
    """The server's loop; `fd` is its end of the socket pair."""
    link = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    _preload()
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


def _preload() -> None:
    """Import what every worker needs before the first fork, and set the BLAS up by one product.

    No backward: autograd's engine must not be started before a fork.
    """
    import numpy.ma  # noqa: F401 (np.unique imports it late: 12 MB in every worker)
    import torch

    import workers.worker.main  # noqa: F401

    torch.set_num_threads(1)
    torch.nn.functional.linear(torch.zeros(32, 8), torch.zeros(8, 8))


def _become_worker(spec: dict[str, Any]) -> None:
    """In the child: log file, environment, cores; then the worker's main."""
    code = 1
    try:
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(spec["env"])
        os.sched_setaffinity(0, spec["cores"])
        if spec["fresh"]:
            handed = os.memfd_create("spec", 0)  # not argv: the spec holds the run's token
            os.write(handed, json.dumps(spec).encode())
            os.lseek(handed, 0, os.SEEK_SET)
            os.execv(sys.executable, [sys.executable, "-m", "workers.worker.main", str(handed)])
        from workers.worker.main import run

        code = run(spec)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
