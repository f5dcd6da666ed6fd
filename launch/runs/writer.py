"""The files that a run writes (docs/references/bytes.md#files-of-a-run), on which other tools rely."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim import plugins
from fedsim.errors import UsageError
from fedsim.experiment import Experiment
from fedsim.wire.ledger_rows import COLUMNS, TREE_COLUMNS, Entry
from launch.configuration.execution import Execution
from launch.runs.folder import folder_name
from launch.runs.growing import rows_of
from workers.coordinator import task_timeline
from workers.storage.atomic_files import MARK, RunLock, disk_errors, patiently
from workers.storage.durability import fsync
from workers.storage.growing_file import LEDGER, METRICS, TIMELINE, FileDigest, GrowingFile
from workers.storage.metrics_file import metrics_lines

if TYPE_CHECKING:
    from workers.storage.recovery import Recovery

WRITTEN = re.compile(
    r"""\.?(manifest|processes|summary)\.json | (metrics\.jsonl|ledger\.csv|timeline\.csv|journal|lock)
    | (join|join-here|revoked)\.json | frozen | start | spool(/[^/]+)? | tracking(/.+)?
    | checkpoints | state(/\d+)?(/\d+\.state)? | logs | logs/(worker|track)-\w+\.log""",
    re.VERBOSE,
)
"""The files and folders, by their paths in the run folder, of a run without a committed round."""


class RunDir:
    """A run folder that this process writes and locks. close() releases the lock."""

    def __init__(self, path: Path, resumed: bool = False, hops: bool = False) -> None:
        """Make the folder, or open it if `resumed`; then cut() must follow. `hops` adds the column hop."""
        self.path, self._columns = path, TREE_COLUMNS if hops else COLUMNS
        if path.exists() and not path.is_dir():
            raise UsageError(f"--out {path}: this is a file; name a folder")
        if path.exists() and any(path.iterdir()) and not resumed:
            self._remove_start_that_failed()
        self._created = [folder for folder in (path, *path.parents) if not folder.exists()]
        self.lock: RunLock | None = None
        self._files: list[GrowingFile] = []
        try:
            self._open()
            for file in self._files if not resumed else ():
                file.begin()
        except UsageError:
            raise  # another process has locked the folder
        except BaseException:
            if not resumed:
                self.discard()
            raise

    def _open(self) -> None:
        """Make the folders, take the lock and open the files."""
        path = self.path
        with disk_errors(f"cannot make the run folder {path}"):
            for name in ("checkpoints", "state", "logs"):
                (path / name).mkdir(parents=True, exist_ok=True)
            for folder in self._created:
                fsync(folder.parent)
            self.lock = RunLock(path)
        self._ledger = self._opened(LEDGER, _csv([self._columns]))
        self._metrics = self._opened(METRICS)
        self._timeline = self._opened(TIMELINE, _csv([task_timeline.COLUMNS]))

    def _opened(self, name: str, header: bytes = b"") -> GrowingFile:
        file = GrowingFile(self.path / name, header)
        self._files.append(file)
        return file

    def _remove_start_that_failed(self) -> None:
        """Empty the folder if it has only files of a start that was killed before its first round.

        Such a folder has a lock that fedsim has marked as its own. Nothing is removed if one path is foreign.
        """
        path = self.path
        entries = {entry.relative_to(path): entry for entry in path.rglob("*")}
        lock = path / "lock"
        marked = lock.is_file() and not lock.is_symlink() and lock.read_bytes().startswith(MARK)
        foreign = [str(name) for name, entry in entries.items() if entry.is_symlink() or not _ours(name)]
        model = Path("model.safetensors") in entries
        if model or any(name.suffix == ".checkpoint" for name in entries) or _rounds(path / METRICS) > 1:
            raise UsageError(
                f"--out {path}: this is a run; fedsim resume {path} continues it, or choose another folder"
            )
        if not marked or foreign:
            first = f" (it has {min(foreign)})" if foreign else ""
            raise UsageError(f"--out {path}: the folder is not empty{first}; choose another or remove it")
        held = RunLock(path)
        _empty(path)
        held.release()

    def discard(self) -> None:
        """Close the files, and remove everything that this start has made, because the run did not begin."""
        self.close()
        with suppress(OSError):
            _empty(self.path)
            for folder in self._created:
                folder.rmdir()

    @property
    def digests(self) -> tuple[FileDigest, ...]:
        """The current digests of ledger.csv, metrics.jsonl and timeline.csv."""
        return tuple(file.digest for file in self._files)

    def cut(self, recovery: Recovery) -> None:
        """Truncate the files at the last commit; the rest will be written again."""
        for file in self._files:
            now = file.path.stat().st_size if file.path.exists() else 0
            file.cut(recovery.ends.get(file.path.name, now))
        with disk_errors(f"cannot cut the files of {self.path}"):
            for path in (self.path / "checkpoints").glob("[0-9]*.checkpoint"):
                if int(path.stem) > recovery.round:  # recovery could not use it
                    path.rename(path.with_suffix(".damaged"))

    def metrics(self) -> list[dict[str, Any]]:
        return [line for line, _ in metrics_lines(self.path / "metrics.jsonl")]

    def ledger_rows(self) -> Iterator[Entry]:
        return rows_of(self.path / LEDGER, Entry)

    @staticmethod
    def path_of(experiment: Experiment, execution: Execution) -> Path:
        """Return --out, or RUNS/<time>-<algorithm>-<seed>, with a number if that exists."""
        if execution.out:
            return Path(execution.out)
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{plugins.short(experiment.algo)}-{experiment.seed}"
        first = path = Path(execution.runs) / folder_name(name)
        n = 1
        while path.exists():
            path, n = Path(f"{first}-{n}"), n + 1
        return path

    def write_json(self, name: str, value: Any, durable: bool = True) -> None:
        """Write a JSON file. If `durable`, the old or the new file is complete after a power cut."""
        temporary = self.path / f".{name}"
        with disk_errors(f"cannot write {self.path / name}"):
            temporary.unlink(missing_ok=True)  # which may be a link
            patiently(lambda: temporary.write_text(json.dumps(value, indent=1) + "\n"))
            if durable:
                fsync(temporary)
            temporary.rename(self.path / name)

    def remove_summary(self) -> None:
        """Remove an earlier start's summary, because the run continues and its files change."""
        with disk_errors(self.path / "summary.json"):
            (self.path / "summary.json").unlink(missing_ok=True)
            fsync(self.path)

    def write_processes(self, processes: list[Any]) -> None:
        self.write_json("processes.json", [asdict(p) for p in processes], durable=False)

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._metrics.append(json.dumps(metrics).encode() + b"\n", rows=1)

    def append_ledger(self, entries: list[Entry]) -> None:
        rows = [entry[: len(self._columns)] for entry in entries]
        self._ledger.append(_csv(rows), rows=len(rows))

    def append_timeline(self, spans: list[task_timeline.Span]) -> None:
        self._timeline.append(_csv(spans), rows=len(spans))

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self.lock is not None:
            self.lock.release()


def _ours(name: Path) -> bool:
    return WRITTEN.fullmatch(name.as_posix()) is not None


def _rounds(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def _empty(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
