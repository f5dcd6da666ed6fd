"""fedsim relay with real sockets and programs: bytes as the kernel counts them, rounds, how it ends."""

from __future__ import annotations

import csv
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fedsim.wire.ledger_rows import COLUMNS
from launch.cli import main
from launch.commands import relay as module
from tests.support.commands import DEADLINE
from tests.support.pages import reference

RELAY = [sys.executable, "-m", "launch", "relay"]
HERE = "127.0.0.1"
ZERO = {"down": 0, "up": 0}


def take(source: socket.socket, count: int = sys.maxsize) -> bytes:
    """`count` bytes, or everything up to the end of the stream."""
    pieces, left = [], count
    while left and (piece := source.recv(min(left, 1 << 16))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def send(end: socket.socket, data: bytes) -> None:
    """Send all of it, unless the connection is reset before."""
    with suppress(ConnectionError):
        end.sendall(data)


def with_reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


@dataclass
class Running:
    """A relay without a command in a process of its own, and the server to which it forwards."""

    process: subprocess.Popen[str]
    address: tuple[str, int]
    listener: socket.socket

    @contextmanager
    def pair(self) -> Iterator[tuple[socket.socket, socket.socket]]:
        """A client's socket and the server's."""
        with socket.create_connection(self.address, timeout=DEADLINE) as client:
            server, _ = self.listener.accept()
            server.settimeout(DEADLINE)
            with server:
                yield client, server

    def end(self) -> dict[str, Any]:
        """Send Ctrl-C; returns the counts, in which no connection differs from the kernel."""
        self.process.send_signal(signal.SIGINT)
        text, errors = self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0, errors
        counts: dict[str, Any] = json.loads(text)
        assert all(c["residual"] == ZERO for c in counts["connections"]), counts
        assert "Traceback" not in errors
        return counts


@contextmanager
def running(host: str = HERE) -> Iterator[Running]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    near = f"[{host}]" if ":" in host else host
    with socket.create_server((host, 0), family=family, backlog=100) as listener:
        words = ["--to", f"{near}:{listener.getsockname()[1]}", "--listen", f"{near}:*", "--json"]
        with subprocess.Popen(
            [*RELAY, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            port = int(process.stderr.readline().split()[1].rpartition(":")[2])
            try:
                yield Running(process, (host, port), listener)
            finally:
                process.kill()


@pytest.mark.process
@pytest.mark.parametrize("host", [HERE, "::1"])
def test_a_half_closed_connection_still_carries_the_other_direction(host: str) -> None:
    """Urgent bytes are counted, too."""
    with running(host) as relay:
        with relay.pair() as (client, server):
            client.sendall(b"question" * 1000)
            client.send(b"!", socket.MSG_OOB)
            client.sendall(b"?")
            client.shutdown(socket.SHUT_WR)
            assert take(server) == b"question" * 1000 + b"!?"
            server.sendall(b"answer" * 100_000)
            server.close()
            assert take(client) == b"answer" * 100_000
        (connection,) = relay.end()["connections"]
    assert connection["bytes"] == {"down": 600_000, "up": 8002}
    assert connection["end"] == "closed"


@pytest.mark.process
def test_a_slow_reader_slows_its_sender_down_and_still_gets_everything() -> None:
    """Sockets hold some megabytes, so 64 MB can be sent only when they are read; the memory does not grow."""
    sent = bytes(range(256)) * (1 << 18)
    with running() as relay:
        with relay.pair() as (client, server):
            sender = threading.Thread(target=lambda: (server.sendall(sent), server.close()), daemon=True)
            sender.start()
            time.sleep(1.0)
            assert sender.is_alive()
            status = Path(f"/proc/{relay.process.pid}/status").read_text()
            before = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])
            assert before < 200_000
            assert take(client) == sent
            sender.join(DEADLINE)
        (connection,) = relay.end()["connections"]
    assert connection["bytes"] == {"down": len(sent), "up": 0}


@pytest.mark.process
def test_many_connections_at_once_are_counted_each_for_itself() -> None:
    count = 60

    def answer(end: socket.socket) -> None:
        with end:
            end.sendall(take(end) * 2)

    def serve(listener: socket.socket) -> None:
        for _ in range(count):
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    answers: dict[int, bytes] = {}
    with running() as relay:
        threading.Thread(target=serve, args=(relay.listener,), daemon=True).start()

        def ask(n: int) -> None:
            with socket.create_connection(relay.address, timeout=DEADLINE) as client:
                client.sendall(bytes([n]) * (1000 * n + 1))
                client.shutdown(socket.SHUT_WR)
                answers[n] = take(client)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        connections = relay.end()["connections"]
    assert answers == {n: bytes([n]) * 2 * (1000 * n + 1) for n in range(count)}
    assert [c["number"] for c in connections] == [*range(count)]
    assert sorted(c["bytes"]["up"] for c in connections) == [1000 * n + 1 for n in range(count)]
    assert all(c["bytes"]["down"] == 2 * c["bytes"]["up"] for c in connections)


@pytest.mark.process
def test_a_reset_is_forwarded_and_the_bytes_that_were_read_are_counted() -> None:
    with running() as relay:
        with relay.pair() as (client, server):
            sender = threading.Thread(target=send, args=(client, bytes(1 << 24)), daemon=True)
            sender.start()
            assert take(server, 200_000) == bytes(200_000)
            with_reset(server)
            sender.join(DEADLINE)
            assert not sender.is_alive()
            with pytest.raises(ConnectionError):
                client.sendall(b"x")
        with relay.pair() as (client, server):  # a FIN, and then resets for what comes
            server.sendall(b"a" * 1000)
            client.close()
            send(server, b"b" * 3_000_000)
        first, second = relay.end()["connections"]
    assert first["end"] == second["end"] == "reset"
    assert first["bytes"]["up"] >= 200_000 and first["bytes"]["down"] == 0
    assert 1000 <= second["bytes"]["down"] <= 3_001_000 and second["bytes"]["up"] == 0


@pytest.mark.process
def test_connections_that_are_open_at_the_end_are_cut_and_counted() -> None:
    """What both sides have closed is delivered even then."""
    answer = bytes(range(250)) * 4000
    with running() as relay, relay.pair() as (client, server), relay.pair() as (reader, answering):
        client.sendall(b"x" * 500)
        assert take(server, 500) == b"x" * 500
        threading.Thread(target=send, args=(server, b"z" * 50_000_000), daemon=True).start()
        reader.shutdown(socket.SHUT_WR)
        assert take(answering) == b""
        answering.sendall(answer)
        answering.close()
        time.sleep(1.0)
        cut, closed = relay.end()["connections"]
        assert take(reader) == answer
    assert (cut["end"], closed["end"]) == ("cut", "closed")
    assert cut["bytes"]["up"] == 500 and 0 < cut["bytes"]["down"] < 50_000_000
    assert closed["bytes"] == {"down": len(answer), "up": 0}


@pytest.mark.process
def test_a_server_that_refuses_is_counted_and_may_come_later() -> None:
    with running() as relay:
        address = relay.listener.getsockname()
        relay.listener.close()
        with pytest.raises(ConnectionError), socket.create_connection(relay.address) as client:
            client.recv(1)
        with socket.create_server(address) as relay.listener, relay.pair() as (client, server):
            client.sendall(b"now")
            client.close()
            assert take(server) == b"now"
        counts = relay.end()
    assert counts["bytes"] == {"down": 0, "up": 3}
    assert (counts["refused"], counts["refusal"]) == (1, "Connection refused")


PROGRAM = """
import os, socket, sys, time
port, code = int(sys.argv[1]), int(sys.argv[2])
listener = socket.create_server(("127.0.0.1", port))
host, _, through = os.environ["FEDSIM_RELAY"].rpartition(":")
client = socket.create_connection((host, int(through)))
server, _ = listener.accept()
def take(end, count):
    while count:
        count -= len(end.recv(min(count, 1 << 16)))
for number in range(1, 4):
    print(f"round {number} begins", file=sys.stderr if number % 2 else sys.stdout)
    server.sendall(bytes(20_000)); take(client, 20_000)
    client.sendall(bytes(10_000)); take(server, 10_000)
for end in (client, server, listener):
    end.close()
print("all done")
sys.exit(code)
"""
"""A server and its client: each round a line, 20,000 bytes down and 10,000 up. It flushes nothing."""


def ran(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*RELAY, *words], capture_output=True, text=True, timeout=DEADLINE, **options)
    assert "Traceback" not in done.stderr
    return done


def behind(*options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """PROGRAM behind the relay."""
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]
    return ran("--to", f"{HERE}:{port}", *options, "--", sys.executable, "-c", PROGRAM, str(port), str(code))


def _keys(document: dict[str, Any]) -> Iterator[str]:
    """Its keys, with those of objects in lists; directions are listed for the sums only."""
    for key, value in document.items():
        yield key
        inner = value[0] if isinstance(value, list) and key != "command" else {}
        yield from (f"{key}[].{name}" for name in inner)
        if isinstance(value, dict):
            yield from (f"{key}.{name}" for name in value)


@pytest.mark.process
def test_rounds_by_lines_are_exact_and_the_files_have_the_numbers(tmp_path: Path) -> None:
    out = tmp_path / "new" / "relayed"
    done = behind("--round", r"round (\d+) begins", "--params", "5000", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "all done" in done.stdout and "round 3 begins" in done.stderr
    assert "kernel and relay agree: 60,000 bytes down and 30,000 up, residual 0" in done.stdout
    assert "1.0000" in done.stdout  # 20,000 bytes in units of 4 P
    assert {path.name for path in out.iterdir()} == {"ledger.csv", "relay.json"}
    with (out / "ledger.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert tuple(head) == COLUMNS and {row[0] for row in rows} == {"opaque"}
    sums = {(r[1], r[5]): int(r[-1]) for r in rows}
    assert sums == {(str(n), d): size for n in (1, 2, 3) for d, size in (("down", 20_000), ("up", 10_000))}
    document = json.loads((out / "relay.json").read_text())
    assert document["bytes"] == {"down": 60_000, "up": 30_000}
    assert document["residual"] == ZERO and document["exit_code"] == 0
    assert [r["number"] for r in document["rounds"]] == [1, 2, 3]
    section = reference().partition("### relay.json\n")[2].partition("| key |")[2]
    section = re.sub(r"(?m)\| [^|]* \|$", "", section.partition("\n### ")[0])
    assert set(_keys(document)) == set(re.findall(r"`([\w.\[\]]+)`", section))


def test_a_line_that_comes_twice_begins_one_round() -> None:
    rounds = module.RelayedRounds()
    rounds.book(0.0, 0, "up", 1)
    for number in (1, 1, 3, 2, None):
        rounds.begin(1.0, number)
        rounds.book(2.0, 0, "down", 9000)
    rows = [(r["number"], r["down"], r["up"], r["connections"]) for r in rounds.rounds()]
    assert rows == [(0, 0, 1, 1), (1, 18_000, 0, 1), (3, 18_000, 0, 1), (4, 9_000, 0, 1)]


@pytest.mark.process
def test_the_commands_exit_code_is_passed_on() -> None:
    """Without --round its output is not read; if the parent ignores SIGCHLD, exit codes come nevertheless."""
    done = behind("--json", code=7)
    assert done.returncode == 7 and json.loads(done.stdout)["bytes"] == {"down": 60_000, "up": 30_000}
    assert "all done" in done.stderr
    words = ("--to", f"{HERE}:9", "--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    ignored = ran(*words, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert ignored.returncode == 128 + signal.SIGKILL, ignored.stderr


@pytest.mark.process
def test_a_command_that_writes_without_end_stops_no_connection() -> None:
    client = (
        "import os, socket\nhost, _, port = os.environ['FEDSIM_RELAY'].rpartition(':')\n"
        "end = socket.create_connection((host, int(port)), timeout=30)\nend.sendall(b'x')\n"
        "assert end.recv(1) == b'y'\n"
    )

    def serve(listener: socket.socket) -> None:
        end, _ = listener.accept()
        with end:
            end.recv(1)
            end.sendall(b"y")

    with socket.create_server((HERE, 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        target, script = f"{HERE}:{listener.getsockname()[1]}", f'yes & {sys.executable} -c "$0"'
        done = subprocess.run(
            [*RELAY, "--to", target, "--round", "x", "--json", "--", "sh", "-c", script, client],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=DEADLINE,
        )
    assert done.returncode == 0
    assert json.loads(done.stdout)["bytes"] == {"down": 1, "up": 1}


SERVER = """
import os, signal, sys, time
for number in map(int, sys.argv[2:]):
    signal.signal(number, signal.SIG_IGN)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
"""Writes its process id to a file, ignores signals, and waits."""


def started(script: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A relay around a shell's script, in which SERVER starts such a process; returns its id, too."""
    (folder / "server.py").write_text(SERVER)
    script = script.replace("SERVER", f"{sys.executable} {folder}/server.py {folder}/pid")
    script = script.replace("PID", f"{folder}/pid")
    process = subprocess.Popen(
        [*RELAY, "--to", f"{HERE}:9", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + DEADLINE
    while not (folder / "pid").exists() or not (folder / "pid").read_text().endswith("\n"):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    return process, int((folder / "pid").read_text())


def ends(pid: int) -> bool:
    """True if a process ends before the deadline."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "number", "code"),
    [
        ("SERVER & wait", signal.SIGINT, 130),  # a shell's background process ignores SIGINT
        ("SERVER 15", signal.SIGINT, 130),
        ('trap "echo got HUP; exit 0" HUP; SERVER & wait', signal.SIGHUP, 130),
        ("SERVER 15 & while [ ! -s PID ]; do sleep 0.1; done; exit 3", None, 3),
    ],
)
def test_nothing_that_the_command_started_is_left_behind(
    script: str, number: signal.Signals | None, code: int, tmp_path: Path
) -> None:
    process, pid = started(script, tmp_path)
    if number is not None:
        process.send_signal(number)
    text, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, errors
    assert ends(pid) and "kernel and relay agree" in text and "asyncio" not in errors
    assert ("got HUP" in text) is ("got HUP" in script)


@pytest.mark.process
def test_a_killed_relay_takes_the_command_with_it(tmp_path: Path) -> None:
    process, pid = started("exec SERVER 2 15", tmp_path)
    process.kill()
    process.communicate(timeout=DEADLINE)
    assert ends(pid)


def in_process(client: str, listener: socket.socket) -> Any:
    """The relay in this process, around a client in Python that sends to a server that reads to the end."""

    def serve() -> None:
        end, _ = listener.accept()
        with end:
            take(end)

    threading.Thread(target=serve, daemon=True).start()
    program = f"import os, socket; address = os.environ['FEDSIM_RELAY'].rpartition(':')\n{client}"
    target = f"{HERE}:{listener.getsockname()[1]}"
    return CliRunner().invoke(main, ["relay", "--to", target, "--", sys.executable, "-c", program])


def test_a_byte_that_the_relay_forgets_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._Direction.forward

    async def forgetful(self: module._Direction, book: Callable[[int], None]) -> None:
        await real(self, book)
        self.size -= self.size > 0

    monkeypatch.setattr(module._Direction, "forward", forgetful)
    with socket.create_server((HERE, 0)) as listener:
        client = "socket.create_connection((address[0], int(address[2]))).sendall(bytes(10))"
        done = in_process(client, listener)
    assert done.exit_code == 1
    assert "kernel and relay differ: +0 bytes down, +1 up" in done.output
    assert "so do not use these counts" in done.output


CLIENT = """
import os, socket
host, _, port = os.environ['FEDSIM_RELAY'].rpartition(':')
try:
    socket.create_connection((host, int(port))).recv(1)
except ConnectionError:
    pass
"""


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--", "true"], 2, "--to is missing"),
        (["--to", "127.0.0.1", "--", "true"], 2, "the port is missing"),
        (["--to", "no-such-host.invalid:1", "--", "true"], 2, "--to: no-such-host.invalid is not known"),
        (["--to", "127.0.0.1:9", "--listen", "*:80", "--", "true"], 2, "would listen on every network"),
        (["--to", "127.0.0.1:9", "--listen", "192.0.2.1:80", "--", "true"], 2, "cannot listen at"),
        (["--to", "127.0.0.1:9", "--listen", "127.0.0.1:9", "--", "true"], 2, "the relay's own address"),
        (["--to", "127.0.0.1:9", "--round", "(", "--", "true"], 2, "is no regular expression"),
        (["--to", "127.0.0.1:9", "--round", "x"], 2, "write it behind --"),
        (["--to", "127.0.0.1:9", "--", "no-such-program"], 2, "cannot start no-such-program"),
        (["--to", "127.0.0.1:9", "--out", "FULL", "--", "true"], 2, "name a new folder"),
        (["--to", "127.0.0.1:9", "--out", "FULL/ledger.csv/x", "--", "true"], 5, "Not a directory"),
        (["--to", "127.0.0.1:9", "--silence", "1", "--", "true"], 2, "--silence left in 0.2: --round"),
        (["--to", "127.0.0.1:9", "--", "true"], 1, "the address in FEDSIM_RELAY"),
        (["--to", "127.0.0.1:9", "--round", r"(\d+)", "--", "printf", "%05000d"], 1, "nothing connected"),
        (["--to", "127.0.0.1:9", "--", sys.executable, "-c", CLIENT], 1, "1 connection: Connection refused"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    words: list[str], code: int, text: str, tmp_path: Path
) -> None:
    (tmp_path / "ledger.csv").write_text("")
    arguments = [word.replace("FULL", str(tmp_path)) for word in words]
    done = CliRunner().invoke(main, ["relay", *arguments])
    assert done.exit_code == code, done.output
    assert text in done.output and "Traceback" not in done.output


def test_it_needs_neither_torch_nor_pandas() -> None:
    program = (
        "import sys\nsys.modules['torch'] = sys.modules['pandas'] = None\n"
        "from click.testing import CliRunner\nfrom launch.cli import main\n"
        "done = CliRunner().invoke(main, ['relay', '--to', '127.0.0.1:9', '--', 'false'])\n"
        "assert done.exit_code == 1 and 'kernel and relay agree' in done.output, done.output\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
