"""Reading of run folders. Only this module knows the files of a run and how they belong together.

Files are read when they are needed, and compared with the digests that the run has recorded. The digests of a
run that has ended are in summary.json. Otherwise, the newest checkpoint has the digests of the files at the
commit of its round.

Importing this module imports neither torch nor pandas.
"""

from __future__ import annotations

import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedsim import plugins
from fedsim.errors import DataError, DiskError, MismatchError, UsageError, WireError
from fedsim.experiment import Experiment, convert
from fedsim.foreign_files import DOCUMENT, checked, json_value, opened, read
from fedsim.wire.ledger_rows import Entry
from launch.configuration.target_accuracy import TargetAccuracy
from launch.runs.documents import CURE, EXPERIMENT, LARGEST, Manifest, Other, Summary
from launch.runs.growing import rows_of
from launch.runs.manifest import ALWAYS, FORMAT, MANIFEST, WIRE, digest, lasting_digest
from launch.runs.tables import every_round, ledger_frame, metrics_frame, metrics_table
from workers.coordinator.task_timeline import Span
from workers.storage.atomic_files import disk_errors, is_locked
from workers.storage.committed_files import read_committed_files
from workers.storage.growing_file import JOURNAL, LEDGER, METRICS, TIMELINE, FileDigest
from workers.storage.journal import read_journal
from workers.storage.metrics_file import OPTIONAL_SCORES, line_of

if TYPE_CHECKING:
    import pandas

NOT_RECORDED = "training steps are not recorded: "
"""The text that precedes the reason in a worker's log (fedsim.learning.recordings)."""
SUMMARY, PROCESSES, MODEL = "summary.json", "processes.json", "model.safetensors"
RUNNING, DONE, INTERRUPTED, FAILED, KILLED = "running", "done", "interrupted", "failed", "killed"
DAMAGED, MISSING = "damaged", "missing"


@dataclass(frozen=True)
class KnownFiles:
    """A run's record of the digests of its growing files.

    Attributes:
        source: The place of the record, such as "summary.json".
        ended: True if the run has ended. Otherwise, the files may have more rows than recorded.
        files: The digests by file name.
        experiment: The experiment's manifest.digest, or its lasting_digest if not `ended`; '' if unknown.
        run: The run's name; '' if unknown.
    """

    source: str
    ended: bool
    files: Mapping[str, FileDigest]
    experiment: str = ""
    run: str = ""


@dataclass(frozen=True)
class RunFolder:
    """The run folder `path`; fedsim.Run adds methods for notebooks.
    A file is read once, when it is first needed. Open the folder again to see later additions."""

    path: Path

    @classmethod
    def open(cls, path: str | Path, begun: bool = True) -> Self:
        """Open a run folder; raise the errors of `manifest`, and UsageError if it should have `begun`."""
        run = cls(Path(path))
        if begun and not run.begun:
            again = "try again soon" if run.status == RUNNING else f"fedsim resume {path} starts it again"
            raise UsageError(f"{path}: the run has not begun; {again}")
        return run

    @property
    def begun(self) -> bool:
        """Whether the start of the run has come as far as its model; before, P and the data are unknown."""
        return "params" in self.experiment

    # ---- the small files

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """The content of manifest.json: the experiment, and how and where it was run.

        Raises:
            UsageError: if there is no run folder with this manifest format.
            MismatchError: if a version of fedsim with another wire format started the run.
            DataError: if the manifest is damaged.
        """
        path = self.path / MANIFEST
        content = document(path, Any, f"{self.path} is not a run folder: there is no {path}")
        if content.get("format") != FORMAT:
            other = content.get("format")
            raise UsageError(f"{path} has format {other!r}; this version of fedsim reads format {FORMAT}")
        with damage(path):
            checked(content, Manifest)
        if (wire := content.get("wire", 1)) != WIRE:
            version = content.get("versions", {}).get("fedsim", "of another version")
            raise MismatchError(
                f"{self.path} was started by fedsim {version} with wire format {wire}; this version of "
                f"fedsim uses {WIRE}. Finish it with the version that started it, or start anew"
            )
        experiment = content.get("experiment", {})
        with damage(path):
            if missing := [key for key in ALWAYS if key not in experiment]:
                raise ValueError(f"the experiment has no {missing[0]}")
            for key, value in experiment.items():
                checked(value, EXPERIMENT.get(key, Other), key)
            length = sum(len(str(item)) for item in experiment.items() if not isinstance(item[1], list))
            if length > LARGEST:
                raise ValueError(f"its settings have {length:,} characters; at most {LARGEST:,} are shown")
        recorded = content.get("experiment_sha256")
        if recorded and recorded != digest(content["experiment"]):
            raise DataError(f"{path} was changed: its experiment_sha256 does not match its experiment")
        return content

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The manifest's experiment, with defaults resolved and entries about the data and the algorithm."""
        experiment: Mapping[str, Any] = self.manifest["experiment"]
        return experiment

    def to_experiment(self) -> Experiment:
        """Return the experiment as an object that can be run again.

        Raises:
            UsageError: if this version of fedsim cannot run it.
        """
        known = {f.name for f in fields(Experiment)}
        described = {k: v for k, v in self.experiment.items() if k in known}
        return convert(Experiment, described, f"the experiment of {self.path / MANIFEST}")

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """The start and all resumes of the run, oldest first."""
        return [self.manifest, *self.manifest.get("resumes", [])]

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The content of summary.json, written when the run ends; empty before, and if the run was killed."""
        return document(self.path / SUMMARY, Summary) if self.has(SUMMARY) else {}

    @property
    def status(self) -> str:
        """The state of the run, from its lock and its summary. The kernel releases a lock with its process.

        It is running, done, interrupted (by a signal), failed (with an error), killed (the coordinator ended
        without a summary), damaged (the manifest or summary cannot be read), or missing (there is no folder).
        The lock cannot be seen from other machines. A run that was last started on another machine therefore
        counts as running until it has a summary.
        """
        if is_locked(self.path):
            return RUNNING
        try:
            if status := document_or_empty(self.path / SUMMARY, Summary).get("status"):
                return str(status)
            _ = self.summary
            _ = self.manifest
        except (UsageError, DataError, MismatchError):
            return DAMAGED if self.path.is_dir() else MISSING
        return RUNNING if self._elsewhere() else KILLED

    def _elsewhere(self) -> bool:
        """Return True if the coordinator is known to have been last started on another machine."""
        nodes = [row.get("node") for row in self.processes if row.get("role") == "coordinator"]
        return bool(nodes and nodes[-1] and nodes[-1] != platform.node())

    @property
    def not_recorded(self) -> list[str]:
        """The distinct reasons in this machine's logs why workers on GPUs recorded no training steps."""
        lines: list[str] = []
        for log in sorted((self.path / "logs").glob("worker-*.log")):
            with suppress(OSError):
                lines += read(log, DOCUMENT).decode(errors="replace").splitlines()
        reasons = (line.removeprefix(NOT_RECORDED) for line in lines if line.startswith(NOT_RECORDED))
        return list(dict.fromkeys(reasons))

    @property
    def processes(self) -> list[dict[str, Any]]:
        """The rows of processes.json; empty if it cannot be read, because nothing depends on it."""
        with suppress(OSError, ValueError):
            rows = json_value(read(self.path / PROCESSES, DOCUMENT))
            return list(checked(rows, list[dict[str, str | int | None]]))
        return []

    @property
    def params(self) -> int:
        """The number of parameters P."""
        return int(self.experiment["params"])

    @property
    def clients(self) -> int:
        """The number of clients that have data: K, or 1 for a centralised run."""
        return len(self.experiment.get("client_sizes") or ()) or int(self.experiment["clients"])

    @property
    def label(self) -> str:
        """The algorithm, with its codecs if it has any; users' files without their folders."""
        codecs = self.experiment.get("codecs") or {}
        selected = ", ".join(f"{field} {plugins.short(codec)}" for field, codec in codecs.items())
        return plugins.short(self.experiment["algo"]) + (f" ({selected})" if selected else "")

    @property
    def drift(self) -> tuple[str, ...]:
        """Workers and starts that may have computed different bits (--allow-drift)."""
        return tuple(self.manifest.get("drift", ()))

    # ---- rounds

    @property
    def commits(self) -> dict[int, Mapping[str, Any]]:
        """The journal's entries of committed rounds, by round.

        A round is committed once the journal has its entry, which is written after its rows. Rows of
        later rounds are those of an interrupted round, which a resume computes again.
        """
        journal = self.path / JOURNAL
        records = read_journal(journal) if self.has(JOURNAL) else []
        return {r["round"]: r["about"] for r in records if r["what"] == "commit"}

    @property
    def last_round(self) -> int | None:
        """The last round whose rows in ledger.csv and timeline.csv count; None if all rows count.
        All rows of a run that has ended count, because it has no rows of an unfinished round."""
        if self.has(SUMMARY) or not self.has(JOURNAL):
            return None
        return max(self.commits, default=-1)

    # ---- the growing files, compared with their digests

    def has(self, name: str) -> bool:
        """Return True if there is something of this name; a run that ended early lacks some files."""
        return lexists(self.path / name)

    def file(self, name: str) -> Path:
        """Return the path of a regular file of the run; raise UsageError if it cannot be read."""
        path = self.path / name
        try:
            opened(path).close()
        except FileNotFoundError:
            raise UsageError(
                f"{self.path} is not a run folder, or its run ended before it wrote {name}: there is "
                "no such file"
            ) from None
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}") from None
        return path

    @cached_property
    def known(self) -> KnownFiles:
        """The record of the growing files, from summary.json or else from the newest readable checkpoint."""
        if self.has(SUMMARY):
            return _known_by_summary(self.path / SUMMARY)
        for path in sorted((self.path / "checkpoints").glob("[0-9]*.checkpoint"), reverse=True):
            try:
                committed = read_committed_files(path)
            except (WireError, DiskError):  # damaged or just deleted
                continue
            files = {file.name: file for file in committed.files}
            source = f"the checkpoint of round {committed.round}"
            return KnownFiles(source, False, files, committed.experiment, committed.run)
        return KnownFiles("", False, {})

    def checked(self) -> Self:
        """Return the run. Raise DataError if the experiment or a growing file differs from its record."""
        self.check_experiment()
        for name in self.known.files:
            if self.has(name):
                self.checked_bytes(name)
        return self

    def check_experiment(self) -> None:
        """Compare the manifest's experiment with its record; raise DataError if they differ."""
        known, path = self.known, self.path / MANIFEST
        here = digest(self.experiment) if known.ended else lasting_digest(self.experiment)
        if known.experiment not in ("", here):
            raise DataError(f"{path} was changed: {known.source} has the sha256 of another experiment")
        named = self.manifest.get("run")
        if known.run not in ("", named):
            raise DataError(
                f"{path} belongs to run {named}, but {known.source} to run {known.run}: restore the original"
            )

    def checked_bytes(self, name: str) -> bytes:
        """Return a growing file's content; raise UsageError if it is missing, DataError if it was changed."""
        path, was = self.file(name), self.known.files.get(name)
        try:
            if was is not None:
                self._check_size(path, path.stat().st_size, was)
            data = read(path)
        except OSError as e:
            raise UsageError(f"{path}: {e.strerror}") from None
        if was is not None and sha256(memoryview(data)[: was.bytes]).hexdigest() != was.sha256:
            raise DataError(self._other_rows(path, was))
        return data

    def check_files(self, *names: str) -> None:
        """Compare growing files, which may be large, with their record, like checked_bytes but in blocks."""
        self.check_experiment()
        for name in names:
            path, was = self.path / name, self.known.files.get(name)
            if not self.has(name):
                raise UsageError(
                    f"{self.path} has no {name}: its run ended before it wrote this file, or it was removed"
                )
            if was is None:
                continue
            with disk_errors(f"cannot read {path}"):
                self._check_size(path, path.stat().st_size, was)
            if not was.matches(path):
                raise DataError(self._other_rows(path, was))

    def check_numbers(self) -> None:
        """Compare the scores and bytes in summary.json with metrics.jsonl and the sums of the ledger.

        Raises:
            DataError: if they differ.
        """
        summary, lines = self.summary, self.lines if self.has(METRICS) else ()
        own = (summary.get("bytes") or {}).get("algorithm") or {}
        numbers: dict[str, Any] = {
            f"bytes_{side}": sum(_leaves(own.get(side, {}))) for side in ("down", "up")
        }
        if lines:
            reached = TargetAccuracy(summary.get("until") or 0.0).after(lines).reached
            scores = ("test_accuracy", "test_nll", *OPTIONAL_SCORES)
            numbers |= {"reached": reached, **{key: lines[-1].get(key) for key in scores}}
        for key, number in numbers.items():
            if key in summary and str(summary[key]) != str(number):  # NaN is equal to itself
                raise DataError(
                    f"{self.path / SUMMARY} was changed: its {key} is {summary[key]}, and {number} by "
                    f"{'its own sums' if key.startswith('bytes') else METRICS}. Restore the original"
                )

    def _check_size(self, path: Path, size: int, was: FileDigest) -> None:
        if size < was.bytes or (self.known.ended and size > was.bytes):
            raise DataError(
                f"{path} was changed: it has {size:,} bytes; {self.known.source} says {was.bytes:,} "
                f"({was.rows:,} rows)"
            )

    def _other_rows(self, path: Path, was: FileDigest) -> str:
        source = self.known.source
        return f"{path} was changed: its first {was.rows:,} rows do not match the sha256 in {source}"

    def ledger_rows(self) -> Iterator[Entry]:
        """Yield the committed rows of ledger.csv, which may not fit into memory."""
        return rows_of(self.path / LEDGER, Entry, self.last_round)

    def timeline_rows(self) -> Iterator[Span]:
        """Yield the committed rows of timeline.csv."""
        return rows_of(self.path / TIMELINE, Span, self.last_round)

    @cached_property
    def lines(self) -> tuple[dict[str, Any], ...]:
        """The lines of metrics.jsonl, without a last line that is still being written.

        The traffic of rounds that were not evaluated is added to the next line.

        Raises:
            UsageError: if there is no metrics.jsonl.
            DataError: if metrics.jsonl is damaged.
        """
        path, written = self.path / METRICS, self.checked_bytes(METRICS)
        lines: list[dict[str, Any]] = []
        rounds: list[int] = []
        for number, text in enumerate(written[: written.rfind(b"\n") + 1].splitlines(), 1):
            try:
                lines.append(line_of(text))
                rounds += [lines[-1]["round"]] if {"bytes_down", "bytes_up"} <= lines[-1].keys() else []
            except ValueError as e:
                why = f"line {number} is not the record of a round ({e})"
                raise DataError(f"{path} is damaged: {why}; {CURE}") from None
        if len(rounds) < len(lines):
            raise DataError(f"{path} is damaged: a line has no bytes_down or bytes_up")
        if every_round(rounds):
            return tuple(lines)
        own = self.ledger[self.ledger.kind == "algorithm"]
        for side in ("down", "up"):
            sent = own[own.direction == side].sort_values("round")
            sums = [0, *sent.bytes.cumsum()]
            so_far = [int(sums[at]) for at in sent["round"].searchsorted(rounds, side="right")]
            for line, now, before in zip(lines, so_far, [0, *so_far], strict=False):
                line[f"bytes_{side}"] = now - before
        return tuple(lines)

    @property
    def evaluated_round(self) -> int:
        """The round of the last whole line of metrics.jsonl; 0 if there is none."""
        with suppress(OSError, ValueError, LookupError):
            return int(line_of(read(self.path / METRICS).rsplit(b"\n", 2)[-2])["round"])
        return 0

    # ---- tables

    @cached_property
    def curve(self) -> pandas.DataFrame:
        """The numbers of every evaluated round, with sums so far; empty if there is no metrics.jsonl."""
        return metrics_table(self.lines if self.has(METRICS) else ())

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """A table with one row per evaluated round, as in `lines`; MB_down, MB_up and MB are cumulative."""
        return metrics_frame(self.lines)

    @cached_property
    def ledger(self) -> pandas.DataFrame:
        """The table of ledger.csv, with one row per message field and layer, and its bytes.

        A text that does not apply is '', and a number that does not apply is -1. The table has no incomplete
        last row and no rows of uncommitted rounds.

        Raises:
            UsageError: if there is no ledger.csv.
            DataError: if the file is damaged, or its sums differ from those in summary.json.
        """
        path = self.path / LEDGER
        ended = self.summary.get("status") in (DONE, INTERRUPTED)  # a failed run may lack rows
        sums = self.summary.get("bytes") if ended else None
        return ledger_frame(path, self.checked_bytes(LEDGER), self.last_round, sums)


def _known_by_summary(path: Path) -> KnownFiles:
    """Return the record of the growing files in summary.json."""
    summary = document(path, Summary)
    files = {name: FileDigest(name, **of) for name, of in summary.get("files", {}).items()}
    return KnownFiles(SUMMARY, True, files, str(summary.get("experiment_sha256") or ""))


def _leaves(table: Any) -> Iterator[int]:
    """Yield the numbers of nested tables."""
    for value in table.values():
        yield from _leaves(value) if isinstance(value, Mapping) else (value,)


def folder_name(text: str) -> str:
    """Return a text as the name of a folder that every tool accepts: scp and tar take a colon for a host."""
    return re.sub(r"[^\w.-]", "-", text, flags=re.ASCII)


def is_run(folder: Path) -> bool:
    """Return True if a folder has a manifest, of whatever kind."""
    return lexists(folder / MANIFEST)


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder, ordered by name, including those without a manifest, and those that
    may not be entered."""
    traces = (MANIFEST, JOURNAL, "lock", SUMMARY)
    with disk_errors(f"cannot read {folder}"):
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}")
        folders = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    return [p for p in folders if not os.access(p, os.X_OK) or any(lexists(p / name) for name in traces)]


def check_entries(folder: Path) -> None:
    """Refuse a run folder with a link, a pipe or a device: through it, a run would write or read elsewhere.
    Below tracking/NAME, a tracker may have links."""
    with disk_errors(f"cannot read {folder}"):
        for place, folders, files in os.walk(folder, onerror=_raise):
            if Path(place).parent == folder / "tracking":
                folders.clear()
                continue
            for path in (Path(place, name) for name in (*folders, *files)):
                if not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
                    raise DataError(f"{path} is a link, a pipe or a device: put the file itself there")


def _raise(error: OSError) -> None:
    raise error


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Turn ValueErrors in the block into DataErrors about a file of a run."""
    try:
        yield
    except ValueError as e:
        raise DataError(f"{path} is damaged: {e}; {CURE}") from None


def document(path: Path, kind: Any, missing: str = "") -> dict[str, Any]:
    """Read a JSON file of a run; return {} if it holds no object.

    kind: the type of the content. missing: the error if there is no such file or folder.

    Raises:
        UsageError: if the file cannot be read.
        DataError: if it is damaged, or its content is of another type.
    """
    try:
        data = read(path, DOCUMENT)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise UsageError(missing or f"{path}: {e.strerror}") from None
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from None
    with damage(path):
        content = json_value(data)
        return dict(checked(content, kind)) if isinstance(content, dict) else {}


def document_or_empty(path: Path, kind: Any = Any) -> dict[str, Any]:
    """Read a JSON file of a run; return {} if it is missing or damaged."""
    with suppress(UsageError, DataError):
        return document(path, kind)
    return {}
