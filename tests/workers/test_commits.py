"""What a crash may cost: one committed round; and disk errors are never lost."""

from __future__ import annotations

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
        assert disk_is_free.wait(30)
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
    assert second.wait(30)
    thread.join(30)
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
