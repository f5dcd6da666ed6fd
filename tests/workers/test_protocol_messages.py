"""Messages between coordinator and workers are read back as built; unreadable ones are WireErrors."""

from __future__ import annotations

import msgspec
import pytest

from fedsim.errors import DiskError, WireError
from fedsim.round_events import TaskId
from fedsim.wire.envelope import NONE, VERSION, Envelope, Header, blob, pack, unpack
from workers import protocol_messages as messages
from workers.protocol_messages import NO_PAYLOAD, WorkerConfig
from workers.transport import handshake
from workers.transport.handshake import Hello

TASK = TaskId(7, 2, 3, 6)


def arrived(envelope: Envelope) -> Envelope:
    """The envelope as the other side unpacks it."""
    return unpack([bytes(frame) for frame in (envelope.head, *envelope.frames)], "here")


def test_a_welcome_carries_the_configuration() -> None:
    config = WorkerConfig({"algo": "fedavg", "rounds": 3}, None, "/run", 2)
    envelope = arrived(messages.welcome("run", config))
    assert (envelope.header.kind, envelope.header.run) == ("welcome", "run")
    assert messages.read_welcome(envelope) == config
    assert list(msgspec.json.decode(envelope.frames[0])) == ["experiment", "data_dir", "run_dir", "index"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"experiment": 1}',
        b'{"experiment": {}, "index": "0"}',
        b'{"experiment": {}, "more": 1}',
        b'{"experiment": {"a": "\xff"}}',
        b'{"experiment": ' + b'{"a":' * 10**6,
    ],
)
def test_an_unreadable_welcome_is_a_wire_error(data: bytes) -> None:
    fields, frames = blob("welcome", data)
    with pytest.raises(WireError, match="an unreadable welcome"):
        messages.read_welcome(pack(Header(VERSION, "welcome", "run", fields=fields), frames))


def test_a_welcome_or_hello_without_a_frame_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="an unreadable welcome"):
        messages.read_welcome(pack(Header(VERSION, "welcome", "run")))
    with pytest.raises(WireError, match="an unreadable hello"):
        handshake.read_hello(pack(Header(VERSION, "hello", "")))


def test_a_hello_and_a_refusal_are_read_back() -> None:
    hello = Hello("token", 3, 17, "host")
    assert handshake.read_hello(arrived(handshake.hello(hello))) == hello
    assert handshake.refusal_reason(arrived(handshake.refusal("too late"))) == "too late"


@pytest.mark.parametrize("dropout", [False, True])
def test_answers_name_the_task_that_they_answer(dropout: bool) -> None:
    supplied = arrived(messages.task("run", 4, TASK, NO_PAYLOAD, dropout, folds=2, asked=5))
    assert supplied.header == Header(
        VERSION, "gone" if dropout else "task", "run", 4, 7, 2, 3, 6, folds=2, asked=5
    )
    for answer, kind in (
        (messages.absent(supplied.header), "absent"),
        (messages.upload(supplied.header, NO_PAYLOAD, 12), "upload"),
        (messages.draft(supplied.header, b"state"), "draft"),
        (messages.failed("run", ValueError("x"), supplied.header), "failed"),
    ):
        assert messages.task_of(arrived(answer)) == TASK
        assert (answer.header.kind, answer.header.run, answer.header.epoch) == (kind, "run", 4)
    assert messages.upload(supplied.header, NO_PAYLOAD, 12).header.micros == 12


def test_a_heartbeat_names_the_task_but_not_its_base() -> None:
    supplied = messages.task("run", 4, TASK, NO_PAYLOAD).header
    assert messages.heartbeat(supplied).header == Header(VERSION, "heartbeat", "run", 4, 7, 2, 3, NONE)
    assert messages.idle("run").header == Header(VERSION, "heartbeat", "run")


def test_a_failure_carries_exit_code_and_text() -> None:
    assert messages.read_failure(messages.failed("run", DiskError("full"))) == (DiskError.exit_code, "full")
    code, text = messages.read_failure(messages.failed("run", ValueError("seven")))
    assert code == 1 and "ValueError: seven" in text
    assert messages.read_failure(pack(Header(VERSION, "failed", "run")))[0] == 1
