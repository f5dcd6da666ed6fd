"""Files with a flipped bit, a cut or an unauthenticated peer's contents: the documented error, never a
value."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from fedsim.errors import DataError, FedsimError, UsageError, WireError
from fedsim.wire.envelope import VERSION, Envelope, Header, blob, pack
from fedsim.wire.state_file import encode_state
from workers.protocol_messages import WorkerManifest
from workers.storage.atomic_files import write_atomically
from workers.storage.checkpoints import Checkpoint, read_checkpoint
from workers.storage.client_states import ClientStates, mark
from workers.transport.join_credentials import FORMAT, JoinCredentials, KeyPair

fixed = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Client:
    dual: Tensor
    steps: int
    logits: Tensor | None = None


@dataclass(frozen=True)
class Server:
    sums: Tensor
    started: bool


DRAWS = torch.Generator().manual_seed(0)
STATE = encode_state(Client(torch.randn(1500, generator=DRAWS, dtype=torch.float64), 7))
CHECKPOINT = encode_state(
    Checkpoint(9, torch.arange(20), Server(torch.randn(1500, generator=DRAWS, dtype=torch.float64), True))
)


def damaged(data: bytes) -> list[bytes]:
    """A flipped bit at each of 1,000 offsets, the first 64 and last 64 bytes among them; cuts at every 64th
    byte and in the whole head; lengthened, emptied, doubled, zeroed from somewhere on."""
    rng = random.Random(0)
    offsets = {*range(64), *range(len(data) - 64, len(data))}
    offsets |= set(rng.sample(range(64, len(data) - 64), 1000 - len(offsets)))
    out = []
    for at in sorted(offsets):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        out.append(bytes(flipped))
    assert len(out) == 1000
    out += [data[:n] for n in {*range(64), *range(0, len(data), 64), len(data) - 1}]
    out += [
        data + b"\0",
        data + data,
        *(data[:n] + bytes(len(data) - n) for n in range(0, len(data) - 8, 997)),
    ]
    return out


def test_a_damaged_client_state_is_never_loaded(tmp_path: Path) -> None:
    states = ClientStates(tmp_path, Client, "r")
    path, written = states.path(3, 4), STATE + mark("r", 3, 4, STATE)
    path.parent.mkdir()
    for data in damaged(written):
        path.write_bytes(data)
        with pytest.raises(WireError, match=r"^the state of client 3, .*000003/000004\.state: "):
            states.load(3, 4)
    for data in damaged(STATE):
        with pytest.raises(WireError, match=r"^the state of client 3, version 5: "):
            states.put(3, 5, data)
    assert not states.path(3, 5).exists()
    path.write_bytes(written)
    assert states.load(3, 4).steps == 7


def test_a_damaged_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "000009.checkpoint"
    for data in damaged(CHECKPOINT):
        path.write_bytes(data)
        with pytest.raises(WireError, match=r"^checkpoint .*000009\.checkpoint: "):
            read_checkpoint(path, Server)
    write_atomically(path, [CHECKPOINT])
    assert read_checkpoint(path, Server).round == 9
    with pytest.raises(WireError):
        read_checkpoint(path, Client)


# ---- join.json


SERVER = KeyPair.new()
GOOD: dict[str, Any] = {
    "format": FORMAT,
    "run": "r",
    "url": "tcp://127.0.0.1:1",
    "server_key": SERVER.public,
    "max_frame": 1 << 20,
    "workers": [{"public": SERVER.public, "secret": SERVER.secret}],
}
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 10**30, 1.5, "", "x", "é" * 40, " " * 40, "\0" * 40, [], {}, [{}], [[]]),
    *({"a": 1},),
)


def read(path: Path, data: bytes) -> JoinCredentials | None:
    path.write_bytes(data)
    path.chmod(0o600)
    try:
        return JoinCredentials.read(path)
    except (DataError, UsageError) as e:
        assert str(path) in str(e)  # noqa: PT017
        assert SERVER.secret not in str(e)  # noqa: PT017
        return None


@fixed
@given(data=st.data())
def test_a_forged_join_file_is_usable_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """Usable: keys that ZeroMQ takes, and a limit that is one (-1 would be none)."""
    created = copy.deepcopy(GOOD)
    where = data.draw(st.sampled_from([created, created["workers"][0]]))
    key = data.draw(st.sampled_from([*where, "more"]))
    if key in where and data.draw(st.integers(0, 3)) == 0:
        del where[key]
    else:
        where[key] = data.draw(st.sampled_from(ODD) | st.text(max_size=50) | st.integers(-(2**70), 2**70))
    result = read(tmp_path / "join.json", msgspec.json.encode(created))
    if result is not None:
        assert result.max_frame > 0
        assert result.format == FORMAT
        keys = [key for w in result.workers for key in (w.public, w.secret, result.server_key)]
        assert [len(key) for key in keys] == [40, 40, 40]


@fixed
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_join_file_is_usable_or_refused(at: int, byte: int, cut: bool, tmp_path: Path) -> None:
    data = bytearray(msgspec.json.encode(GOOD))
    at %= len(data)
    data[at] = byte
    read(tmp_path / "join.json", bytes(data[:at] if cut else data))


@pytest.mark.parametrize(
    "data", [b"", b"[", b"[" * 10**6, b'{"a":' * 10**6, b"\xff\xfe", b'"\\ud800"', b"null"]
)
def test_a_hostile_join_file_is_refused(data: bytes, tmp_path: Path) -> None:
    assert read(tmp_path / "join.json", data) is None


def test_a_secret_is_in_no_text(tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    join_credentials = JoinCredentials(FORMAT, "r", "tcp://127.0.0.1:1", SERVER.public, 1, (SERVER,))
    join_credentials.write(path)
    assert SERVER.secret in path.read_text()
    assert SERVER.secret not in repr(join_credentials) + str(SERVER)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_join_file_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that wait for the file read it when it appears: whole, and closed to others."""
    path, seen = tmp_path / "join.json", []

    def rename(source: str, target: Path) -> None:
        assert not path.exists()
        seen.append((JoinCredentials.read(Path(source)).run, Path(source).stat().st_mode & 0o777))
        os.replace(source, target)

    monkeypatch.setattr("workers.storage.atomic_files.os.rename", rename)
    JoinCredentials(FORMAT, "r", "tcp://127.0.0.1:1", SERVER.public, 1, (SERVER,)).write(path)
    assert seen == [("r", 0o600)] and [p.name for p in tmp_path.iterdir()] == ["join.json"]


# ---- what a newcomer says it has


def ready(data: bytes) -> Envelope:
    fields, frames = blob("ready", data)
    return pack(Header(VERSION, "ready", "run", fields=fields), frames)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"data": 1, "sources": {}}',
        b'{"data": "", "sources": []}',
        b'{"data": "", "sources": {"a": 1}}',
        b'{"data": "", "sources": {}, "more": 1}',
        b'{"data": "\xff", "sources": {}}',
        b'{"data": "", "sources": ' + b'{"a":' * 10**6,
        b"[" * 10**6,
    ],
)
def test_an_unreadable_ready_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError, match="an unreadable 'ready'"):
        WorkerManifest.of(ready(data))


@fixed
@given(st.binary(max_size=80), st.integers(0, 60), st.integers(0, 255))
def test_any_ready_is_read_or_a_wire_error(rubbish: bytes, at: int, byte: int) -> None:
    sound = bytearray(msgspec.json.encode(WorkerManifest("d", {"a.py": "0" * 64})))
    sound[at] = byte
    for data in (rubbish, bytes(sound)):
        try:
            result = WorkerManifest.of(ready(data))
        except FedsimError as e:
            assert isinstance(e, WireError)  # noqa: PT017
            continue
        assert isinstance(result.data, str) and all(isinstance(v, str) for v in result.sources.values())


def test_a_ready_without_a_frame_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="an unreadable 'ready'"):
        WorkerManifest.of(pack(Header(VERSION, "ready", "run")))
