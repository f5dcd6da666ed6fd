"""The journal keeps whole records only, whatever happens to its tail."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.journal import Journal, read_journal


@pytest.fixture
def written(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / "journal")
    for r in range(1, 6):
        journal.append("commit", round=r, folded=list(range(r)))
    journal.close()
    return tmp_path / "journal"


def test_records_come_back_in_order(written: Path) -> None:
    assert read_journal(written) == [
        {"what": "commit", "round": r, "folded": list(range(r))} for r in range(1, 6)
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


def test_a_flipped_byte_ends_the_journal_there(written: Path) -> None:
    data = bytearray(written.read_bytes())
    for at in range(len(data)):
        data[at] ^= 0x40
        written.write_bytes(data)
        whole = read_journal(written)
        assert len(whole) < 5
        assert [r["round"] for r in whole] == list(range(1, len(whole) + 1))
        data[at] ^= 0x40
