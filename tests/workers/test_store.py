"""Files a run resumes from: written whole or not at all, kept as long as a checkpoint names them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsim.errors import DiskError, WireError
from fedsim.wire.state_file import encode_state
from tests.support.commands import DEADLINE
from workers.storage import atomic_files, client_states, durability
from workers.storage.atomic_files import write_atomically
from workers.storage.checkpoints import KEEP, Checkpoint, Checkpoints, read_checkpoint
from workers.storage.client_states import ClientStates, mark, model_digest


@dataclass(frozen=True)
class Client:
    dual: Tensor
    steps: int = 0


@dataclass(frozen=True)
class Server:
    mean: Tensor


def client(value: float, size: int = 8) -> Client:
    return Client(torch.full((size,), value, dtype=torch.float64), int(value))


@pytest.fixture
def states(tmp_path: Path) -> ClientStates:
    return ClientStates(tmp_path / "state", Client)


@pytest.fixture
def checkpoints(tmp_path: Path, states: ClientStates) -> Iterator[Checkpoints]:
    (tmp_path / "checkpoints").mkdir()
    created = Checkpoints(tmp_path / "checkpoints", states)
    yield created
    if any(thread.is_alive() for thread in created._threads):
        created.close()


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def saved(states: ClientStates, client: int) -> list[int]:
    folder = states.path(client, 0).parent
    return sorted(int(p.stem) for p in folder.iterdir()) if folder.exists() else []


# ---- files


def test_a_file_is_replaced_whole_and_no_temporary_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    for content in (b"one", b"another"):
        assert write_atomically(path, [content[:1], b"", content[1:]]) == len(content)
        assert path.read_bytes() == content
    assert tree(tmp_path) == {"x.state"}


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    write_atomically(path, [b"old"])

    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match=r"cannot write .*x\.state.*No space left on device"):
        write_atomically(path, chunks())
    assert path.read_bytes() == b"old"
    assert tree(tmp_path) == {"x.state"}


# ---- client states


def test_a_state_is_read_back_by_another_process_and_from_the_cache(states: ClientStates) -> None:
    state = client(3)
    states.save(2, 5, state)
    assert states.load(2, 5) is state
    other = ClientStates(states.folder, Client).load(2, 5)
    assert torch.equal(other.dual, state.dual)
    assert other.dual.dtype == torch.float64
    assert other.steps == 3
    assert tree(states.folder) == {"000002/000005.state"}
    assert states.read(2, 5) == encode_state(state)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied", "foreign"])
def test_a_damaged_file_names_client_and_path(states: ClientStates, damage: str) -> None:
    states.save(11, 4, client(1))
    path = states.path(11, 4)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    wrong = {"truncated": data[:-1], "emptied": b"", "foreign": encode_state(Server(torch.ones(1)))}
    path.write_bytes(bytes(wrong.get(damage, data)))
    with pytest.raises(WireError, match=r"the state of client 11, .*000011/000004\.state"):
        ClientStates(states.folder, Client).load(11, 4)


def test_a_missing_file_names_the_client(states: ClientStates) -> None:
    with pytest.raises(DiskError, match=r"the state of client 9, .*: No such file"):
        states.load(9, 1)


def test_the_cache_is_bounded_and_its_account_is_right(
    states: ClientStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(encode_state(client(0)))
    monkeypatch.setattr(client_states, "CACHE_BYTES", 3 * size)
    for version in range(1, 11):
        states.save(0, version, client(0))
        states.save(0, version, client(0))  # a task that was computed again
        assert states._cached_bytes == sum(n for _, n in states._cache.values()) <= 3 * size
    assert [version for _, version in states._cache] == [8, 9, 10]
    assert states.load(0, 1).steps == 0  # from disk
    states.save(0, 11, client(0, size=10_000))  # larger than the bound: the page cache has it
    assert [version for _, version in states._cache] == [8, 9, 10]
    assert states.load(0, 11).steps == 0


def test_forgetting_empties_the_cache_and_not_the_disk(states: ClientStates) -> None:
    for k in (0, 1):
        for version in (1, 2, 3):
            states.save(k, version, client(version))
    states.forget(0, below=3)
    assert set(states._cache) == {(0, 3), (1, 1), (1, 2), (1, 3)}
    assert states._cached_bytes == sum(n for _, n in states._cache.values())
    assert states.load(0, 1).steps == 1


# ---- checkpoints


def test_a_checkpoint_names_the_round_the_server_and_all_versions(
    tmp_path: Path, checkpoints: Checkpoints
) -> None:
    server = Server(torch.tensor([1 / 3, -0.0], dtype=torch.float64))
    checkpoints.states.save(0, 4, client(4))
    checkpoints.commit(4, server, (4, 0, 2), (0,))
    checkpoints.close()
    assert tree(tmp_path / "checkpoints") == {"000004.checkpoint"}
    back = read_checkpoint(tmp_path / "checkpoints" / "000004.checkpoint", Server)
    assert back.round == 4
    assert back.versions.tolist() == [4, 0, 2]
    assert encode_state(back.server) == encode_state(server)


def test_three_checkpoints_and_exactly_the_states_that_they_name(
    tmp_path: Path, states: ClientStates, checkpoints: Checkpoints
) -> None:
    """Two exchanges a round; client 2 takes part in odd rounds only, and client 1 is lost in round 4."""
    versions = [0, 0, 0, 0]
    history = []
    for r in range(1, 9):
        participants = [k for k in (0, 1, 2) if k != 2 or r % 2]
        for k in participants:
            states.save(k, 2 * r - 1, client(2 * r - 1))
            states.save(k, 2 * r, client(2 * r))
        folded = tuple(k for k in participants if (k, r) != (1, 4))
        for k in folded:
            versions[k] = 2 * r
        history.append(tuple(versions))
        checkpoints.commit(r, Server(torch.ones(1)), history[-1], folded)
    checkpoints.close()
    assert KEEP["power"] == 3
    assert tree(tmp_path / "checkpoints") == {f"{r:06d}.checkpoint" for r in (6, 7, 8)}
    for kept in history[-3:]:
        for k, version in enumerate(kept):
            assert version == 0 or states.load(k, version).steps == version
    for k in range(4):
        named = {kept[k] for kept in history[-3:]} - {0}
        assert named <= set(saved(states, k))
        # drafts of the kept rounds may remain until their round is dropped; nothing older does
        assert all(v in named or v > min(named) for v in saved(states, k))
    assert saved(states, 3) == []


def test_rounds_that_fold_nothing_keep_the_states_of_those_before(
    states: ClientStates, checkpoints: Checkpoints
) -> None:
    states.save(0, 1, client(1))
    checkpoints.commit(1, Server(torch.ones(1)), (1,), (0,))
    for r in range(2, 8):
        checkpoints.commit(r, Server(torch.ones(1)), (1,), ())
    checkpoints.close()
    assert saved(states, 0) == [1]


def test_a_disk_that_refuses_is_reported_by_the_next_call(tmp_path: Path, states: ClientStates) -> None:
    checkpoints = Checkpoints(tmp_path / "nowhere", states)
    checkpoints.commit(1, Server(torch.ones(1)), (0,), ())
    with pytest.raises(DiskError, match=r"cannot write .*000001\.checkpoint"):
        checkpoints.close()


def test_the_model_digest_is_of_little_endian_float32() -> None:
    mean = torch.tensor([1.0, -0.0, 1 / 3], dtype=torch.float64)
    precision = torch.tensor([2.0, 3.0, 4.0])
    raw = mean.float().numpy().astype("<f4").tobytes()
    assert model_digest(mean, None) == sha256(raw).hexdigest()
    assert model_digest(mean, precision) == sha256(raw + precision.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("last", "left"), [(2, [2, 3, 4, 5, 6, 7]), (6, [5, 6, 7])])
def test_checkpoints_whose_models_are_not_evaluated_are_kept(
    last: int, left: list[int], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path / "checkpoints", ClientStates(tmp_path / "state", Client))
    for r in range(1, 8):
        checkpoints.commit(r, Server(torch.ones(1)), (0,), (), needed=2 if r < 7 else last)
    checkpoints.close()
    assert sorted(int(p.stem) for p in (tmp_path / "checkpoints").iterdir()) == left


# ---- durability = process


def test_process_syncs_nothing_and_keeps_two_checkpoints(
    tmp_path: Path, states: ClientStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durability, "fsync", synced.append)
    (tmp_path / "checkpoints").mkdir()
    created = Checkpoints(tmp_path / "checkpoints", states, [tmp_path], "process")
    for r in range(1, 6):
        states.save(0, r, client(r))
        created.commit(r, Server(torch.ones(1)), (r,), (0,))
    assert not synced
    created.close()
    assert synced == [tmp_path, tmp_path]  # what lies beside, and the folder that names it
    assert tree(tmp_path / "checkpoints") == {"000004.checkpoint", "000005.checkpoint"}
    assert saved(states, 0) == [4, 5]


@pytest.mark.parametrize("size", [8, 3, 20])
def test_a_large_state_is_written_over_one_that_is_needed_no_more(
    size: int, states: ClientStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "SPARE_BYTES", 0)
    monkeypatch.setattr(client_states, "SMALL_BYTES", 0)
    for version in (1, 2):
        states.save(0, version, client(version))
    inode = states.path(0, 1).stat().st_ino
    states.remove(0, below=2, spare=True)
    assert tree(states.folder) == {"000000/000002.state", "000000/spare"}
    states.save(0, 3, client(3, size))
    assert states.path(0, 3).stat().st_ino == inode
    state = encode_state(client(3, size))
    assert states.read(0, 3) == state and states.path(0, 3).read_bytes() == state + mark("", 0, 3, state)
    assert saved(states, 0) == [2, 3]


def test_the_bytes_of_another_version_are_not_taken_for_this_one(
    states: ClientStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut the new name may be there and the old bytes, or a part of the new ones, behind it."""
    monkeypatch.setattr(client_states, "SMALL_BYTES", 0)
    for version in (1, 2):
        states.save(0, version, client(version))
    old, new = (states.path(0, version).read_bytes() for version in (1, 2))
    assert len(old) == len(new)
    end = len(new) - len(mark("", 0, 2, new))
    for wrong in (old, old[:end] + new[end:], new[:end] + old[end:]):
        states.path(0, 2).write_bytes(wrong)
        with pytest.raises(
            WireError, match=r"the state of client 0, .*000002\.state: it (holds version 1|does not hold all)"
        ):
            ClientStates(states.folder, Client).load(0, 2)
    states.path(0, 2).write_bytes(new[:end])
    with pytest.raises(WireError, match=r"000002\.state: the mark at its end is not there"):
        ClientStates(states.folder, Client).load(0, 2)
    states.path(0, 3).write_bytes(new)
    with pytest.raises(WireError, match=r"000003\.state: it holds version 2, not version 3"):
        states.load(0, 3)


@pytest.mark.parametrize("small", [0, 4096])
def test_the_state_of_another_client_or_run_is_not_taken(
    small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_states, "SMALL_BYTES", small)
    mine, other = (ClientStates(tmp_path / run, Client, run) for run in ("mine", "other"))
    for k in (3, 5):
        mine.save(k, 8, client(k))
    other.save(3, 8, client(3))
    right = mine.path(3, 8).read_bytes()
    for wrong, what in ((mine.path(5, 8), "client 5"), (other.path(3, 8), "client 3 of another run")):
        mine.path(3, 8).write_bytes(wrong.read_bytes())
        with pytest.raises(WireError, match=rf"000003/000008\.state: it holds a state of {what}$"):
            ClientStates(mine.folder, Client, "mine").load(3, 8)
    mine.path(3, 8).write_bytes(right)
    assert ClientStates(mine.folder, Client, "mine").load(3, 8).steps == 3


def test_a_checkpoint_knows_an_older_version_of_a_small_state(
    states: ClientStates, checkpoints: Checkpoints
) -> None:
    """Versions with the same bytes are one file, so that the mark of a small one names none."""
    for k, version in ((0, 1), (0, 2), (1, 1)):
        states.save(k, version, client(10 * k + version))
    checkpoints.commit(1, Server(torch.ones(1)), (1, 1), (0, 1))
    checkpoints.commit(2, Server(torch.ones(1)), (2, 1), (0,))
    checkpoints.close()
    kept = read_checkpoint(checkpoints.path(2), Server)
    fresh = ClientStates(states.folder, Client)
    assert [kept.load_state(fresh, k).steps for k in (0, 1)] == [2, 11]
    states.path(0, 2).write_bytes(states.path(0, 1).read_bytes())
    with pytest.raises(WireError, match=r"000000/000002\.state: it holds another state than version 2"):
        kept.load_state(fresh, 0)


def test_a_file_that_two_versions_share_is_not_written_over(
    states: ClientStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "SPARE_BYTES", 0)
    for version in (1, 2):
        states.save(0, version, client(7))
    assert states.path(0, 1).samefile(states.path(0, 2))
    states.remove(0, below=2, spare=True)
    assert tree(states.folder) == {"000000/000002.state"}


# ---- what a power cut may not take


@dataclass
class Disk:
    """In the place of fsync: writes down what is synced. `quick` syncs go through, the next is held up until
    the disk is free."""

    root: Path
    quick: int = 10
    synced: list[str] = field(default_factory=list)
    free: threading.Event = field(default_factory=threading.Event)

    def fsync(self, path: Path) -> None:
        if self.synced.count("checkpoints") >= self.quick:
            assert self.free.wait(DEADLINE)
        path.stat()
        self.synced.append(str(path.relative_to(self.root)))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    created = Disk(tmp_path)
    monkeypatch.setattr(durability, "fsync", created.fsync)
    return created


@pytest.mark.parametrize("quick", [0, 1])
def test_what_the_newest_durable_checkpoint_needs_stays_until_a_later_one_is_durable(
    quick: int,
    tmp_path: Path,
    disk: Disk,
    states: ClientStates,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None or the first is durable, and the next sync takes as long as seven rounds."""
    monkeypatch.setattr(durability, "SYNC_SECONDS", 0.0)
    disk.quick = quick
    for r in range(1, 9):
        states.save(0, r, client(r))
        checkpoints.commit(r, Server(torch.ones(1)), (r,), (0,))
        while r == quick and checkpoints._syncer.durable is None:
            time.sleep(0.001)
    written = {f"{r:06d}.checkpoint" for r in range(1, 8)}  # the eighth perhaps not yet
    assert written <= tree(tmp_path / "checkpoints") and saved(states, 0) == list(range(1, 9))
    disk.free.set()
    checkpoints.close()
    assert tree(tmp_path / "checkpoints") == {f"{r:06d}.checkpoint" for r in (6, 7, 8)}
    assert saved(states, 0) == [6, 7, 8]


def test_what_an_earlier_start_has_left_is_synced_too(
    tmp_path: Path, disk: Disk, states: ClientStates, checkpoints: Checkpoints
) -> None:
    """Nobody knows whether it was. Client 1 does not take part any more."""
    for k, version in ((0, 1), (1, 1), (0, 2)):
        states.save(k, version, client(version))
    left = Checkpoint(1, torch.tensor([1, 1]), Server(torch.ones(1)))
    write_atomically(checkpoints.path(1), [b"whatever it says"])
    checkpoints.adopt([left])
    checkpoints.commit(2, Server(torch.ones(1)), (2, 1), (0,), 1)
    checkpoints.close()
    for name in ("state/000001/000001.state", "checkpoints/000001.checkpoint", "state/000000/000002.state"):
        assert name in disk.synced[: disk.synced.index("checkpoints")]
