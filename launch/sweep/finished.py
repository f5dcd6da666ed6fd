"""The data of a sweep's finished runs, from their folders or from the archive beside an earlier page.

The archive, NAME_runs.jsonl.zst, has one line per run and is compressed by Zstandard. With it, a page can be
rewritten, or extended by further seeds, without the run folders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard

from fedsim.errors import DataError
from fedsim.foreign_files import opened
from launch.runs.tables import metrics_table
from launch.sweep.pool import Pool
from launch.sweep.recipe import Trial
from workers.storage.atomic_files import write_atomically

if TYPE_CHECKING:
    import pandas

Number = int | float | dict[str, Any] | None
"""A value in a line of metrics.jsonl, which is a mapping for the key `limits`."""
DIGITS = 8
"""The significant digits of an archived number. Scores have the precision of float32; tables show fewer."""
SUFFIX = "_runs.jsonl.zst"
"""The end of an archive's name, behind the name of its recipe."""
LARGEST = 1 << 30
"""The largest size of a decompressed archive that is read, in bytes."""


class FinishedRun(msgspec.Struct, frozen=True):
    """The data of a run for tables, plots and the last line of a page.

    id: Task.id, which has a digest. name: the label of the run's row. metrics: a column per number
    in metrics.jsonl, with a value of DIGITS significant digits per evaluated round; null is NaN. A shorter
    column begins in a later round; for example, round 0 has no train_loss. Lists, such as the accuracies of
    all clients, are left out. digest: in an archive, the first 16 hexadecimal digits of the other fields'
    SHA-256; else "".
    """

    id: str
    name: str
    seed: int
    seconds: float
    commit: str
    machine: str
    versions: dict[str, str]
    metrics: dict[str, list[Number]]
    digest: str = ""

    @staticmethod
    def of(trial: Trial, pool: Pool) -> FinishedRun:
        signed, run = pool.signed(trial), pool.run(trial)
        platform, versions = run.manifest.get("platform", {}), run.manifest.get("versions", {})
        machine = " ".join(str(platform[k]) for k in ("machine", "processor_name") if platform.get(k))
        texts = {str(name): str(v) for name, v in versions.items()}
        facts = float(signed["seconds"]), str(signed["commit"]), machine, texts
        return FinishedRun(trial.id, trial.row.name, trial.seed, *facts, columns_of(run.lines))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without lists."""
        count = len(self.metrics["round"])
        places = {key: count - len(values) for key, values in self.metrics.items()}
        return [
            {key: values[at - places[key]] for key, values in self.metrics.items() if at >= places[key]}
            for at in range(count)
        ]

    @property
    def curve(self) -> pandas.DataFrame:
        """The numbers of every evaluated round (launch.runs.tables)."""
        return metrics_table(self.lines)

    def signed(self) -> FinishedRun:
        """Return the run with its digest."""
        text = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=hashlib.sha256(text).hexdigest()[:16])


def columns_of(lines: Iterable[dict[str, Any]]) -> dict[str, list[Number]]:
    """Return the numbers of metrics.jsonl as columns, each from the first line that has it."""
    columns: dict[str, list[Number]] = {}
    for line in lines:
        for key in dict.fromkeys([*columns, *(k for k, x in line.items() if not isinstance(x, list))]):
            columns.setdefault(key, []).append(rounded(line.get(key)))
    return columns


def rounded(number: Number) -> Number:
    if isinstance(number, dict):
        return {key: rounded(value) for key, value in number.items()}
    return float(f"{number:.{DIGITS}g}") if isinstance(number, float) else number


def read_archive(path: Path) -> dict[str, FinishedRun]:
    """Return the runs of an archive by id; {} if there is no file.

    Raises:
        DataError: If the file cannot be read, or a line is not what `write_archive` wrote.
    """
    try:
        with opened(path, links=True) as packed, zstandard.open(packed, "rb") as file:
            texts = file.read(LARGEST).splitlines()
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise DataError(f"cannot read {path}: {e.strerror}") from None
    except zstandard.ZstdError as e:
        raise DataError(f"{path} is damaged: {e}") from None
    runs: dict[str, FinishedRun] = {}
    for number, text in enumerate(texts, 1):
        try:
            run = msgspec.json.decode(text, type=FinishedRun)
        except msgspec.MsgspecError as e:
            raise DataError(f"{path} is damaged: line {number} is no finished run: {e}") from None
        if run != run.signed():
            raise DataError(
                f"{path} is damaged: line {number} ({run.name}, seed {run.seed}) has changed since it was "
                "written; take the file from where it came from, or run the sweep again"
            )
        rounds = run.metrics.get("round", [])
        whole = bool(rounds) and all(isinstance(number, int) for number in rounds)
        if not whole or any(len(column) > len(rounds) for column in run.metrics.values()):
            raise DataError(f"{path} is damaged: the columns of line {number} do not fit its rounds")
        runs[run.id] = msgspec.structs.replace(run, digest="")
    return runs


def write_archive(path: Path, runs: Iterable[FinishedRun]) -> None:
    """Write an archive atomically; write no file if there is no run."""
    if lines := [msgspec.json.encode(run.signed()) + b"\n" for run in runs]:
        write_atomically(path, [zstandard.compress(b"".join(lines), 19)])
