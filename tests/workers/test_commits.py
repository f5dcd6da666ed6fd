"""What a crash may cost: one committed round; and disk errors are never lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import workers.storage.checkpoints
import workers.storage.durability
from fedsim.errors import DiskError
from fedsim.wire.envelope import Buffer
from tests.support.commands import DEADLINE
from workers.storage import atomic_files, client_states, durability
from workers.storage.checkpoints import Checkpoints
from workers.storage.client_states import ClientStates


@dataclass(frozen=True)
class Server:
    mean: Tensor


@dataclass(frozen=True)
class Client:
    mean: Tensor


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints", ClientStates(tmp_path / "state", Client))


def test_the_next_commit_waits_until_the_last_one_is_written(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_free, second = threading.Event(), threading.Event()
    written = workers.storage.checkpoints.write_atomically

    def slow(path: Path, chunks: Iterable[Buffer], spare: Path) -> int:
        assert disk_is_free.wait(DEADLINE)
        return written(path, chunks, spare=spare)

    monkeypatch.setattr(workers.storage.checkpoints, "write_atomically", slow)
    checkpoints.commit(1, Server(torch.ones(2)), (0,), ())  # returns at once

    def next_round() -> None:
        checkpoints.commit(2, Server(torch.ones(2)), (0,), ())
        second.set()

    thread = threading.Thread(target=next_round)
    thread.start()
    assert not second.wait(0.2)
    disk_is_free.set()
    assert second.wait(DEADLINE)
    thread.join(DEADLINE)
    checkpoints.close()


def test_an_error_of_the_writer_reaches_the_next_commit(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, chunks: Iterable[Buffer], spare: Path) -> int:
        raise DiskError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(workers.storage.checkpoints, "write_atomically", full)
    checkpoints.commit(1, Server(torch.ones(2)), (0,), ())
    with pytest.raises(DiskError, match="checkpoint: No space left"):
        checkpoints.commit(2, Server(torch.ones(2)), (0,), ())
    with pytest.raises(DiskError, match="No space left"):
        checkpoints.close()


def test_an_error_of_fsync_reaches_the_end(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(workers.storage.durability.os, "fsync", broken)
    checkpoints.commit(1, Server(torch.ones(2)), (0,), ())
    with pytest.raises(DiskError, match="Input/output error"):
        checkpoints.close()


@pytest.mark.parametrize("asked", [(0, 1), (0,)])
def test_spares_are_kept_while_all_take_part_and_are_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[int, ...]
) -> None:
    """Who takes part now and then would keep a file for a round of which nobody knows when it comes."""
    monkeypatch.setattr(atomic_files, "SPARE_BYTES", 0)
    monkeypatch.setattr(client_states, "SMALL_BYTES", 0)
    monkeypatch.setattr(durability, "SYNC_SECONDS", 0.0)
    states = ClientStates(tmp_path / "state", Server)
    kept = Checkpoints(tmp_path / "checkpoints", states)
    (tmp_path / "checkpoints").mkdir()
    seen, rename = set[str](), os.rename

    def watched(source: Path, target: Path) -> None:
        seen.add(str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    for number in range(1, 12):
        for k in asked:
            states.save(k, number, Server(torch.ones(number)))
        versions = tuple(number if k in asked else 0 for k in range(2))
        kept.commit(number, Server(torch.ones(2)), versions, asked)
    kept.close()
    spares = {states.folder / f"{k:06d}" / "spare" for k in asked}
    assert {Path(name) for name in seen if name.endswith("spare") and "state" in name} == (
        spares if len(asked) == 2 else set()
    )
    assert not list(tmp_path.rglob("spare"))
