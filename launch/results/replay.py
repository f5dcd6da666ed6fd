"""fedsim replay: fold a run's kept uploads again, from start to end, without any client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim.errors import DataError, FedsimError, UsageError
from launch import terminal
from launch.runs.restored import RestoredRun
from launch.runs.summary import digest_of
from workers.replay.recorded_uploads import RecordedUploads
from workers.replay.round_replayer import RoundReplayer
from workers.scratch import Scratch
from workers.storage.atomic_files import at_rest
from workers.storage.checkpoints import Checkpoint
from workers.storage.upload_archive import uploads_folder


def replay(folder: Path, data_dir: Path | None) -> None:
    """Print a line per round and the outcome; raise FedsimError if the result differs from the run's."""
    run = RestoredRun.open(folder, data_dir)
    if not uploads_folder(folder).is_dir():
        raise UsageError(f"{folder} has no uploads to fold again: fedsim launch --keep-uploads keeps them")
    console = terminal.console(markup=False)
    recorded, faults, created, last = RecordedUploads(folder), [], run.checkpoint, run.last_commit()
    with at_rest(folder), Scratch("fedsim-replay-") as scratch:
        before = 0
        for created in RoundReplayer(run.problem, run.name, recorded, scratch).rounds(None, last):
            text, fault = _compared(run, created)
            faults += [fault] if fault else []
            uploads, before = recorded.read - before, recorded.read
            line = f"round {created.round:>{len(str(last))}}  {uploads} uploads read again{text}"
            console.print(line, soft_wrap=True)
    for text, fault in _outcome(run, created):
        console.print(text, soft_wrap=True)
        faults += [fault] if fault else []
    if faults:
        raise FedsimError("\n".join(faults))


def _compared(run: RestoredRun, created: Checkpoint[Any]) -> tuple[str, str]:
    """Compare a replayed round with its checkpoint; return a text to print and an error message or ''."""
    try:
        what = run.unlike(created)
    except DataError as e:
        return "; its checkpoint is damaged", str(e)
    if what:
        return "; its checkpoint is different", f"{run.folder}, round {created.round}: {what}"
    return "" if what is None else "; its checkpoint is identical", ""


def _outcome(run: RestoredRun, created: Checkpoint[Any]) -> Iterator[tuple[str, str]]:
    summary, problem = run.run.summary, run.problem
    if not summary.get("model_sha256") or summary["rounds"] != created.round:
        yield "summary.json has no model_sha256 of this round to compare with", ""
        return
    model = problem.algorithm.model(created.server, problem.context(created.round, 0))
    result = digest_of(model)
    if result == summary["model_sha256"]:
        yield "model_sha256 is identical: these uploads give the run's model", ""
    else:
        yield (
            "model_sha256 is different",
            f"{run.folder}: model_sha256 of what was folded again is {result}; "
            f"summary.json says {summary['model_sha256']}",
        )
