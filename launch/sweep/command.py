"""fedsim sweep: compute a recipe's missing runs, show its tables, and write page, archive and plots."""

from __future__ import annotations

import math
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from fedsim.data.catalogue import DATASETS
from fedsim.errors import DataError, TaskError, UsageError
from fedsim.printable import markdown
from launch import terminal
from launch.configuration.worker_count import usable_cores
from launch.engines.options import EngineOptions
from launch.engines.slurm import submit_array
from launch.numbers import counted, span
from launch.results.differences import HOW_TO_READ, Compared, forest
from launch.results.figures import write_figures
from launch.results.significance import LEAST
from launch.sweep.columns import check_columns
from launch.sweep.finished import SUFFIX, FinishedRun, read_archive, write_archive
from launch.sweep.pool import Pool
from launch.sweep.recipe import Differences, Recipe, Table as TablePart, Trial
from launch.sweep.runner import Progress, run_trials
from launch.sweep.table import Results
from launch.sweep.task import Tasks
from launch.table import Table
from launch.terminal import Status, write_text
from workers.storage.atomic_files import disk_errors

JOBS = ".jobs"
"""The folder beside the runs for jobs that are submitted to Slurm, and for their output."""


def sweep(
    recipe: Recipe,
    file: Path,
    *,
    out: Path | None,
    runs: Path,
    side_by_side: int | None,
    data_dir: str | None,
    minutes: float | None = None,
    dry: bool = False,
    run: bool = True,
    quiet: bool = False,
    engine: EngineOptions | None = None,
    keeps_states: bool = True,
    archived: bool = False,
    latex: Path | None = None,
    figures: Path | None = None,
) -> Path | None:
    """Compute the missing runs (if `run`), and tabulate the finished runs. Return the page, if any.

    The files in `out` are named after the recipe `file`, which need not exist if options define the recipe.
    The sweep stops after `minutes`. `engine` computes the runs; None means this machine. Slurm runs are only
    submitted, and a later command writes the tables. `keeps_states` is as in Pool. If `archived` or not
    `run`, runs in the recipe's archive (launch.sweep.finished) count as done even if their folders are
    missing; if `archived`, also runs in other archives of `out`. If a run failed, TaskError is raised after
    everything has been written.
    """
    console = terminal.console(quiet=quiet)
    trials, pool = tuple(recipe.trials()), Pool(runs, keeps_states)
    if not trials:
        raise UsageError(f"recipe {file}: no variant, so nothing to run")
    check_columns(recipe, trials, f"recipe {file}")
    if archived and out is None:
        raise UsageError("--archived reads the archives of --out DIR; say which folder")
    if minutes is not None and engine is not None:
        raise UsageError("--minutes is for sweeps on this machine; on an engine, use its own limit of time")
    earlier = {} if out is None else read_archive(_archive(file, out))
    if archived and out is not None:
        earlier = {**_of_others(file, out, console), **earlier}
    known = earlier if archived or not run else {}
    missing = sum(not pool.done(t) for t in {t.id: t for t in trials if t.id not in known}.values())
    lines = len(list(recipe.rows()))
    console.print(
        Text.assemble(
            (recipe.title, "bold"), f": {lines} lines x {len(recipe.seeds)} seeds, {missing} runs to do"
        )
    )
    if dry:
        for t in trials:
            state = "done" if pool.done(t) else "archived" if t.id in known else "to do"
            console.print(f"{state:8} {t.name}: {pool.folder(t)}", soft_wrap=True)
        return None
    pool.remove_left()
    execution = recipe.how(str(Path(data_dir).resolve()) if data_dir else None)
    errors: dict[str, str] = {}
    to_run = [t for t in trials if t.id not in known]
    if run and engine is not None and missing:
        tasks, name = Tasks.of(to_run, execution, pool), f"{file.stem}-{secrets.token_hex(4)}.json"
        message = submit_array(tasks, engine, runs.resolve() / JOBS / name, side_by_side)
        console.print(message, soft_wrap=True)
        return None
    if run:
        watch, (cores, _) = _Watch(quiet), usable_cores()
        seconds = math.inf if minutes is None else 60 * minutes
        errors = run_trials(to_run, execution, pool, side_by_side or cores, watch.show, seconds)
        if watch.stopped:
            console.print(
                f"stopped after {minutes:g} minutes with {counted(watch.stopped, 'run')} not done; the same "
                f"command continues, with copies of {runs}/*.tar also on another machine of this kind",
                soft_wrap=True,
            )
    done = {t.id: FinishedRun.of(t, pool) for t in {t.id: t for t in trials}.values() if pool.done(t)}
    results = Results(recipe, trials, {**_selected(known, trials), **done})
    tables = [results.table(t) for t in recipe.table]
    parts = [(part, results.compare(part)) for part in recipe.differences]
    for table in (*tables, *(c.table(part.title) for part, compared in parts for c in compared)):
        table.print(console)
    if latex is not None:
        write_text(latex, "\n".join(results.table(t, counted=True).latex() for t in recipe.table))
        console.print(f"LaTeX: {latex}", soft_wrap=True)
    if figures is not None:
        forests = [forest(compared, part.title) for part, compared in parts if compared]
        write_figures(figures, [*map(results.figure, recipe.plot), *forests])
        console.print(f"figures: {figures}", soft_wrap=True)
    kept = {**_selected(earlier, trials), **done}
    page = None if out is None else _write(file, out, results, kept, tables, parts)
    if page is not None:
        console.print(f"page: {page}", soft_wrap=True)
    if errors:
        failed = next(t for t in trials if t.id in errors)
        raise TaskError(
            f"{len(errors)} of {len(trials)} runs failed; the first, {failed.row.name} with seed "
            f"{failed.seed}: {errors[failed.id].strip()} (folder {pool.folder(failed)})"
        )
    return page


def _archive(file: Path, out: Path) -> Path:
    return out / f"{file.stem}{SUFFIX}"


def _of_others(file: Path, out: Path, console: Console) -> dict[str, FinishedRun]:
    """Return the runs in the archives of other recipes in `out`; an archive that cannot be read is named."""
    runs: dict[str, FinishedRun] = {}
    for path in sorted(set(out.glob(f"*{SUFFIX}")) - {_archive(file, out)}):
        try:
            runs |= read_archive(path)
        except DataError as e:
            console.print(f"not used: {e}", soft_wrap=True)
    return runs


def _selected(runs: Mapping[str, FinishedRun], trials: Sequence[Trial]) -> dict[str, FinishedRun]:
    """Return the runs of these trials, in their order."""
    return {t.id: msgspec.structs.replace(runs[t.id], name=t.row.name) for t in trials if t.id in runs}


def _write(
    file: Path,
    out: Path,
    results: Results,
    kept: Mapping[str, FinishedRun],
    tables: Sequence[Table],
    parts: Sequence[tuple[Differences, list[Compared]]],
) -> Path:
    """Write plots, archive and page; return the page. `kept` has the runs of the archive, old and new."""
    recipe, page = results.recipe, out / f"{results.recipe.section_of or file.stem}.md"
    texts = [
        f"{'##' if recipe.section_of else '#'} {recipe.title}",
        recipe.about.strip(),
        f"```\n{_command(file, out, results)}\n```",
        *(
            _with_command(table, part, file, results)
            for table, part in zip(tables, recipe.table, strict=True)
        ),
    ]
    with disk_errors(f"cannot write to {out}"):
        out.mkdir(parents=True, exist_ok=True)
        for part, compared in parts:
            texts += [c.table(part.title).markdown().rstrip() for c in compared]
            texts += dict.fromkeys(c.note() for c in compared)
            if part.file and compared:
                texts += [_picture(forest(compared, part.title).write(out / part.file)), HOW_TO_READ]
        texts += [_picture(results.figure(p).write(out / p.file)) for p in recipe.plot]
        texts += [recipe.notes.strip(), markdown(_provenance(results))]
        write_archive(_archive(file, out), _selected(kept, results.trials).values())
        marker = f"<!-- section: {file.stem} -->" if recipe.section_of else ""
        write_text(page, _with_sections(page, marker, "\n\n".join(text for text in texts if text)))
    return page


def _picture(path: Path) -> str:
    return f"![{path.stem.replace('_', ' ')}]({path.name})"


def _with_sections(page: Path, marker: str, text: str) -> str:
    """Return the page with `text` as the section of `marker` ('' for the first part); keep the others."""
    before = page.read_text(encoding="utf-8") if page.is_file() else ""
    first, *sections = re.split(r"^(?=<!-- section: )", before, flags=re.MULTILINE)
    parts = {"": first, **{section.splitlines()[0]: section for section in sections}}
    parts[marker] = f"{marker}\n\n{text}"
    return "\n\n".join(part.strip() for part in parts.values() if part.strip()) + "\n"


def _provenance(results: Results) -> str:
    """Describe the runs with their commits, versions and CPU time."""
    done = [results.finished[t.id] for t in results.trials if t.id in results.finished]
    seeds, unfinished = results.recipe.seeds, len(results.trials) - len(done)
    text = (
        "Cells are the mean ± the population standard deviation over seeds "
        f"{', '.join(map(str, seeds))}; bands are the range of the seeds. {counted(len(done), 'run')}"
        + (f", {unfinished} missing" if unfinished else "")
    )
    if done:
        versions = (
            f"{name} {_each(run.versions.get(name, '?') for run in done)}"
            for name in ("python", "torch", "numpy")
        )
        text += (
            f", {sum(run.seconds for run in done) / 60:,.0f} CPU-minutes in all "
            f"({_each(run.machine for run in done)}, one thread each), "
            f"at commit {_each(run.commit for run in done)}; {', '.join(versions)}"
        )
    if len(seeds) < LEAST:
        text += (
            f". n = {len(seeds)}: the order of rows is no ranking, which takes {LEAST} seeds "
            "(docs/what-a-number-is-worth.md)"
        )
    return f"{text}."


def _each(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts)))


def _command(file: Path, out: Path, results: Results) -> str:
    if not file.exists():
        return shlex.join(["fedsim", *sys.argv[1:]])
    return shlex.join(["fedsim", "sweep", str(file), *_data(results.trials), "--out", str(out)])


def _data(trials: Iterable[Trial]) -> list[str]:
    info = (DATASETS.get(t.experiment.dataset) for t in trials)
    return ["--data-dir", "DIR"] if any(i is not None and i.files for i in info) else []


def _with_command(table: Table, part: TablePart, file: Path, results: Results) -> str:
    """Return a table in Markdown, with the command of its first row under the title."""
    text = table.markdown().rstrip()
    trials = [t for t in results.trials if t.row.fits(part)]
    if not file.exists() or not trials:
        return text
    title, _, body = text.rpartition("\n\n")
    return "\n\n".join(filter(None, (title, one_row(file, trials[0]), body)))


def one_row(file: Path, trial: Trial) -> str:
    """Return a sentence with the command that computes a run, or the variant's whole grid with its seed."""
    label, seed, data = trial.row.variant.label, str(trial.seed), _data([trial])
    launch = ["launch", "--config", f"{file}:{label}", "--seed", seed]
    sweep = ["sweep", str(file), "--only", label, "--seeds", seed]
    command = shlex.join(["fedsim", *(sweep if trial.row.point else launch), *data])
    return f"One row of it: `{command}`"


class _Watch:
    """A progress display: a status line on a terminal, otherwise one line per finished run."""

    def __init__(self, quiet: bool) -> None:
        self._status, self._quiet, self._over = Status(quiet), quiet, -1
        self.stopped = 0

    def show(self, p: Progress) -> None:
        over, self.stopped = p.done + p.failed, p.stopped
        left = f", about {span(p.left)} left" if p.left is not None and over < p.total else ""
        line = f"{over} of {p.total} runs{f', {p.failed} failed' if p.failed else ''}{left}"
        running = (f"{name} {share:.0%}" for name, share in p.running)
        text = "; ".join([line, *running]) if p.running else ""
        self._status(text[: shutil.get_terminal_size().columns - 1])
        if over != self._over and not self._quiet and not self._status.shown:
            self._over = over
            print(line, flush=True)
