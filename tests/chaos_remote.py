"""Chaos with remote workers: real processes, each behind a relay, under seeded faults, of the wire too.

A remote worker's connection is cut, late, slow, rejected, or silent one way or both, for less than a lease
and more; remote workers are killed, interrupted, or stopped for a while, and others come in their place; the
coordinator is stopped for a while, or killed or interrupted, and the run is resumed with remote workers of
its own. Remote workers end by themselves, whatever has happened.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fedsim.errors import UsageError
from tests.support.commands import DEADLINE, Command, start
from tests.support.relay import Direction, Relay
from tests.support.trials import EXPERIMENT, ROUNDS, Fault, Trial, done, facts, same
from workers.transport.join_credentials import JoinCredentials

LEASE = 2.0
PATIENCE = 5.0
"""Of remote workers, in seconds: how long they look for a coordinator."""
GONE_WITHIN = 60.0
"""Seconds in which remote workers must have ended after their coordinator: their patience, and a loaded
machine."""
PAUSE = 0.5
"""Seconds until somebody comes in the place of a remote worker that has ended."""
LATE = 3.0
"""Seconds for which a connection is late or slow."""
WAYS: dict[str, tuple[Direction, ...]] = {"up": ("up",), "down": ("down",), "both ways": ("up", "down")}
RATE = 50_000
"""Bytes per second of a slow connection: a client's state is some ten thousand."""
FAULTS = (
    *("cut", "delay", "slow", "mute up", "mute down", "mute both ways", "mute both ways and cut") * 2,
    *(
        "flip up",
        "flip down",
        "kill remote worker",
        "kill remote worker",
        "stop remote worker",
        "stop remote worker",
        "interrupt remote worker",
    ),
    *("kill coordinator", "kill coordinator", "interrupt coordinator", "stop coordinator"),
)


def plan(seed: int) -> tuple[list[Fault], list[int]]:
    """Faults in order, and how many remote workers each start has."""
    rng = Random(seed)
    rounds = sorted(rng.randrange(ROUNDS) for _ in range(rng.randint(2, 4)))
    faults = [_draw(rng, r) for r in rounds]
    return faults, [rng.choice((1, 2, 2, 3)) for _ in range(len(faults) + 1)]


def _draw(rng: Random, round: int) -> Fault:
    what, position, early = rng.choice(FAULTS), rng.randrange(6), rng.random() < 0.25
    if what == "delay":
        amount = rng.uniform(0.1, 1.0)
    else:  # who is silent is so for less than the lease, or for more
        amount = rng.choice((rng.uniform(0.2, 0.8 * LEASE), LEASE + rng.uniform(0.5, 2.5)))
    if early:
        return Fault(what, None, rng.uniform(0.0, 6.0), position, amount)
    return Fault(what, round, rng.uniform(0.0, 0.3), position, amount)


@dataclass
class RemoteWorker:
    command: Command
    ended_by: str = ""
    """What we did to it."""

    @property
    def ended(self) -> bool:
        return self.command.process.poll() is not None

    def send(self, number: int) -> None:
        self.command.process.send_signal(number)

    def ends(self, until: float) -> bool:
        """By itself."""
        while not self.ended and time.monotonic() < until:
            time.sleep(0.02)
        return self.ended

    @property
    def trouble(self) -> str:
        """How it has ended, if it should not: it may be refused, find no coordinator, come too late, or hear
        from the coordinator that the run was interrupted."""
        code, output = self.command.process.returncode, self.command.output()
        lines = "".join(output)
        late, crashed = "join.json: No such file" in lines, "Traceback" in lines
        interrupted = code == 130 and "the run was interrupted; once it is resumed" in lines
        well = self.ended_by or (not crashed and (code in (0, 1, 4) or late or interrupted))
        return "" if well else f"a remote worker ended with {code}: {output[-9:]}"


class Place:
    """A relay, and one remote worker after another behind it."""

    def __init__(self, join_credentials: Path, port: int, seed: int) -> None:
        self._join_credentials = join_credentials
        self.relay = Relay(port, seed)
        self.remote_workers: list[RemoteWorker] = []
        self._empty_at = 0.0

    @property
    def remote_worker(self) -> RemoteWorker:
        return self.remote_workers[-1]

    def fill(self) -> None:
        """Somebody comes in the place of a remote worker that has ended before the run."""
        if self.remote_workers and not self.remote_worker.ended:
            self._empty_at = time.monotonic()
        elif time.monotonic() - self._empty_at >= PAUSE and not self._over:
            url = f"tcp://127.0.0.1:{self.relay.port}"
            options = ("--join", str(self._join_credentials), "--connect", url, "--patience", str(PATIENCE))
            self.remote_workers.append(RemoteWorker(start("worker", *options)))

    @property
    def _over(self) -> bool:
        return bool(self.remote_workers) and self.remote_worker.command.process.returncode == 0

    def calm(self) -> None:
        """No fault lasts any longer."""
        self.relay.delay(0.0)
        self.relay.throttle(0.0)
        for direction in WAYS["both ways"]:
            self.relay.mute(direction, 0.0)
        if self.remote_workers:
            self.remote_worker.send(signal.SIGCONT)

    def close(self) -> None:
        for remote_worker in self.remote_workers:
            remote_worker.command.kill()
        self.relay.close()


@dataclass
class Stage:
    """One start of the coordinator, with its remote workers."""

    created: Trial
    running: Command
    folder: Path
    size: int
    placements: list[Place] = field(default_factory=list)
    ended_by: str = ""
    """What we did to the coordinator."""
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.running.process.poll() is not None

    def go_on(self, until: Callable[[], bool], seconds: float) -> bool:
        """Play on until this is true, or for so long; False if it is not, or the coordinator has ended."""
        deadline = time.monotonic() + seconds
        while not self.ended and not until() and time.monotonic() < deadline:
            self.running.listen(min(0.05, deadline - time.monotonic()))
            self._tend()
        return not self.ended and until()

    def _tend(self) -> None:
        if not self.placements and any("waiting for" in line for line in self.running.lines[:-1]):
            join_credentials = self.folder / "join.json"
            with suppress(UsageError):  # it has ended meanwhile
                port = int(JoinCredentials.read(join_credentials).url.rpartition(":")[2])
                self.placements = [
                    Place(join_credentials, port, self.created.seed + i) for i in range(self.size)
                ]
        for position in self.placements:
            position.fill()
        now = time.monotonic()
        due = [act for at, act in self._later if at <= now]
        self._later = [(at, act) for at, act in self._later if at > now]
        for act in due:
            act()

    def round(self) -> int:
        """The last one that was reported."""
        result = (re.match(r"round +(\d+)/", line) for line in self.running.lines[:-1])
        return max((int(match[1]) for match in result if match), default=-1)

    def inject(self, fault: Fault) -> None:
        what, n = fault.what, fault.amount
        number, of_remote_workers = (
            fault.position % len(self.placements) if self.placements else 0,
            "coordinator" not in what,
        )
        timed = f" {n:.1f} s" if what.startswith(("delay", "mute", "stop")) else ""
        self.created.hit.append(what + (f" {number}" if of_remote_workers else "") + timed)
        if not of_remote_workers:
            self._inject_coordinator_fault(what, n)
            return
        relay, remote_worker = self.placements[number].relay, self.placements[number].remote_worker
        if what == "cut":
            relay.cut()
        elif what == "delay":
            relay.delay(n, 0.3 * n)
            self._in(LATE, partial(relay.delay, 0.0))
        elif what == "slow":
            relay.throttle(RATE)
            self._in(LATE, partial(relay.throttle, 0.0))
        elif what.startswith("flip"):
            relay.flip("up" if what == "flip up" else "down")
        elif what.startswith("mute"):
            for direction in WAYS[what.removeprefix("mute ").removesuffix(" and cut")]:
                relay.mute(direction, n)
            if what.endswith("cut"):  # which loses what is held
                self._in(0.9 * n, relay.cut)
        elif what == "stop remote worker":
            remote_worker.send(signal.SIGSTOP)
            self._in(n, partial(remote_worker.send, signal.SIGCONT))
        else:
            remote_worker.ended_by = what
            remote_worker.send(signal.SIGKILL if "kill" in what else signal.SIGINT)

    def _inject_coordinator_fault(self, what: str, seconds: float) -> None:
        send = self.running.process.send_signal
        if "stop" in what:
            send(signal.SIGSTOP)
            self._in(seconds, partial(send, signal.SIGCONT))
        else:
            self.ended_by = what
            send(signal.SIGKILL if "kill" in what else signal.SIGINT)

    def _in(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def end(self) -> bool:
        """All faults are over; whether the coordinator has ended as it should."""
        stuck = not self.ended
        self.running.process.kill()
        for position in self.placements:
            position.calm()
        output, code = self.running.output(), self.running.process.wait(DEADLINE)
        due = {
            "": (0,),
            "kill coordinator": (0, -signal.SIGKILL),
            "interrupt coordinator": (0, 130, -signal.SIGINT),  # before it has begun, or after its end
        }
        if stuck:
            self.created.trouble.append(f"the run stands still: {output[-9:]}")
        elif code not in due[self.ended_by]:
            self.created.trouble.append(f"the coordinator ended with {code}: {output[-9:]}")
        return not stuck and code in due[self.ended_by]

    def close(self) -> None:
        self.running.kill()
        for position in self.placements:
            position.close()


def trial(seed: int, folder: Path, expected: dict[str, Any]) -> Trial:
    """One run from its launch to its end, through the plan of `seed`."""
    faults, sizes = plan(seed)
    return play(Trial(seed, faults), folder, sizes, expected)


def undisturbed(folder: Path) -> dict[str, Any]:
    """Of remote workers, too: their frames are longer."""
    created = play(Trial(0, []), folder, [2], {})
    assert not created.trouble and not created.left, str(created)
    return facts(folder)


def play(created: Trial, folder: Path, sizes: list[int], expected: dict[str, Any]) -> Trial:
    pending = list(created.faults)
    with ExitStack() as closing:
        stages: list[tuple[Stage, float]] = []
        for size in sizes:
            stage = Stage(created, _start(folder, size), folder, size)
            closing.callback(stage.close)
            while pending and not stage.ended_by and _reached(stage, pending[0]):
                stage.inject(pending.pop(0))
            stage.go_on(lambda: False, DEADLINE)
            well = stage.end()
            stages.append((stage, time.monotonic() + GONE_WITHIN))
            if not well or done(folder):
                break
        for stage, until in stages:
            for remote_worker in (
                remote_worker for position in stage.placements for remote_worker in position.remote_workers
            ):
                if not remote_worker.ends(until):
                    created.left.append(remote_worker.command.process.pid)
                elif remote_worker.trouble:
                    created.trouble.append(remote_worker.trouble)
    created.identical = same(folder, expected)
    return created


def _start(folder: Path, size: int) -> Command:
    known = (folder / "manifest.json").exists()
    options = ("resume", str(folder)) if known else ("launch", "--out", str(folder), *EXPERIMENT)
    where = ("--remote-workers", str(size), "--bind", "tcp://127.0.0.1:*", "--lease", str(LEASE))
    return start(*options, *where, "--join-within", "90")


def _reached(stage: Stage, fault: Fault) -> bool:
    """Whether the coordinator still runs when this fault is due. One of the wire or of remote workers comes
    after the remote workers, also while they set themselves up."""
    due, of_remote_workers = fault.round, "coordinator" not in fault.what
    if due is not None and not stage.go_on(lambda: stage.round() >= due, DEADLINE):
        return False
    if due is None and of_remote_workers and not stage.go_on(lambda: bool(stage.placements), DEADLINE):
        return False
    stage.go_on(lambda: False, fault.seconds)
    return not stage.ended
