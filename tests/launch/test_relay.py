"""fedsim relay around real programs: rounds, exit codes, files, and mistakes of the user."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fedsim.wire.ledger_rows import COLUMNS
from launch.cli import main
from tests.support.commands import DEADLINE

RELAY = [sys.executable, "-m", "launch", "relay"]
PROGRAM = """
import os, socket, sys, threading, time
port, rounds, wait = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
listener = socket.create_server(("127.0.0.1", port))
host, _, through = os.environ["FEDSIM_RELAY"].rpartition(":")
client = socket.create_connection((host, int(through)))
server, _ = listener.accept()
def take(end, count):
    while count:
        count -= len(end.recv(min(count, 1 << 16)))
for number in range(1, rounds + 1):
    print(f"round {number} begins", file=sys.stderr, flush=True)
    server.sendall(bytes(20_000)); take(client, 20_000)
    client.sendall(bytes(10_000)); take(server, 10_000)
    server.sendall(b"alive"); take(client, 5)
    time.sleep(wait)
for end in (client, server, listener):
    end.close()
print("all done")
sys.exit(int(sys.argv[4]))
"""
"""A server and its client: each round 20,000 bytes down, 10,000 up, and a heartbeat of 5 down."""


REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def _keys(document: dict[str, Any]) -> Iterator[str]:
    """Its keys, with those of objects in lists; directions are listed for the sums only."""
    for key, value in document.items():
        yield key
        inner = value[0] if isinstance(value, list) and key != "command" else {}
        yield from (f"{key}[].{name}" for name in inner)
        if isinstance(value, dict):
            yield from (f"{key}.{name}" for name in value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def relayed(*options: str, rounds: int = 3, wait: float = 0.0, code: int = 0) -> tuple[Any, str, str]:
    """Run PROGRAM behind the relay; returns the process, its output and its errors."""
    port = free_port()
    program = [sys.executable, "-c", PROGRAM, *map(str, (port, rounds, wait, code))]
    done = subprocess.run(
        [*RELAY, "--to", f"127.0.0.1:{port}", *options, "--", *program],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return done, done.stdout, done.stderr


@pytest.mark.process
def test_rounds_by_lines_are_exact_and_the_files_have_the_numbers(tmp_path: Path) -> None:
    out = tmp_path / "new" / "relayed"
    done, text, errors = relayed("--round", r"round (\d+) begins", "--params", "5000", "--out", str(out))
    assert done.returncode == 0, errors
    assert "all done" in text and "round 3 begins" in errors
    assert "kernel and relay agree: 60,015 bytes down and 30,000 up, residual 0" in text
    assert {path.name for path in out.iterdir()} == {"ledger.csv", "relay.json", "report.html"}
    with (out / "ledger.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert tuple(head) == COLUMNS
    sums = {(r[1], r[5]): int(r[-1]) for r in rows}
    assert sums == {(str(n), d): size for n in (1, 2, 3) for d, size in (("down", 20_005), ("up", 10_000))}
    document = json.loads((out / "relay.json").read_text())
    assert document["bytes"] == {"down": 60_015, "up": 30_000}
    assert document["residual"] == {"down": 0, "up": 0} and document["exit_code"] == 0
    assert [r["number"] for r in document["rounds"]] == [1, 2, 3]
    section = (
        REFERENCE.read_text(encoding="utf-8")
        .partition("### relay.json\n")[2]
        .partition("| key |")[2]
        .partition("\n### ")[0]
    )
    assert set(_keys(document)) == set(
        re.findall(r"`([\w.\[\]]+)`", re.sub(r"(?m)\| [^|]* \|$", "", section))
    )
    page = (out / "report.html").read_text()
    assert "60,015" in page and "residual 0" in page
    assert "1.0003" in text  # 20,005 bytes in units of 4 P


@pytest.mark.process
def test_rounds_by_silence_and_one_json_document(tmp_path: Path) -> None:
    """The pause is far above the silence, and a heartbeat ends none."""
    done, text, errors = relayed("--silence", "0.3", "--json", wait=1.5)
    assert done.returncode == 0, errors
    document = json.loads(text)
    assert [r["number"] for r in document["rounds"]] == [1, 2, 3], document["rounds"]
    assert [r["down"] for r in document["rounds"]] == [20_005] * 3
    assert document["silence"] == 0.3 and document["round"] is None
    assert "all done" in errors


@pytest.mark.process
@pytest.mark.parametrize("flushed", [True, False])
def test_a_python_program_need_not_flush_and_late_lines_are_a_warning(flushed: bool) -> None:
    port = free_port()
    program = PROGRAM.replace(", file=sys.stderr, flush=True", "")
    words = ["--to", f"127.0.0.1:{port}", "--round", "round (.)", "--json"]
    done = subprocess.run(
        [*RELAY, *words, "--", sys.executable, "-c", program, str(port), "3", "0.2", "0"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**_without(os.environ, "PYTHONUNBUFFERED"), **({} if flushed else {"PYTHONUNBUFFERED": ""})},
    )
    assert done.returncode == 0, done.stderr
    sizes = {r["number"]: r["down"] for r in json.loads(done.stdout)["rounds"]}
    if flushed:
        assert sizes == {1: 20_005, 2: 20_005, 3: 20_005}
    else:
        assert sizes == {0: 60_015, 1: 0, 2: 0, 3: 0}
    assert ("COMMAND seems to write its lines late" in done.stderr) is not flushed


def _without(environment: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != name}


@pytest.mark.process
def test_a_number_of_5000_digits_is_no_round_number() -> None:
    words = ["--round", r"(\d+)", "--", "sh", "-c", "printf '%05000d' 0"]
    done = subprocess.run(
        [*RELAY, "--to", "127.0.0.1:9", *words], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 1 and "nothing connected" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.process
def test_a_folder_that_cannot_be_written_is_an_error_before_the_command_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["--out", str(tmp_path / "file" / "out"), "--", "touch", str(tmp_path / "started")]
    done = subprocess.run(
        [*RELAY, "--to", "127.0.0.1:9", *words], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 5 and "Not a directory" in done.stderr, done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.process
@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_a_folder_that_goes_missing_costs_no_counts(json_option: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*json_option, "--out", str(out), "--", "sh", "-c", f"rmdir {out}; touch {out}"]
    done = subprocess.run(
        [*RELAY, "--to", "127.0.0.1:9", *words], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 5 and "cannot write" in done.stderr, done.stderr
    assert "residual" in done.stdout


@pytest.mark.process
def test_the_command_can_connect_to_a_relay_that_listens_everywhere() -> None:
    words = ["--listen", "0.0.0.0:*", "--", "sh", "-c", "echo at $FEDSIM_RELAY"]
    done = subprocess.run(
        [*RELAY, "--to", "127.0.0.1:9", *words], capture_output=True, text=True, timeout=DEADLINE
    )
    assert re.search(r"(?m)^at 127\.0\.0\.1:\d+$", done.stdout), done.stderr


@pytest.mark.process
def test_the_commands_exit_code_is_passed_on() -> None:
    done, text, _ = relayed(code=7)
    assert done.returncode == 7 and "residual 0" in text


@pytest.mark.process
def test_a_command_that_is_killed_ends_the_relay() -> None:
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    done = subprocess.run(
        [*RELAY, "--to", "127.0.0.1:9", "--", *killed], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stderr


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_too_and_the_counts_are_shown(number: signal.Signals) -> None:
    port = free_port()
    program = [sys.executable, "-c", PROGRAM, str(port), "1", "600", "0"]
    process = subprocess.Popen(
        [*RELAY, "--to", f"127.0.0.1:{port}", "--round", "begins", "--", *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "begins" not in (line := process.stderr.readline()):
        assert line, "the relay has ended"
    time.sleep(0.2)
    process.send_signal(number)
    text, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, errors
    assert "by connection" in text and "residual 0" in text
    with socket.socket() as probe:  # nobody listens there any more
        assert probe.connect_ex(("127.0.0.1", port)) != 0


SERVER = """
import os, signal, sys, time
for number in map(int, sys.argv[2:]):
    signal.signal(number, signal.SIG_IGN)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
"""Writes its process id to a file, ignores signals, and waits."""


def started(script: str, tmp_path: Path, *options: str) -> tuple[subprocess.Popen[str], int]:
    """A relay around a shell's script, in which SERVER starts such a process; returns its id, too."""
    (tmp_path / "server.py").write_text(SERVER)
    script = script.replace("SERVER", f"{sys.executable} {tmp_path}/server.py {tmp_path}/pid")
    process = subprocess.Popen(
        [*RELAY, "--to", "127.0.0.1:9", *options, "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, int(written(tmp_path / "pid", process))


def written(path: Path, process: subprocess.Popen[str]) -> str:
    """The line of a file, once it is there."""
    until = time.monotonic() + DEADLINE
    while not path.exists() or not path.read_text().endswith("\n"):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    return path.read_text()


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
    ("script", "code"),
    [
        ("SERVER & wait", 130),  # a shell's background process ignores SIGINT
        ("SERVER 15 & wait", 130),
        ("SERVER", 130),
        ("SERVER 15 & while [ ! -s PID ]; do sleep 0.1; done; exit 3", 3),
    ],
)
def test_nothing_that_the_command_started_is_left_behind(script: str, code: int, tmp_path: Path) -> None:
    process, pid = started(script.replace("PID", f"{tmp_path}/pid"), tmp_path)
    if code == 130:
        process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, errors
    assert not Path(f"/proc/{pid}").exists() or ends(pid)
    assert "kernel and relay agree" in text


@pytest.mark.process
def test_a_second_signal_kills_the_command_and_the_counts_are_shown(tmp_path: Path) -> None:
    process, pid = started("trap '' INT TERM; SERVER 2 15", tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, errors
    assert ends(pid) and "kernel and relay agree" in text


@pytest.mark.process
def test_a_killed_relay_takes_the_command_with_it(tmp_path: Path) -> None:
    process, pid = started("exec SERVER 2 15", tmp_path)
    process.kill()
    process.communicate(timeout=DEADLINE)
    assert ends(pid)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_gets_the_signal_that_came(number: signal.Signals, tmp_path: Path) -> None:
    script = 'for s in INT TERM HUP; do trap "echo got $s; exit 0" $s; done; SERVER & wait'
    process, _ = started(script, tmp_path)
    process.send_signal(number)
    text, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, errors
    assert f"got {number.name.removeprefix('SIG')}\n" in text and text.count("got") == 1


@pytest.mark.process
def test_a_command_that_writes_without_end_stops_no_connection() -> None:
    client = (
        "import os, socket\nhost, _, port = os.environ['FEDSIM_RELAY'].rpartition(':')\n"
        "end = socket.create_connection((host, int(port)), timeout=30)\nend.sendall(b'x')\n"
        "assert end.recv(1) == b'y'\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            end, _ = listener.accept()
            with end:
                end.recv(1)
                end.sendall(b"y")

        threading.Thread(target=serve, daemon=True).start()
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        script = f'yes & {sys.executable} -c "$0"'
        done = subprocess.run(
            [*RELAY, "--to", target, "--round", "x", "--json", "--", "sh", "-c", script, client],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=DEADLINE,
        )
    assert done.returncode == 0
    assert json.loads(done.stdout)["bytes"] == {"down": 1, "up": 1}


@pytest.mark.process
def test_without_a_command_it_relays_until_ctrl_c() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(
            [*RELAY, "--to", target], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        address = process.stderr.readline().split()[1]
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as client:
            client.sendall(b"x" * 1234)
            client.shutdown(socket.SHUT_WR)
            end, _ = listener.accept()
            with end:
                while end.recv(1 << 16):
                    pass
            assert client.recv(1) == b""
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as client:
            client.sendall(b"y" * 1000)
            end, _ = listener.accept()
            with end:
                assert end.recv(1)  # it is open
                process.send_signal(signal.SIGINT)
                text, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    assert "0 bytes down and 2,234 up, residual 0" in text and " cut " in text


@pytest.mark.process
def test_a_target_where_nobody_listens_is_named() -> None:
    port = free_port()
    client = (
        "import os, socket\nhost, _, port = os.environ['FEDSIM_RELAY'].rpartition(':')\n"
        "try:\n    socket.create_connection((host, int(port))).recv(1)\nexcept ConnectionError:\n    pass\n"
    )
    done = subprocess.run(
        [*RELAY, "--to", f"localhost:{port}", "--", sys.executable, "-c", client],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1
    assert f"localhost:{port} did not accept any of 1 connection: Connection refused" in done.stderr


@pytest.mark.process
def test_a_command_that_ignores_the_relay_is_told() -> None:
    done = subprocess.run(
        [*RELAY, "--to", "127.0.0.1:9", "--", "true"], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 1 and "FEDSIM_RELAY" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--", "true"], "--to is missing"),
        (["--to", "127.0.0.1", "--", "true"], "the port is missing"),
        (["--to", "::1:80", "--", "true"], "tcp://[::1]:5555"),
        (["--to", "127.0.0.1:9", "--listen", "*:80", "--", "true"], "would listen on every network"),
        (["--to", "127.0.0.1:9", "--listen", "192.0.2.1:80", "--", "true"], "cannot listen at"),
        (["--to", "127.0.0.1:9", "--round", "(", "--", "true"], "is no regular expression"),
        (["--to", "127.0.0.1:9", "--round", "x"], "write it behind --"),
        (["--to", "127.0.0.1:9", "--round", "x", "--silence", "1", "--", "true"], "give one of them"),
        (["--to", "127.0.0.1:9", "--", "no-such-program"], "cannot start no-such-program"),
        (["--to", "127.0.0.1:9", "--out", "FULL", "--", "true"], "name a new folder"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(words: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "ledger.csv").write_text("")
    arguments = [str(tmp_path) if word == "FULL" else word for word in words]
    done = CliRunner().invoke(main, ["relay", *arguments])
    assert done.exit_code == 2, done.output
    assert text in done.output and "Traceback" not in done.output


def test_it_needs_neither_torch_nor_pandas() -> None:
    program = (
        "import sys\nsys.modules['torch'] = sys.modules['pandas'] = None\n"
        "from click.testing import CliRunner\nfrom launch.cli import main\n"
        "done = CliRunner().invoke(main, ['relay', '--to', '127.0.0.1:9', '--', 'false'])\n"
        "assert done.exit_code == 1 and 'kernel and relay agree' in done.output, done.output\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, env=os.environ
    )
    assert done.returncode == 0, done.stderr
