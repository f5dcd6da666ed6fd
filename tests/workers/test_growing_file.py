"""Files that only grow: their digest is that of what they hold, whatever happens to a write."""

from __future__ import annotations

import errno
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedsim.errors import DiskError
from workers.storage.growing_file import FileDigest, GrowingFile


def digest_of(path: Path, rows: int) -> FileDigest:
    data = path.read_bytes()
    return FileDigest(path.name, len(data), rows, sha256(data).hexdigest())


@pytest.fixture
def file(tmp_path: Path) -> GrowingFile:
    created = GrowingFile(tmp_path / "rows.csv", b"a,b\n")
    created.begin()
    created.append(b"1,2\n3,4\n", rows=2)
    return created


def test_nothing_is_touched_before_it_begins(tmp_path: Path) -> None:
    GrowingFile(tmp_path / "rows.csv").close()
    assert not (tmp_path / "rows.csv").exists()


def test_the_digest_is_that_of_the_file(file: GrowingFile) -> None:
    assert file.digest == digest_of(file.path, 2)
    before = file.digest
    file.append(b"5,6\n", rows=1)
    file.close()
    assert file.digest == digest_of(file.path, 3)
    assert before.matches(file.path) and file.digest.matches(file.path)


def test_another_start_goes_on_with_a_part_of_it(file: GrowingFile) -> None:
    part = file.digest
    file.append(b"5,6\n", rows=1)
    file.close()
    again = GrowingFile(file.path, file.header)
    again.cut(part.bytes)
    assert again.digest == part
    again.append(b"7,8\n", rows=1)
    assert again.digest == digest_of(file.path, 3) and file.path.read_bytes().endswith(b"3,4\n7,8\n")
    again.cut(0)
    assert file.path.read_bytes() == b"a,b\n" and again.digest.rows == 0
    again.close()


@pytest.mark.parametrize("written", [0, 2])
def test_a_row_that_the_disk_does_not_take_leaves_nothing(
    written: int, file: GrowingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real, calls = file.digest, os.write, iter([written, 0])

    def full(handle: int, data: Any) -> int:
        size = next(calls)
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data[:size])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskError, match=r"cannot write .*rows\.csv: No space left"):
        file.append(b"5,6\n", rows=1)
    assert file.digest == before == digest_of(file.path, 2)


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: b"", lambda d: d.replace(b"1", b"2"), lambda d: d[1:] + d[:1]]
)
def test_another_beginning_does_not_match(change: Any, file: GrowingFile) -> None:
    known, path = file.digest, file.path
    assert known.matches(path)
    path.write_bytes(change(path.read_bytes()))
    assert not known.matches(path)
    path.unlink()
    assert not known.matches(path)
