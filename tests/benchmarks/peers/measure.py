"""One run of a tool: its instants, memory and digest, and what happens when a worker is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.common import pss
from tests.support.process_tree import alive, children_of, command_line

ROUND = re.compile(r'^(?:\{"round": |round +)([1-9]\d*)')
SAMPLE = 0.25
"""Seconds between two looks at the memory."""


@dataclass
class Measured:
    """Seconds from the command to the end of each round; MB; the digest; how it ended."""

    rounds: dict[int, float] = field(default_factory=dict)
    peak: float = 0.0
    sha256: str = ""
    accuracy: float = float("nan")
    code: int | None = None
    killed: str = ""
    victim: str = ""
    seconds: float = 0.0
    errors: str = ""

    def per_round(self, warm: int) -> float:
        """Mean seconds of the rounds after the first `warm`."""
        last = max(self.rounds)
        return (self.rounds[last] - self.rounds[warm]) / (last - warm)


def cpu_ticks(pid: int) -> int:
    """What a process has computed; 0 of one that has ended."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(values[11]) + int(values[12])


def busiest_below(pid: int, worker: str = "") -> int | None:
    """The child process that computes most in a fifth of a second, of those whose command has `worker` in it;
    None if there is none."""
    before = {child: cpu_ticks(child) for child in children_of(pid) if worker in command_line(child)}
    time.sleep(0.2)
    used = {child: cpu_ticks(child) - ticks for child, ticks in before.items() if alive(child)}
    return max(used, key=lambda child: used[child]) if used else None


def busy_cores(seconds: float = 0.5) -> float:
    """How many cores other jobs of this machine use just now."""

    def ticks() -> int:
        values = [int(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(values) - values[3] - values[4]

    before, began = ticks(), time.monotonic()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def end_all(pids: list[int]) -> None:
    """Kill processes that this run started."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _lines(process: subprocess.Popen[str], measured: Measured, began: float) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if match := ROUND.match(line):
            measured.rounds[int(match[1])] = time.monotonic() - began
            if line.startswith("{"):
                measured.accuracy = json.loads(line)["accuracy"]
        elif line.startswith('{"sha256"'):
            measured.sha256 = json.loads(line)["sha256"]


def run(
    command: list[str], environment: Mapping[str, str], deadline: float, kill_after: int = 0, worker: str = ""
) -> Measured:
    """Run a tool to its end, or kill it at the deadline (code None).

    kill_after: after so many rounds the child process that computes most is killed with SIGKILL; 0: none is.
    worker: what the command of that child has in it.
    """
    measured, began = Measured(), time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=dict(environment), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        reader = threading.Thread(target=_lines, args=(process, measured, began), daemon=True)
        reader.start()
        seen: set[int] = set()
        sampled = 0.0
        while process.poll() is None and time.monotonic() < began + deadline:
            if time.monotonic() >= sampled + SAMPLE:
                everyone, sampled = [process.pid, *children_of(process.pid)], time.monotonic()
                seen.update(everyone)
                measured.peak = max(measured.peak, sum(map(pss, everyone)) / 1e6)
            if kill_after and not measured.killed and len(measured.rounds) >= kill_after:
                victim = busiest_below(process.pid, worker)
                if victim is None:
                    measured.killed = "no worker process"
                else:
                    measured.victim = f"{victim} {command_line(victim)[:120].strip()}"
                    end_all([victim])
                    measured.killed = f"after round {max(measured.rounds)}"
            time.sleep(0.02)
        measured.code = process.poll()
        end_all([pid for pid in seen | set(children_of(process.pid)) if pid != process.pid and alive(pid)])
        if measured.code is None:
            process.kill()
        process.wait(30)
        reader.join(10)
        errors.seek(0)
        measured.errors = errors.read()[-4000:]
    measured.seconds = time.monotonic() - began
    return measured


def failure(measured: Measured) -> str:
    lines = [line for line in measured.errors.splitlines() if line.strip()]
    ended = "no end" if measured.code is None else f"exit code {measured.code}"
    return f"fails ({ended}): {lines[-1][:160] if lines else 'it says nothing'}"
