"""Links of a stated rate, round trip and loss between network namespaces, for real TCP connections.

    server --- tun --- relay --- tun --- worker i          one link for each worker

A relay takes whole IP packets from one TUN device and gives them to the other: after the time that packet
and frame header need at the link's rate, and after half a round trip. It drops a packet behind the bottleneck
with the probability `loss`. Its queue has no limit, so that no packet is lost otherwise. The kernel's netem
does the same, but many kernels are built without it (decision 058). Each namespace belongs to a process that
ends with its standard input, and so does each relay: nothing is left when the caller ends, not even after
kill -9.

    python -m tests.support.shaped_links SERVER_PID WORKER_PID NUMBER JSON     is one relay
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

FRAME = 14
"""Bytes of an Ethernet header, which an IP packet does not have and tc counts."""
MTU = 1500
SERVER = "10.77.255.1"
"""The server's address, on every link."""
READY = 30.0
"""Seconds after which a namespace or a relay that is not ready is an error."""
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000
"""From linux/sched.h and linux/if_tun.h."""
TUN = Path("/dev/net/tun")


def unavailable() -> str:
    """Return why this machine cannot have such links; empty if it can."""
    if missing := [program for program in ("ip", "unshare", "nsenter") if not shutil.which(program)]:
        return f"no program {missing[0]} (packages iproute2 and util-linux)"
    if os.geteuid():
        return "network namespaces need root"
    if not TUN.exists():
        return f"no {TUN}: the kernel has no TUN devices, or this container may not use them"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=READY)
    return tried.stderr.strip() if tried.returncode else ""


@dataclass(frozen=True)
class Shape:
    """A link, the same in both directions.

    rate: bits per second, frame headers included. rtt: seconds of a round trip of an empty packet. loss: the
    probability that a packet is lost. congestion: the kernel's name of a TCP congestion control. seed: of the
    losses.
    """

    rate: float
    rtt: float
    loss: float = 0.0
    congestion: str = "cubic"
    seed: int = 0


@dataclass
class Direction:
    """One direction of a link: packets that wait for their delivery, and what has passed.

    bytes: with frame headers, lost packets included.
    """

    source: int
    target: int
    shape: Shape
    draws: random.Random
    free: float = 0.0
    """Seconds (monotonic) from which the bottleneck is idle."""
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    packets: int = 0
    bytes: int = 0
    lost: int = 0

    def take(self) -> None:
        """Read all packets that are there, and compute when each arrives at the other side."""
        while True:
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            size = len(packet) + FRAME
            self.free = max(time.monotonic(), self.free) + 8 * size / self.shape.rate
            self.packets += 1
            self.bytes += size
            if self.draws.random() < self.shape.loss:
                self.lost += 1
                continue
            self.waiting.append((self.free + self.shape.rtt / 2, packet))

    def deliver(self) -> float:
        """Write the packets that are due; return the seconds until the next one is, or infinity."""
        while self.waiting:
            if (left := self.waiting[0][0] - time.monotonic()) > 0:
                return left
            os.write(self.target, self.waiting.popleft()[1])
        return float("inf")


def relay(server: int, worker: int, number: int, shape: Shape) -> None:
    """Carry packets until standard input ends, then print what passed as JSON: [down, up].

    server, worker: processes that own the two namespaces. number: of the worker, 0 to 253.
    """
    near, far = f"10.77.{number}.1", f"10.77.{number}.2"
    enter_namespace(server)
    inner = _tun(f"link{number}", near, far, [f"{far}/32"], shape.congestion)
    enter_namespace(worker)
    outer = _tun(f"link{number}", far, near, [f"{SERVER}/32"], shape.congestion)
    seeds = (2 * (number + 254 * shape.seed) + side for side in (0, 1))
    down, up = (
        Direction(*ends, shape, random.Random(seed))
        for ends, seed in zip(((inner, outer), (outer, inner)), seeds, strict=True)
    )
    before_others(0, 2)  # a link does not wait for those who use it
    print("ready", flush=True)
    both = (down, up)
    while True:
        left = min(direction.deliver() for direction in both)
        ready = select.select([inner, outer, sys.stdin], [], [], left if left < READY else None)[0]
        if sys.stdin in ready:
            break
        for direction in both:
            if direction.source in ready:
                direction.take()
    print(json.dumps([{"packets": d.packets, "bytes": d.bytes, "lost": d.lost} for d in both]), flush=True)


def before_others(process: int, priority: int = 1) -> None:
    """Let a process run before all others of the machine, whose work is not what is measured, if that is
    allowed here; 0 is this process. Threads that it starts later do, too."""
    with suppress(PermissionError):
        os.sched_setscheduler(process, os.SCHED_RR, os.sched_param(priority))


def enter_namespace(process: int) -> None:
    """Enter another process's network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{process}/ns/net", "rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace of process {process}")


def _tun(name: str, own: str, peer: str, routes: list[str], congestion: str) -> int:
    """Create a TUN device in this namespace, with its addresses and routes; return its descriptor."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    _ip("addr", "add", own, "peer", peer, "dev", name)
    _ip("link", "set", name, "up", "mtu", str(MTU), "txqueuelen", "10000")
    for route in routes:
        _ip("route", "replace", route, "dev", name, "congctl", congestion)
    return device


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=READY)


class ShapedLinks:
    """A namespace for the server and one for each worker, with a link between both.

    `server` and `worker(i)` are processes that own the namespaces.
    """

    def __init__(self, workers: int, shape: Shape) -> None:
        self._workers, self._shape = workers, shape
        self._stack = ExitStack()
        self._owners: list[subprocess.Popen[bytes]] = []
        self._relays: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ShapedLinks:
        """Create namespaces and links.

        Raises:
            AssertionError: if one of them is not ready within READY seconds.
        """
        try:
            for _ in range(self._workers + 1):
                self._owners.append(self._start("unshare", "--net", "cat"))
            for owner in self._owners:
                _await_namespace(owner.pid)
            _within(self.server, "link", "set", "lo", "up")
            _within(self.server, "addr", "add", f"{SERVER}/32", "dev", "lo")
            shape = json.dumps(asdict(self._shape))
            for i, owner in enumerate(self._owners[1:]):
                pids = str(self.server), str(owner.pid)
                self._relays.append(
                    self._start(sys.executable, "-m", "tests.support.shaped_links", *pids, str(i), shape)
                )
            for i, started in enumerate(self._relays):
                assert started.stdout is not None
                there = select.select([started.stdout], [], [], READY)[0]
                assert there and started.stdout.readline() == b"ready\n", (
                    f"the relay of link {i} is not ready"
                )
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def server(self) -> int:
        return self._owners[0].pid

    def worker(self, number: int) -> int:
        return self._owners[1 + number].pid

    @property
    def processes(self) -> list[int]:
        """All processes that the links consist of."""
        return [process.pid for process in (*self._owners, *self._relays)]

    def passed(self) -> list[list[dict[str, int]]]:
        """End the relays; return what each carried: [down, up] with packets, bytes and lost packets."""
        counts = []
        for started in self._relays:
            output, _ = started.communicate(timeout=READY)
            counts.append(json.loads(output))
        return counts

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(READY)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _within(process: int, *arguments: str) -> None:
    """Run ip in the network namespace of a process."""
    command = ["nsenter", f"--net=/proc/{process}/ns/net", "--", "ip", *arguments]
    subprocess.run(command, check=True, timeout=READY)


def _await_namespace(process: int) -> None:
    own, until = os.readlink("/proc/self/ns/net"), time.monotonic() + READY
    while os.readlink(f"/proc/{process}/ns/net") == own:
        assert time.monotonic() < until, "unshare --net makes no namespace"
        time.sleep(0.005)


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Shape(**json.loads(sys.argv[4])))
