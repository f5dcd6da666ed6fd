"""A worker with a good key that claims what is not its own: refused with a reason, and nothing is folded.
One that says something again is not listened to, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fedsim.errors import FedsimError, TaskError, WireError
from fedsim.problem import Problem
from fedsim.wire.envelope import VERSION, Envelope, Header, blob, digest, pack, unpack
from fedsim.wire.ledger import Ledger
from protocols import find
from tests.support.harness import Connect, play, problem_of
from workers.storage.journal import read_journal
from workers.transport.endpoint import Endpoint, Incoming, Loopback
from workers.worker.runtime import WorkerRuntime


class Forging(Loopback):
    """Sends something else in the place of the first envelope of a kind."""

    def __init__(self, ledger: Ledger, runtime: WorkerRuntime, kind: str, forge: Forgery) -> None:
        super().__init__(ledger, runtime)
        self.kind, self.forge, self.done = kind, forge, False

    def wait(self, fds: list[int], timeout: float) -> tuple[list[Incoming], list[int]]:
        envelopes, ready = super().wait(fds, timeout)
        if self.done or not envelopes or envelopes[0].envelope.header.kind != self.kind:
            return envelopes, ready
        self.done = True
        forged = self.forge(envelopes[0])
        unbooked = list(forged)
        if envelopes[0] in forged:
            unbooked.remove(envelopes[0])  # that one has crossed the wire
        for more in unbooked:
            self._book(more.envelope, more.worker, "up")
        return [*forged, *envelopes[1:]], ready


Forgery = Callable[[Incoming], list[Incoming]]


def label(**changes: object) -> Forgery:
    """The same envelope with another header."""

    def forge(sound: Incoming) -> list[Incoming]:
        header = msgspec.structs.replace(sound.envelope.header, **changes)
        envelope = pack(header, sound.envelope.frames)
        return [Incoming(sound.worker, unpack([envelope.head, *envelope.frames], "here"))]

    return forge


def by(worker: int) -> Forgery:
    return lambda sound: [Incoming(worker, sound.envelope)]


def twice(sound: Incoming) -> list[Incoming]:
    return [sound, sound]


def before(forge: Forgery) -> Forgery:
    """The forged envelope comes beside the sound one."""
    return lambda sound: [*forge(sound), sound]


def kind(name: str, data: bytes | None = None) -> Forgery:
    """An envelope of that kind, of the same task, with one frame of bytes or none."""

    def forge(sound: Incoming) -> list[Incoming]:
        fields, frames = blob("x", data) if data is not None else ((), ())
        h = msgspec.structs.replace(sound.envelope.header, kind=name, fields=fields)
        return [Incoming(sound.worker, pack(h, frames))]

    return forge


def bare(sound: Incoming) -> list[Incoming]:
    return [Incoming(sound.worker, Envelope(Header(VERSION, "upload", "run"), b"", ()))]


FORGERIES: dict[str, tuple[str, Forgery]] = {
    "another worker's": ("upload", by(1)),
    "another client": ("upload", label(client=2)),
    "no such client": ("upload", label(client=10**9)),
    "another round": ("upload", label(round=2)),
    "another exchange": ("upload", label(exchange=2)),
    "another base": ("upload", label(base=7)),
    "another run": ("upload", label(run="other")),
    "a later start": ("upload", label(epoch=2)),
    "nothing in it": ("upload", label(fields=())),
    "about nothing": ("upload", bare),
    "an unknown kind": ("upload", kind("checkpoint")),
    "a task": ("upload", kind("task")),
    "a state that nobody asked for": ("upload", kind("draft", b"FEDSTATE")),
    "a score of no round": ("score", label(round=99)),
    "a score of no chunk": ("score", label(exchange=99)),
    "nothing where an upload is due": ("upload", kind("absent")),
    "ready again": ("upload", kind("ready", b'{"data":"","sources":{}}')),
    "a failure that says nothing": ("upload", kind("failed")),
    "a failure in no words": ("upload", kind("failed", b"\xff")),
    "a score too long": ("score", kind("score", bytes(1000))),
    "a score without a frame": ("score", kind("score")),
}


DUPLICATES: dict[str, tuple[str, Forgery]] = {
    "twice": ("upload", twice),
    "a score twice": ("score", twice),
    "to an earlier start": ("upload", before(label(epoch=0))),
    "what an earlier start never asked": ("upload", before(label(epoch=0, client=2, round=7))),
}


def forging(what: str, forge: Forgery) -> tuple[list[Forging], Connect]:
    """Endpoints as they are made, and how."""
    created: list[Forging] = []

    def connect(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        created.append(Forging(ledger, WorkerRuntime(problem, folder, "run", 0), what, forge))
        return created[0]

    return created, connect


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_ends_the_run_with_a_reason(name: str, tmp_path: Path) -> None:
    what, forge = FORGERIES[name]
    endpoints, connect = forging(what, forge)
    with pytest.raises((TaskError, WireError)) as caught:
        play(problem_of(find("fedlap_cov")), tmp_path / "run", connect=connect)
    assert isinstance(caught.value, FedsimError)
    assert endpoints[0].done
    folded = list((tmp_path / "run" / "checkpoints").glob("000001*"))
    assert what == "score" or not folded  # scores come beside the next round


@pytest.mark.parametrize("name", DUPLICATES)
def test_an_echo_is_dropped_and_counted(name: str, tmp_path: Path) -> None:
    plain = play(problem_of(find("fedlap_cov")), tmp_path / "plain")
    endpoints, connect = forging(*DUPLICATES[name])
    duplicated = play(problem_of(find("fedlap_cov")), tmp_path / "duplicated", connect=connect)
    assert endpoints[0].done
    assert duplicated.bits == plain.bits
    records = read_journal(duplicated.folder / "journal")
    assert [r["what"] for r in records].count("echo") == 1


def test_two_answers_that_differ_are_not_hidden(tmp_path: Path) -> None:
    def another(sound: Incoming) -> list[Incoming]:
        (first, *others), h = sound.envelope.frames, sound.envelope.header
        changed = bytes(first[:-1]) + bytes([first[-1] ^ 1])
        part = msgspec.structs.replace(h.fields[0].parts[0], digest=digest(changed))
        field = msgspec.structs.replace(h.fields[0], parts=(part, *h.fields[0].parts[1:]))
        header = msgspec.structs.replace(h, fields=(field, *h.fields[1:]))
        return [sound, Incoming(sound.worker, pack(header, (changed, *others)))]

    _, connect = forging("upload", another)
    with pytest.raises(TaskError, match="not deterministic"):
        play(problem_of(find("fedlap_cov")), tmp_path / "run", connect=connect)
