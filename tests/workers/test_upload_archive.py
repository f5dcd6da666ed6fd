"""The message trace: an envelope comes back from its file as it was, or it is said that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.errors import DataError, WireError
from fedsim.wire.envelope import VERSION, Envelope, Header, pack
from tests.workers.test_upload_spool import frames, upload
from workers.storage.upload_archive import keep_upload, read_upload, upload_path
from workers.storage.upload_spool import Spool


@pytest.mark.parametrize(
    "envelope", [upload(1), upload(2, 0), pack(Header(VERSION, "upload", "r", 1, 1, 1, 3))]
)
def test_a_letter_comes_back(envelope: Envelope, tmp_path: Path) -> None:
    keep_upload(tmp_path, envelope)
    h = envelope.header
    path = upload_path(tmp_path, h.round, h.exchange, h.client)
    assert path.name == f"1-{h.client:06d}.envelope" and path.parent.name == "000001"
    back = read_upload(path, "upload")
    assert frames(back) == frames(envelope) and back.header == h


def test_every_truncation_and_every_bit_is_noticed(tmp_path: Path) -> None:
    keep_upload(tmp_path, upload(4, 3))
    path = upload_path(tmp_path, 1, 1, 4)
    data = path.read_bytes()
    for n in range(len(data)):
        flipped = bytearray(data)
        flipped[n] ^= 1 << n % 8
        for damaged in (data[:n], bytes(flipped)):
            path.write_bytes(damaged)
            with pytest.raises(WireError, match=r"upload, .*1-000004\.envelope: "):
                read_upload(path, "upload")
    path.write_bytes(data + b"x")
    with pytest.raises(WireError, match="bytes where"):
        read_upload(path, "upload")
    path.unlink()
    with pytest.raises(DataError, match="not kept"):
        read_upload(path, "upload")


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_a_spool_keeps_what_it_is_given_and_leaves_no_other_file(room: int, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", room, keep=tmp_path / "uploads")
    for _ in range(2):  # a task that is computed again is written again
        spool.put(1, upload(1))
        assert frames(spool.take(1)[0]) == frames(upload(1))
    assert [p.name for p in (tmp_path / "uploads").rglob("*") if p.is_file()] == ["1-000001.envelope"]
    assert frames(read_upload(upload_path(tmp_path / "uploads", 1, 1, 1), "upload")) == frames(upload(1))
