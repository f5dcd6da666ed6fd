"""The files a run leaves (docs/references/bytes.md#files-of-a-run): a contract that other tools read."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO, get_type_hints

from fedsim import plugins
from fedsim.errors import DiskError, UsageError
from fedsim.wire.ledger import COLUMNS, Entry
from workers.coordinator import task_timeline
from workers.storage.atomic_files import RunLock
from workers.storage.durability import fsync
from workers.storage.metrics_file import metrics_lines
from workers.storage.recovery import Recovery

OWN_NAMES = frozenset(
    {"manifest.json", ".manifest.json", "summary.json", ".summary.json", "processes.json", ".processes.json"}
    | {"metrics.jsonl", "ledger.csv", "timeline.csv", "journal", "checkpoints", "state", "spool", "uploads"}
    | {"logs", "lock", "join.json", "revoked.json", "model.safetensors"}
)
"""What a run's folder holds."""


class RunDir:
    """Creates the folder and writes the contract's files; the lock is held until close().

    Raises:
        DiskError: if the disk cannot be read or written.
        UsageError: if an argument is wrong.
    """

    def __init__(self, path: Path, resumed: bool = False) -> None:
        """resumed: it is there already, and cut() follows."""
        self.path = path
        if path.exists() and not path.is_dir():
            raise UsageError(f"--out {path}: this is a file; name a folder")
        if path.exists() and any(path.iterdir()) and not resumed:
            self._remove_start_that_failed()
        self._created = [folder for folder in (path, *path.parents) if not folder.exists()]
        self.lock: RunLock | None = None
        self._files: list[TextIO] = []
        try:
            self._open("a" if resumed else "w")
        except UsageError:
            raise  # another process has it
        except BaseException:
            if not resumed:
                self.discard()
            raise
        self._rows = csv.writer(self._ledger, lineterminator="\n")
        self._spans = csv.writer(self._timeline, lineterminator="\n")
        if not resumed:
            self._begin()

    def _open(self, mode: Literal["a", "w"]) -> None:
        """Make the folders, take the lock and open the files.

        Raises:
            DiskError: if that cannot be done.
            UsageError: if another process carries this run out.
        """
        path = self.path
        try:
            for name in ("checkpoints", "state", "logs"):
                (path / name).mkdir(parents=True, exist_ok=True)
            for folder in self._created:
                fsync(folder.parent)
            self.lock = RunLock(path)
            self._metrics = self._opened("metrics.jsonl", mode, None)
            self._ledger = self._opened("ledger.csv", mode, "")
            self._timeline = self._opened("timeline.csv", mode, "")
        except OSError as e:
            raise DiskError(f"cannot make the run folder {path}: {e.strerror}") from None

    def _remove_start_that_failed(self) -> None:
        """Empty the folder if all that it holds is a run of which no round was committed.

        Raises:
            UsageError: if it holds something else, or if another process carries this run out.
        """
        path = self.path
        names = {entry.name for entry in path.iterdir()}
        if names - OWN_NAMES or not names & {"lock", "checkpoints"}:
            raise UsageError(f"--out {path}: the folder is not empty; choose another or remove it")
        lines = (path / "metrics.jsonl").read_bytes().count(b"\n") if "metrics.jsonl" in names else 0
        if "model.safetensors" in names or lines > 1 or any((path / "checkpoints").glob("[!.]*")):
            raise UsageError(
                f"--out {path}: this is a run; fedsim resume {path} goes on, or choose another folder"
            )
        lock = RunLock(path)
        _empty(path)
        lock.release()

    def discard(self) -> None:
        """Close the files and remove what this start has made: the run did not begin."""
        self.close()
        with suppress(OSError):
            _empty(self.path)
            for folder in self._created:
                folder.rmdir()

    def _opened(self, name: str, mode: Literal["a", "w"], newline: str | None) -> TextIO:
        file: TextIO = (self.path / name).open(mode, newline=newline)
        self._files.append(file)
        return file

    def _begin(self) -> None:
        self._rows.writerow(COLUMNS)
        self._spans.writerow(task_timeline.COLUMNS)

    def cut(self, recovery: Recovery) -> None:
        """Cut what comes after the last commit: it will be written again.

        Raises:
            DiskError: if the disk cannot be read or written.
        """
        lines = metrics_lines(self.path / "metrics.jsonl")
        kept = [end for line, end in lines if line["round"] <= recovery.round]
        try:
            self._metrics.truncate(max(kept, default=0))
            self._ledger.truncate(recovery.ledger_bytes)
            for path in (self.path / "checkpoints").glob("[0-9]*.checkpoint"):
                if int(path.stem) > recovery.round:  # one that could not be used
                    path.rename(path.with_suffix(".damaged"))
        except OSError as e:
            raise DiskError(f"cannot cut the files of {self.path}: {e.strerror}") from None
        if not recovery.ledger_bytes:
            self._rows.writerow(COLUMNS)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [line for line, _ in metrics_lines(self.path / "metrics.jsonl")]

    def ledger_rows(self) -> Iterator[Entry]:
        """Those in the file.

        Raises:
            DiskError: if the disk cannot be read or written.
        """
        types = get_type_hints(Entry)
        try:
            with (self.path / "ledger.csv").open(newline="") as file:
                rows = csv.reader(file)
                next(rows, None)
                for row in rows:
                    yield Entry(*(types[name](x) for name, x in zip(COLUMNS, row, strict=True)))
        except (OSError, ValueError) as e:
            raise DiskError(f"cannot read {self.path / 'ledger.csv'}: {e}") from None

    @staticmethod
    def default_path(algo: str, seed: int) -> Path:
        """runs/<time>-<algorithm>-<seed>, with a number behind it if that exists; mine-Mine of a user's."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{plugins.short(algo).replace(':', '-')}-{seed}"
        path, n = Path("runs") / stem, 1
        while path.exists():
            path, n = Path("runs") / f"{stem}-{n}", n + 1
        return path

    def write_json(self, name: str, value: Any, durable: bool = True) -> None:
        """durable: after a power cut it is whole, this one or the one before."""
        temporary = self.path / f".{name}"
        try:
            temporary.write_text(json.dumps(value, indent=1) + "\n")
            if durable:
                fsync(temporary)
            temporary.rename(self.path / name)
        except OSError as e:
            raise DiskError(f"cannot write {self.path / name}: {e.strerror}") from None

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as e:
            raise DiskError(f"cannot remove {self.path / name}: {e.strerror}") from None

    def write_processes(self, processes: list[Any]) -> None:
        self.write_json("processes.json", [asdict(p) for p in processes], durable=False)

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._append(self._metrics, lambda: self._metrics.write(json.dumps(metrics) + "\n"))

    def append_ledger(self, entries: list[Entry]) -> int:
        """Returns the file's length then, bytes."""
        self._append(self._ledger, lambda: self._rows.writerows(entries))
        return os.fstat(self._ledger.fileno()).st_size

    def append_timeline(self, spans: list[task_timeline.Span]) -> None:
        self._append(self._timeline, lambda: self._spans.writerows(spans))

    def _append(self, file: TextIO, write: Any) -> None:
        try:
            write()
            file.flush()
        except OSError as e:
            raise DiskError(f"cannot write {file.name}: {e.strerror}") from None

    def close(self) -> None:
        for file in self._files:
            with suppress(OSError):  # every line was flushed, or its failure reported, when it was written
                file.close()
        if self.lock is not None:
            self.lock.release()


def _empty(folder: Path) -> None:
    """Remove all that a folder holds."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
