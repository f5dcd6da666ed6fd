"""What `fedsim runs` says of a run folder, from its small files. Nothing here imports torch or pandas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim import plugins
from fedsim.errors import FedsimError, UsageError
from launch.runs.manifest import StoredManifest, json_of
from launch.runs.run_state import commits_of, state_of
from workers.storage.metrics_file import metrics_lines

TRACES = ("manifest.json", "journal", "lock", "summary.json")
"""A folder with any of these files is a run's, perhaps a damaged one."""
DAMAGED = "damaged"


@dataclass(frozen=True)
class ListedRun:
    """One line.

    Attributes:
        run: The run folder.
        state: running (its coordinator lives), done, interrupted (a signal), failed (an error), killed (its
            coordinator is gone without a summary), or damaged.
        rounds_done: The last committed round.
        rounds: How many it is to have, at most if there is `until`.
        test_accuracy: Of the last evaluated round.
        bytes_down: Of the algorithm, in all committed rounds.
        started: When it was begun, as ISO 8601 has it.
        error: What is damaged, or why it failed.
    """

    run: Path
    state: str
    started: str = ""
    algo: str | None = None
    dataset: str | None = None
    seed: int | None = None
    rounds_done: int | None = None
    rounds: int | None = None
    until: float | None = None
    test_accuracy: float | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    error: str | None = None


def listed(folders: Sequence[Path]) -> list[ListedRun]:
    """All runs in these folders (a run folder, or a folder of them), in the order in which they were begun.

    Raises:
        UsageError: if there is no such folder.
    """
    runs = dict.fromkeys(run for folder in folders for run in _run_folders(folder))
    return sorted(map(_read, runs), key=lambda r: (r.started, str(r.run)))


def _run_folders(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if (folder / "manifest.json").is_file():
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any((path / name).is_file() for name in TRACES):
            yield path


def _read(folder: Path) -> ListedRun:
    try:
        return _described(folder)
    except FedsimError as e:
        return ListedRun(folder, DAMAGED, error=str(e))
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        return ListedRun(folder, DAMAGED, error=f"{folder} has a file that is damaged: {e!r}")


def _described(folder: Path) -> ListedRun:
    opened = StoredManifest.read(folder)
    experiment, path = opened.described, folder / "summary.json"
    summary: dict[str, Any] = json_of(path) if path.is_file() else {}
    state = state_of(folder, summary)
    lines = [line for line, _ in metrics_lines(folder / "metrics.jsonl")]
    done, down, up = _progress(folder, summary if state == "done" else {})
    return ListedRun(
        run=folder,
        state=state,
        started=str(opened.content["started"]),
        algo=plugins.short(str(experiment["algo"])),
        dataset=plugins.short(str(experiment["dataset"])),
        seed=int(experiment["seed"]),
        rounds_done=done,
        rounds=int(experiment["rounds"]),
        until=experiment.get("until") or None,
        test_accuracy=lines[-1].get("test_accuracy") if lines else None,
        bytes_down=down,
        bytes_up=up,
        error=summary.get("error") if state == "failed" else None,
    )


def _progress(folder: Path, summary: dict[str, Any]) -> tuple[int, int, int]:
    """The last committed round, and the algorithm's bytes down and up so far."""
    if summary:
        return int(summary["rounds"]), int(summary["bytes_down"]), int(summary["bytes_up"])
    commits = commits_of(folder)
    down, up = (sum(int(a[f"bytes_{side}"]) for a in commits.values()) for side in ("down", "up"))
    return max(commits, default=0), down, up
