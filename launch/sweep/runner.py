"""Parallel runs of a sweep, each in a process that is forked from a server that has imported torch."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedsim.errors import DataError, DiskError, FedsimError, Interrupted, MismatchError, UsageError, WireError
from fedsim.experiment import Experiment, convert
from launch.configuration.execution import AUTO, Execution
from launch.processes.fork_server import ENVIRONMENT, die_with_parent
from launch.runs.documents import Attempt
from launch.runs.folder import DONE, FAILED, document_or_empty
from launch.sweep import ends_with_sweep
from launch.sweep.ends_with_sweep import SWEEP
from launch.sweep.pool import ATTEMPT, Pool
from launch.sweep.recipe import Task, one_numerics
from workers.portable import environment_for
from workers.scratch import Scratch, parent_of_sockets
from workers.storage.atomic_files import write_atomically

STOP = 120.0
"""Seconds that a run has to stop before it is killed. Its last committed round is kept."""
LOOK = 1.0
"""Seconds between two updates of the progress. The end of a run is noticed at once."""


@dataclass
class Running:
    trial: Task
    process: BaseProcess
    began: float
    claim: int


@dataclass
class Progress:
    """The state that a display shows.

    seconds: the sum of the seconds of finished runs. running: the name of each run, and the share of its
    rounds that is done. stopped: the number of runs that were not done at the time limit.
    """

    total: int
    done: int = 0
    failed: int = 0
    seconds: float = 0.0
    running: tuple[tuple[str, float], ...] = ()
    stopped: int = 0
    side_by_side: int = 1

    @property
    def left(self) -> float | None:
        """The estimated seconds left, from the mean seconds of finished runs."""
        if not self.done:
            return None
        remaining = self.total - self.done - self.failed - sum(share for _, share in self.running)
        return max(0.0, remaining) * self.seconds / self.done / self.side_by_side


def run_trials(
    trials: Sequence[Task],
    execution: Execution,
    pool: Pool,
    side_by_side: int,
    watch: Callable[[Progress], None],
    seconds: float = math.inf,
) -> dict[str, str]:
    """Run the trials that the pool does not have; return errors by trial id.

    If a run fails, the other runs continue. A run that was stopped earlier is resumed. After `seconds`, each
    run stops after its last committed round, and is packed for another machine. Ctrl-C kills the unfinished
    runs, which count as not run, and raises Interrupted.
    """
    waiting = list({t.id: t for t in trials if not pool.done(t)}.values())
    if not waiting:
        return {}
    runs = _Runs(execution, pool, Progress(len(waiting), side_by_side=side_by_side), watch)
    context, until, interrupt = _fork_server(waiting), time.monotonic() + seconds, _Interrupt()
    try:
        while waiting or runs.running:
            interrupt.check()
            if time.monotonic() >= until:
                runs.progress.stopped = len(waiting)
                runs.stop()
                break
            remote: list[Task] = []  # claimed by another sweep
            while waiting and len(runs.running) < side_by_side:
                trial = waiting.pop(0)
                if (claim := pool.claim(trial)) is None:
                    remote.append(trial)
                else:
                    runs.start(trial, claim, context)
            waiting += remote
            ends = [r.process.sentinel for r in runs.running]
            wait(ends, timeout=min(LOOK, max(0.0, until - time.monotonic())))
            runs.look()
    except KeyboardInterrupt:
        done = f"{runs.progress.done} runs are done and kept in {pool.path}; the same command continues there"
        raise Interrupted(f"interrupted: {done}") from None
    finally:
        runs.kill()
        interrupt.close()
    return runs.errors


@dataclass
class _Runs:
    """The runs of this process, and the errors of those that failed by trial id."""

    execution: Execution
    pool: Pool
    progress: Progress
    watch: Callable[[Progress], None]
    running: list[Running] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def start(self, trial: Task, claim: int, context: Any) -> None:
        """Start a claimed run, unless it is done."""
        if self.pool.done(trial):
            self.pool.release(trial, claim)
            self.progress.total -= 1
            return
        how = replace(self.execution, out=str(self.pool.folder(trial)))
        try:
            described = [asdict(trial.experiment), asdict(how), self.pool.begun(trial)]
            process = context.Process(target=_one, args=(json.dumps(described),), daemon=True)
            process.start()
        except BaseException:  # Ctrl-C while the fork server imports
            self.pool.release(trial, claim)
            raise
        self.running.append(Running(trial, process, time.monotonic(), claim))

    def look(self) -> None:
        """Count the runs that have ended, and show the progress of the others."""
        for r in [r for r in self.running if not r.process.is_alive()]:
            r.process.join()
            if r.process.exitcode == Interrupted.exit_code:
                raise KeyboardInterrupt
            self.running.remove(r)
            self._ended(r, r.process.exitcode == 0 and self.pool.run(r.trial).status == DONE)
            self.pool.release(r.trial, r.claim)  # not earlier: a run is not done until it is signed
        evaluated = ((r.trial, self.pool.run(r.trial).evaluated_round) for r in self.running)
        self.progress.running = tuple((t.name, n / max(1, t.experiment.rounds)) for t, n in evaluated)
        self.watch(self.progress)

    def _ended(self, r: Running, done: bool) -> None:
        """Sign a run that is done, or record its error, and count it."""
        if done:
            seconds = time.monotonic() - r.began
            self.pool.sign(r.trial, seconds)
            self.progress.done += 1
            self.progress.seconds += seconds
        else:
            self.errors[r.trial.id] = self.pool.error(r.trial)
            self.progress.failed += 1

    def stop(self) -> None:
        """Stop every run after its last committed round, and pack it."""
        for r in self.running:
            r.process.terminate()
        until = time.monotonic() + STOP
        while self.running:
            r = self.running.pop()
            try:
                r.process.join(max(0.0, until - time.monotonic()))
                r.process.kill()
                r.process.join()
                status = self.pool.run(r.trial).status
                if status in (DONE, FAILED):
                    self._ended(r, status == DONE)
                    continue
                self.progress.stopped += 1
                if self.pool.resumable(r.trial):
                    self.pool.pause(r.trial, time.monotonic() - r.began)
            finally:
                self.pool.release(r.trial, r.claim)
        self.look()

    def kill(self) -> None:
        for r in self.running:
            r.process.kill()
            r.process.join()
            self.pool.release(r.trial, r.claim)


def _fork_server(trials: Sequence[Task]) -> Any:
    """Return multiprocessing's fork server, which has imported what runs need.

    It is started with SIGINT blocked, which it ignores after its imports: Ctrl-C reaches every process of the
    foreground group, and the imports of the server would end in a traceback.
    """
    environment = environment_for(one_numerics({trial.experiment.numerics for trial in trials}))
    os.environ.update({**ENVIRONMENT, **environment, SWEEP: str(os.getpid())})
    _sockets_in_scratch()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ends_with_sweep.__name__, "launch.session.run", "launch.session.session"])
    resource_tracker.ensure_running()  # otherwise the server starts it, which unblocks the signal
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    return context


@cache
def _sockets_in_scratch() -> None:
    """Put multiprocessing's sockets into a folder that is removed even if this process is killed. The fork
    server and its socket exist until this process ends."""
    scratch = Scratch("fedsim-sweep-", parent_of_sockets())
    multiprocessing.current_process()._config.setdefault("tempdir", str(scratch.path))  # type: ignore[attr-defined]
    atexit.register(scratch.remove)


class _Interrupt:
    """A handler of Ctrl-C. It also records the signal, because Python ignores errors in finalisers."""

    def __init__(self) -> None:
        self._came = False
        self._mine = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGINT, self._handle) if self._mine else None

    def _handle(self, number: int, frame: object) -> None:
        self._came = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self._came:
            raise KeyboardInterrupt

    def close(self) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, self._before)


def _one(worker_config: str) -> None:
    """Compute one run in a child process, which exits with the code of the command line."""
    die_with_parent(os.getppid())  # the fork server, which ends with the sweep
    described, how, begun = json.loads(worker_config)
    experiment = convert(Experiment, described, "a sweep's experiment")
    execution = convert(Execution, how, "a sweep's execution")
    text = io.StringIO()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server has it blocked
        with contextlib.redirect_stdout(text):
            start_or_resume(experiment, execution, begun)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)
    except FedsimError as e:
        leave_summary(Path(str(execution.out)), str(e))
        sys.exit(e.exit_code)
    except BaseException:
        leave_summary(Path(str(execution.out)), traceback.format_exc())
        sys.exit(1)


def start_or_resume(experiment: Experiment, execution: Execution, begun: bool) -> None:
    """Start a run, or resume it if it was `begun`, with this execution."""
    from launch.session.run import launch, resume

    if begun:
        described = {k: v for k, v in asdict(execution).items() if k not in ("out", "runs")}
        how = {name: "auto" if v == AUTO else v for name, v in described.items()}
        folder = Path(str(execution.out))
        try:
            resume(folder, how, quiet=True)
        except (DataError, MismatchError, UsageError, WireError) as e:
            raise type(e)(f"{e}; remove {folder} to begin this run anew") from None
    else:
        launch(experiment, execution, quiet=True)


def leave_summary(folder: Path, error: str) -> None:
    """Write a summary with the error, unless the run has written one or the disk is full.

    A run with committed rounds can still be resumed, so its error is written to ATTEMPT instead.
    """
    with contextlib.suppress(OSError, DiskError):  # a full disk would end the process with a traceback
        folder.mkdir(parents=True, exist_ok=True)
        if any((folder / "checkpoints").glob("*.checkpoint")):
            attempt = document_or_empty(folder / ATTEMPT, Attempt) | {"error": error}
            write_atomically(folder / ATTEMPT, [json.dumps(attempt).encode()])
        elif not (path := folder / "summary.json").exists():
            write_atomically(path, [json.dumps({"format": 1, "status": "failed", "error": error}).encode()])
