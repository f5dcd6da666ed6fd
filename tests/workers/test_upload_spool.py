"""Uploads before their turn: the same frames come out, whether they waited in memory or on disk."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from fedsim.errors import DiskError, WireError
from fedsim.wire.envelope import VERSION, Envelope, Header, encode, pack, unpack
from fedsim.wire.schema import Mean, Precision, Scalar
from workers.storage.spill_file import Region, SpillFile
from workers.storage.upload_spool import Spool


@dataclass(frozen=True)
class Up:
    mean: Mean
    precision: Precision
    loss: Scalar


def upload(client: int, p: int = 50) -> Envelope:
    draws = torch.Generator().manual_seed(client)
    up = Up(torch.randn(p, generator=draws), torch.rand(p, generator=draws) + 0.1, float(client))
    payload = encode(up, {"precision": "bf16"}, {"P": p})
    return pack(Header(VERSION, "upload", "r", 1, 1, 1, client, fields=payload.fields), payload.frames)


def frames(envelope: Envelope) -> list[bytes]:
    return [envelope.head, *(bytes(memoryview(f)) for f in envelope.frames)]


def on_disk(spool: Spool) -> list[int]:
    """The clients whose uploads are on the disk; nothing has a name there."""
    assert not spool.folder.exists() or not any(spool.folder.iterdir())
    return sorted(spool._spilled)


SIZE = upload(0).total_bytes()


def full(folder: Path) -> Spool:
    """A spool without room: what is put next goes to the disk, for one upload (client 99) is in memory."""
    spool = Spool(folder, 0)
    spool.put(99, upload(99, 1))
    assert on_disk(spool) == []
    return spool


@pytest.mark.parametrize("room", [0, SIZE - 1, SIZE, 2 * SIZE + 1, 100 * SIZE])
def test_frames_come_back_identical_whatever_the_bound(tmp_path: Path, room: int) -> None:
    spool = Spool(tmp_path / "spool", room)
    clients = list(range(6))
    for k in clients:
        spool.put(k, upload(k))
    in_memory = min(max(room // SIZE, 1), len(clients))
    assert len(on_disk(spool)) == len(clients) - in_memory
    random.Random(1).shuffle(clients)
    for k in clients:
        envelope = spool.take(k)[0]
        assert frames(envelope) == frames(upload(k))
        assert envelope.sizes == upload(k).sizes
        unpack(frames(envelope), "spool")
    assert on_disk(spool) == []
    assert spool.room == room


def test_one_upload_stays_in_memory_however_large_and_only_one(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", SIZE - 1)
    spool.put(0, upload(0))
    assert on_disk(spool) == [] and spool.room == -1
    spool.put(1, upload(1, 1))
    assert on_disk(spool) == [1]
    spool.take(0)
    assert spool.room == SIZE - 1
    spool.put(2, upload(2))
    assert on_disk(spool) == [1]


def test_nothing_touches_the_disk_below_the_bound(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.put(3, upload(3))
    assert not (tmp_path / "spool").exists()
    assert spool.take(3)[0].frames == upload(3).frames


def test_empty_frames_and_letters_without_fields_survive(tmp_path: Path) -> None:
    spool = full(tmp_path / "spool")
    bare = pack(Header(VERSION, "upload", "r"))
    spool.put(0, bare)
    spool.put(1, upload(1, 0))
    assert len(on_disk(spool)) == 2
    assert frames(spool.take(0)[0]) == frames(bare)
    assert frames(spool.take(1)[0]) == frames(upload(1, 0))


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_bytes_damaged_on_the_disk_are_noticed(tmp_path: Path, damage: str) -> None:
    spool = full(tmp_path / "spool")
    spool.put(7, upload(7))
    assert spool._file is not None
    file = spool._file._file
    if damage == "truncated":
        os.ftruncate(file, os.fstat(file).st_size - 1)
        with pytest.raises(DiskError, match="cut off"):
            spool.take(7)
    else:
        os.pwrite(file, bytes([os.pread(file, 1, 10)[0] ^ 1]), 10)
        with pytest.raises(WireError, match=r"spooled upload of client 7, .*spool: field "):
            spool.take(7)


def test_what_an_earlier_version_has_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    (folder / "000003.upload").write_bytes(b"whole")
    (folder / ".000004.upload.17").write_bytes(b"half")
    Spool(folder, 0)
    assert not any(folder.iterdir())


def test_space_on_the_disk_is_used_again(tmp_path: Path) -> None:
    """Fresh pages of the page cache cost more than what is written into them."""
    spool = full(tmp_path / "spool")
    for r in range(5):
        for k in range(3):
            spool.put(k, upload(k, 50 + r % 2))
        for k in range(3):
            assert frames(spool.take(k)[0]) == frames(upload(k, 50 + r % 2))
    assert spool._file is not None
    most = sum(part.nbytes for f in upload(0, 51).header.fields for part in f.parts)
    assert os.fstat(spool._file._file).st_size <= 3 * most


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_regions_do_not_overlap_and_free_ones_are_merged(steps: list[tuple[bool, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, held = SpillFile(Path(folder)), dict[Region, bytes]()
        for gives_back, n in steps:
            if gives_back and held:
                region = sorted(held)[n % len(held)]
                assert bytes(file.read(region)) == held.pop(region)
                file.free(region)
            elif n:
                region, data = file.reserve(n), os.urandom(n)
                file.write(region, [data[: n // 2], data[n // 2 :]])
                held[region] = data
        taken = sorted([*held, *file._free])
        assert all(a.end == b.begin for a, b in itertools.pairwise(taken))
        assert sum(r.size for r in taken) == file._end
        for region, data in held.items():
            assert bytes(file.read(region)) == data
            file.free(region)
        assert file._free == ([Region(0, file._end)] if file._end else [])


@pytest.mark.parametrize("on_file", [False, True])
def test_a_discarded_upload_leaves_neither_file_nor_memory(tmp_path: Path, on_file: bool) -> None:
    spool = full(tmp_path / "spool") if on_file else Spool(tmp_path / "spool")
    room = spool.room
    spool.put(3, upload(3))
    assert on_disk(spool) == ([3] if on_file else [])
    spool.discard(3)
    spool.discard(5)  # it has sent none
    assert on_disk(spool) == [] and spool.room == room
    with pytest.raises(KeyError):
        spool.take(3)
