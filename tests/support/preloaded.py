"""The fedsim command in a process that has imported everything already: a fork of one that has only imported.

A new interpreter imports torch for 2.5 CPU seconds; the suite starts the command some 400 times. What a test
sees of a process is the same: its pid, its exit code, its standard files, its signals, its process group. Not
the same: its parent is the server, and the environment was read when torch was imported, so that a command
with an environment of its own is a new interpreter (tests.support.commands).

    request  {"words": [...], "folder": ..., "environment": {...}, "namespace": ...} with the files for
             0, 1, 2 and the status
    answer   {"pid": ...}, and, once it has ended, the exit code as text in the status file
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from typing import IO, Any

from tests.support.shaped_links import enter_namespace

MODULES = (
    *("launch.cli", "launch.session.run", "launch.session.session", "launch.api"),
    "launch.results.compare",
)
LIMIT = 1 << 20
"""Bytes of a request."""


class Process:
    """As subprocess.Popen, of a command that the server has forked.

    Attributes:
        args: Its words, `fedsim` first.
        pid: Its number.
        returncode: None while it runs, then its exit code, negative for a signal.
        stdout: The end of a pipe that its starter may set.
    """

    def __init__(
        self, words: list[str], stdin: int, stdout: int, stderr: int, namespace: int | None = None
    ) -> None:
        """namespace: a process whose network namespace the command enters; None for this process's own."""
        self.args = ["fedsim", *words]
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        self._status, theirs = os.pipe()
        request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        request["namespace"] = namespace
        try:
            server = _server()
            socket.send_fds(server, [json.dumps(request).encode()], [stdin, stdout, stderr, theirs])
            self.pid = int(json.loads(server.recv(LIMIT))["pid"])
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        """The exit code, or None."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(os.read(self._status, 64) or b"-9")
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As Popen's: nothing if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> socket.socket:
    """The link to this process's server, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-m", "tests.support.preloaded", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    ).returncode = 0  # nobody waits for it
    theirs.close()
    atexit.register(ours.close)
    return ours


def main(link: socket.socket) -> None:
    """Fork a command for each request, and tell its end, until the link closes."""
    from launch.processes import fork_server

    os.environ.update(fork_server.ENVIRONMENT)
    for module in MODULES:
        __import__(module)
    fork_server._pristine = lambda: True
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[int, int]] = {}  # by pid: its pidfd and its status file
    while True:
        ready, _, _ = select.select([link, *(handle for handle, _ in running.values())], [], [])
        for pid, (handle, status) in list(running.items()):
            if handle in ready:
                _, code = os.waitpid(pid, 0)
                with suppress(BrokenPipeError):
                    os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
                for number in running.pop(pid):
                    os.close(number)
        if link in ready:
            data, files, _, _ = socket.recv_fds(link, LIMIT, 4)
            if not data:
                return
            pid = os.fork()
            if not pid:
                for number in (link.fileno(), files[3], *(n for pair in running.values() for n in pair)):
                    os.close(number)
                _carry_out(json.loads(data), files[:3])
            for number in files[:3]:
                os.close(number)
            running[pid] = (os.pidfd_open(pid), files[3])
            link.send(json.dumps({"pid": pid}).encode())


def _carry_out(request: dict[str, Any], files: list[int]) -> None:
    """Be `python -m launch` with these words; never returns."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        signal.set_wakeup_fd(-1)
        if request["namespace"] is not None:
            enter_namespace(request["namespace"])
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        sys.argv = ["fedsim", *request["words"]]
        try:
            runpy.run_module("launch", run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
