"""A checkpoint's digests of the run's other files, read without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedsim.errors import WireError
from fedsim.foreign_files import read
from fedsim.wire.state_header import state_header
from workers.storage.atomic_files import disk_errors
from workers.storage.growing_file import FileDigest


@dataclass(frozen=True)
class CommittedFiles:
    """A checkpoint's digests of the run's other files; see workers.storage.checkpoints.Checkpoint."""

    round: int
    files: tuple[FileDigest, ...]
    experiment: str
    run: str


def read_committed_files(path: Path) -> CommittedFiles:
    """Read the digests of the run's other files from a checkpoint of any algorithm.

    Raises:
        WireError: if the file is damaged, or is no checkpoint.
        DiskError: if the file cannot be read.
    """
    owner = f"checkpoint {path}"
    header = state_header(checkpoint_bytes(path), owner)
    try:
        return msgspec.convert(header, CommittedFiles)
    except msgspec.ValidationError:
        raise WireError(f"{owner}: it has no digests of the run's files") from None


def checkpoint_bytes(path: Path) -> bytes:
    """Read the file of a checkpoint."""
    with disk_errors(f"checkpoint {path}"):
        return read(path)
