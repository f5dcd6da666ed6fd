"""Whether a run's files are what they were: for every reader of a run folder.

A run that has ended has digests of its files in summary.json. Of a run that has not, the newest checkpoint
has digests of what they held when its round was committed. A run of an earlier fedsim has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from fedsim.errors import DataError, DiskError, UsageError, WireError
from launch.runs.manifest import NAME, StoredManifest, digest, json_of, lasting_digest
from workers.storage.atomic_files import disk_errors
from workers.storage.committed_files import read_committed_files
from workers.storage.growing_file import FileDigest

SUMMARY = "summary.json"


@dataclass(frozen=True)
class KnownFiles:
    """What is known of a run's growing files.

    Attributes:
        source: What says so, such as "summary.json".
        ended: The run has ended: the files are whole. Otherwise they may have more than is known.
        files: Their digests by name.
        experiment: The digest of the manifest's experiment, without its rounds if the run has not ended;
            '' if it is not known.
        run: The run's name; '' if it is not known.
    """

    source: str
    ended: bool
    files: Mapping[str, FileDigest]
    experiment: str = ""
    run: str = ""


def known_files(folder: Path) -> KnownFiles:
    """What summary.json says, or else the newest checkpoint that can be read.

    Of a run of an earlier fedsim, nothing is known.

    Raises:
        DataError: if summary.json is damaged.
    """
    if (folder / SUMMARY).is_file():
        return _summed_up(folder / SUMMARY)
    for path in sorted((folder / "checkpoints").glob("[0-9]*.checkpoint"), reverse=True):
        try:
            committed = read_committed_files(path)
        except (WireError, DiskError):  # damaged, of an earlier fedsim, or cleared away just now
            continue
        files = {file.name: file for file in committed.files}
        source = f"the checkpoint of round {committed.round}"
        return KnownFiles(source, False, files, committed.experiment, committed.run)
    return KnownFiles("", False, {})


def _summed_up(path: Path) -> KnownFiles:
    """Of a summary.json.

    Raises:
        DataError: if it is damaged.
    """
    summary = json_of(path)
    try:
        listed = msgspec.convert(summary.get("files", {}), dict[str, dict[str, int | str]])
        files = {name: msgspec.convert({**of, "name": name}, FileDigest) for name, of in listed.items()}
    except msgspec.ValidationError as e:
        raise DataError(f"{path} is damaged: files: {e}") from None
    return KnownFiles(SUMMARY, True, files, str(summary.get("experiment_sha256") or ""))


def checked_bytes(folder: Path, name: str, known: KnownFiles) -> bytes:
    """What one of a run's growing files holds, compared with what is known of it.

    Raises:
        UsageError: if there is no such file.
        DataError: if it was changed, naming it.
    """
    path = folder / name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is no run folder, or its run did not get so far: there is no {name}"
        ) from None
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from None
    was = known.files.get(name)
    if was is not None:
        _check_size(path, len(data), was, known)
        if sha256(memoryview(data)[: was.bytes]).hexdigest() != was.sha256:
            raise DataError(_other_rows(path, was, known))
    return data


def check_file(folder: Path, name: str, known: KnownFiles) -> None:
    """Compare one of a run's growing files with what is known of it, a block at a time.

    A file that is not there is no fault.

    Raises:
        DataError: if it was changed, naming it.
        DiskError: if it cannot be read.
    """
    path, was = folder / name, known.files.get(name)
    if was is None or not path.exists():
        return
    with disk_errors(f"cannot read {path}"):
        _check_size(path, path.stat().st_size, was, known)
    if not was.matches(path):
        raise DataError(_other_rows(path, was, known))


def _check_size(path: Path, size: int, was: FileDigest, known: KnownFiles) -> None:
    if size < was.bytes or (known.ended and size > was.bytes):
        raise DataError(
            f"{path} was changed: it has {size:,} bytes; {known.source} says {was.bytes:,} "
            f"({was.rows:,} rows)"
        )


def _other_rows(path: Path, was: FileDigest, known: KnownFiles) -> str:
    return f"{path} was changed: its {was.rows:,} rows are not those that {known.source} has the sha256 of"


def check_experiment(opened: StoredManifest, known: KnownFiles) -> None:
    """Compare the manifest's experiment with what is known of it.

    Raises:
        DataError: if it is another one.
    """
    here = digest(opened.described) if known.ended else lasting_digest(opened.described)
    if known.experiment not in ("", here):
        raise DataError(
            f"{opened.folder / NAME} was changed: {known.source} has the sha256 of another experiment"
        )
    named = opened.content.get("run")
    if known.run not in ("", named):
        raise DataError(
            f"{opened.folder / NAME} is of run {named}, {known.source} of run {known.run}: put this run's "
            "own file back"
        )


def check_files(opened: StoredManifest, known: KnownFiles) -> None:
    """Check all that is known; a file that is not there is no fault, for there is nothing to read.

    Raises:
        DataError: if a file was changed, naming it.
    """
    check_experiment(opened, known)
    for name in known.files:
        if (opened.folder / name).exists():
            checked_bytes(opened.folder, name, known)
