"""Running of an experiment, from its configuration to its run folder.

The order of the steps matters: the fork server is forked right after torch is imported, before this process
has a thread, a socket or anything else that a fork must not copy. Code that needs torch is in session.py.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsim import model_specs, plugins
from fedsim.errors import Interrupted, UsageError
from fedsim.experiment import Experiment, is_utf8
from launch.configuration import names
from launch.configuration.execution import AUTO, Execution
from launch.configuration.listen_address import check_bind
from launch.configuration.worker_count import by_cores, check_room
from launch.numbers import counted, target
from launch.processes.fork_server import ENVIRONMENT
from launch.processes.supervisor import Supervisor
from launch.runs import manifest
from launch.runs.resume import Resumption
from launch.runs.source_commit import commit, look_up
from launch.runs.writer import RunDir
from launch.session.stop_signals import StopRequested, StopSignals
from launch.terminal import Status, output_that_may_close, say
from launch.tracking import check_installed, selected
from workers import scratch
from workers.devices import ELSEWHERE, Placement, assign_devices, gpus_of, remark as no_gpu_remark
from workers.portable import environment_for
from workers.transport.eventfd import Wakeup

SPARE, PER_WORKER = 128, 4
"""The number of open files of libraries, data and the run, and of each worker with its replacement."""


def allow_open_files(workers: int) -> None:
    """Raise this process's limit of open files if needed, because libzmq aborts at the limit."""
    needed = SPARE + PER_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{workers} workers need {needed} open files, and this shell allows {hard} (ulimit -Hn): "
            "have the limit raised, or take fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def resume(
    folder: Path,
    options: Mapping[str, Any],
    *,
    quiet: bool = False,
    started: float | None = None,
    embedded: bool = False,
) -> Path:
    """Resume a run, and return its folder.
    `options` has options of launch by field name. Raise MismatchError if they change more than execution,
    rounds and until."""
    stored = Resumption.open(folder, drift=bool(options.get("allow_drift")))
    experiment, execution = stored.configure(options)
    if not stored.run.begun:
        return launch(experiment, execution, quiet=quiet, started=started, embedded=embedded)
    if complete := stored.nothing_left(experiment):
        if not quiet:
            say(complete)
        return folder
    return launch(experiment, execution, quiet=quiet, stored=stored, started=started, embedded=embedded)


def _placements(execution: Execution, threads: int) -> tuple[Placement, ...]:
    """Return each worker's device. Of remote workers, only the kind of device is known here."""
    if not execution.remote_workers:
        return assign_devices(execution.devices, max(1, execution.workers), threads)
    if execution.devices not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"--devices {execution.devices!r} with --remote-workers: say cpu or cuda, the kind of device "
            "that they all compute on; fedsim worker --devices says which one of their machine"
        )
    placed = Placement(ELSEWHERE if execution.devices == "cuda" else None, ())
    return (placed,) * execution.workers


def launch(
    experiment: Experiment,
    execution: Execution,
    *,
    quiet: bool = False,
    stored: Resumption | None = None,
    started: float | None = None,
    embedded: bool = False,
    remarks: tuple[str, ...] = (),
) -> Path:
    """Run an experiment, and return its run folder. Errors are raised after summary.json has been written.

    `stored` is the run that is resumed, if any. `started` is the start of the program in seconds since the
    epoch, by default now; the summary counts from this time. `embedded` is True in a user's program
    (launch.api). `remarks` are further lines of the header, such as the origin of the hyperparameters.
    """
    started = time.time() if started is None else started
    if not is_utf8(os.getcwd()):
        raise UsageError(f"the working folder {os.getcwd()!a} is not UTF-8; run fedsim in another one")
    known = names.names("algorithms").get(experiment.algo)
    if experiment.rounds < 0 and known and known.defaults:
        experiment = replace(experiment, rounds=known.defaults.default_rounds)
    why = ""
    if execution.workers == AUTO:
        gpus = gpus_of(execution.devices)
        workers, why = by_cores(experiment.threads, experiment.clients, gpus)
        execution = replace(execution, workers=workers)
    elif not execution.remote_workers and execution.workers > experiment.clients:
        most, clients = experiment.clients, counted(experiment.clients, "client")
        remarks += (f"--workers {execution.workers}: {most} are started, one for each of {clients}",)
        execution = replace(execution, workers=most)
    check_room(execution.local_workers)
    allow_open_files(execution.workers)
    if execution.remote_workers:
        check_bind(execution.bind)
    check_installed(selected(execution.track))
    wakeup = Wakeup()
    supervisor = Supervisor(wakeup)
    placements = _placements(execution, experiment.threads)
    signals = StopSignals(wakeup, in_process=not execution.workers, embedded=embedded)
    with output_that_may_close(), signals, ExitStack() as unbegun:
        folder = stored.folder if stored else RunDir.path_of(experiment, execution)
        rundir = RunDir(folder, resumed=stored is not None, hops=bool(experiment.tree))
        unbegun.callback(rundir.close if stored else rundir.discard)
        if not stored:
            rundir.write_json(manifest.MANIFEST, manifest.draft(experiment, execution))
        for line in _announced(folder, experiment, execution, placements) if not quiet else ():
            say(line)
        status = Status(quiet)
        try:
            status("starting")
            look_up()
            scratch.remove_left()
            os.environ.update(environment_for(experiment.numerics))
            if execution.workers and not execution.remote_workers:
                supervisor.start_server(embedded, model_specs.packages(experiment.model))
            else:
                os.environ.update(ENVIRONMENT)
                if placements[0].gpu is not None and not execution.workers:
                    os.environ["CUDA_VISIBLE_DEVICES"] = placements[0].gpu
            from fedsim.process_settings import own_settings
            from launch.runs.summary import Start
            from launch.session.session import Session  # imports torch
            from workers.exact_roots import use_exact_roots

            start = Start(started, time.time() - started)
            status("reading and dividing the data")
            with ExitStack() as closing:
                closing.enter_context(own_settings())
                closing.callback(use_exact_roots, False)
                session = Session.prepare(
                    experiment, execution, placements, supervisor, start, quiet, rundir, stored, why
                )
                fallback = "" if execution.remote_workers else no_gpu_remark(execution.devices)
                session.header += (*remarks, *([fallback] if fallback else []))
                unbegun.pop_all()
                session.run(wakeup, signals.started)
        except (StopRequested, Interrupted):
            if not signals.starting:
                raise
            kept = f"; fedsim resume {stored.folder} continues" if stored else ", and nothing was kept"
            raise Interrupted(f"interrupted before the run began{kept}") from None
        finally:
            status("")
            supervisor.stop(gently=False)
            wakeup.close()
            commit()  # ends the process that look_up() started
    return folder


def _announced(
    folder: Path, experiment: Experiment, execution: Execution, placements: Sequence[Placement]
) -> tuple[str, str]:
    """Return the run's folder, and what is known about the run before torch is imported."""
    e, workers = experiment, execution.workers
    where = f"{counted(workers, 'worker')} over {execution.transport}" if workers else "in process"
    if execution.remote_workers:
        here = f"{counted(execution.local_workers, 'worker')} and " if execution.local_workers else ""
        where = here + counted(execution.remote_workers, "remote worker")
    many = f", {counted(e.rounds, 'round')}" if e.rounds >= 0 else ""  # a user's file determines it
    until = f" or until {target(e.until)}" if e.until else ""
    schedule = f"participation {e.participation}"
    schedule += f", asynchronous {e.asynchronous}" if e.asynchronous else ""
    devices = ", ".join(dict.fromkeys(str(placed) for placed in placements))
    algo, dataset = plugins.short(e.algo), plugins.short(e.dataset)
    task = f"{algo} on {dataset}{many}{until}, {schedule}, seed {e.seed}; {where} ({devices})"
    return f"run folder: {folder}", task
