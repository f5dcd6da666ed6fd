"""The shaped links of the benchmarks: what passes is counted, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import DEADLINE
from tests.support.shaped_links import FRAME, unavailable

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]
ROOT = Path(__file__).parents[2]
HEADERS = 28
"""Bytes of the headers of IPv4 and UDP."""
SIZES = (1, 1000, 1472)
IN_BOTH = f"""
import json, socket, sys
from tests.support.shaped_links import SERVER, Shape, ShapedLinks, enter_namespace

with ShapedLinks(1, Shape(1e9, 0.0, loss=LOSS)) as links:
    ends = []
    for process in (links.server, links.worker(0)):
        enter_namespace(process)
        ends.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    server, worker = ends
    server.bind((SERVER, 9999))
    server.settimeout({DEADLINE})
    for size in {SIZES}:
        worker.sendto(bytes(size), (SERVER, 9999))
        if not LOSS:
            assert len(server.recv(2000)) == size
    print(json.dumps(links.passed() if LAST else links.processes), flush=True)
    LAST or sys.stdin.read()
"""


def started(loss: float, last: bool) -> subprocess.Popen[bytes]:
    script = IN_BOTH.replace("LOSS", str(loss)).replace("LAST", str(last))
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@pytest.mark.parametrize("loss", [0.0, 0.999999999])
def test_every_packet_is_counted_with_its_frame_and_lost_if_it_must_be(loss: float) -> None:
    """The kernel may send packets of its own, such as those of IPv6's neighbour discovery."""
    output, _ = started(loss, True).communicate(timeout=DEADLINE)
    [[_, up]] = json.loads(output)
    assert up["bytes"] >= sum(SIZES) + len(SIZES) * (HEADERS + FRAME) and up["packets"] >= len(SIZES)
    assert up["lost"] == (up["packets"] if loss else 0)


def test_namespaces_and_relays_end_with_a_caller_that_is_killed() -> None:
    caller = started(0.0, False)
    assert caller.stdout is not None and caller.stdin is not None
    processes = json.loads(caller.stdout.readline())
    assert len(processes) == 3 and all(Path(f"/proc/{pid}").exists() for pid in processes)
    caller.send_signal(signal.SIGKILL)
    caller.wait(DEADLINE)
    caller.stdin.close()
    caller.stdout.close()
    until = time.monotonic() + DEADLINE
    while any(alive(pid) for pid in processes):
        assert time.monotonic() < until, "a namespace or a relay is left"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """True unless the process has ended, whether or not its new parent has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
