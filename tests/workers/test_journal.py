"""The journal keeps whole records only, whatever happens to its tail."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from workers.storage.journal import Journal, _records, read_journal

fixed = settings(deadline=None, derandomize=True, database=None, max_examples=100)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / "journal")
    for r in range(1, 6):
        journal.append("open", round=r, participants=list(range(r)))
    journal.close()
    return tmp_path / "journal"


def test_records_come_back_in_order(written: Path) -> None:
    assert read_journal(written) == [
        {"what": "open", "round": r, "participants": list(range(r))} for r in range(1, 6)
    ]


def test_a_torn_tail_is_cut_at_every_length(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    torn = tmp_path / "torn"
    for size in range(len(data)):
        torn.write_bytes(data[:size])
        whole = read_journal(torn)
        assert [r["round"] for r in whole] == list(range(1, len(whole) + 1))
        journal = Journal(torn)
        journal.append("resume", after=len(whole))
        journal.close()
        assert read_journal(torn) == [*whole, {"what": "resume", "after": len(whole)}]


@pytest.mark.parametrize("flip", [0x01, 0x40, 0xFF])
def test_a_flipped_byte_costs_its_record_and_no_other(written: Path, flip: int) -> None:
    """Also after the journal was opened and written to again."""
    data, sound = bytearray(written.read_bytes()), read_journal(written)
    for at in range(len(data)):
        data[at] ^= flip
        written.write_bytes(data)
        whole = read_journal(written)
        assert len(whole) == 4
        assert [r for r in sound if r in whole] == whole
        journal = Journal(written)
        journal.append("resume")
        journal.close()
        assert read_journal(written) == [*whole, {"what": "resume"}]
        data[at] ^= flip


@fixed
@given(st.binary(max_size=200), st.integers(0, 5))
def test_rubbish_between_records_is_skipped(rubbish: bytes, before: int) -> None:
    records = [record(r) for r in range(5)]
    data = b"".join([*records[:before], rubbish, *records[before:]])
    assert [r["round"] for r, _ in _records(data)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        b"\x01",
        b"\x91" * 5000,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a",
        b"\x81\x01\x02",
        b"\x81\xa1\xff\x01",
        b"\x81\xa4what\x91\x01",  # {"what": [1]}
    ],
)
def test_what_is_no_record_under_a_right_checksum_is_skipped(payload: bytes) -> None:
    assert [r["round"] for r, _ in _records(record(1) + packed_envelope(payload) + record(2))] == [1, 2]


def test_a_file_of_zeros_after_a_power_cut_has_no_record() -> None:
    assert list(_records(record(1) + bytes(1 << 16))) == [({"what": "commit", "round": 1}, len(record(1)))]


def packed_envelope(payload: bytes) -> bytes:
    return struct.pack(">IQ", len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def record(round: int) -> bytes:
    return packed_envelope(msgspec.msgpack.encode({"what": "commit", "round": round}))
