"""The composition root of a run. It builds and connects all parts, and writes the summary at the end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET

from fedsim.errors import FedsimError, Interrupted, UsageError
from fedsim.experiment import Experiment
from fedsim.participation import Schedule
from fedsim.problem import Problem
from fedsim.wire.codec_selection import bias_remarks, noise_remarks
from launch.configuration.execution import Execution
from launch.configuration.worker_count import decide, lanes_of
from launch.numbers import counted
from launch.processes.local_node import LocalNode
from launch.processes.supervisor import Supervisor
from launch.results.plan import of_a_round
from launch.runs import manifest
from launch.runs.documents import Manifest
from launch.runs.folder import document
from launch.runs.resume import Resumption
from launch.runs.summary import Start, write_model
from launch.runs.writer import RunDir
from launch.session.display import Display, compressed, header
from launch.session.endpoint import open_endpoint
from launch.session.recorder import NotCompared, Recorder
from launch.session.stop_signals import StopRequested
from launch.tracking import Tracking, selected
from workers.assembly import assemble
from workers.coordinator.loop import Coordinator, Outcome
from workers.coordinator.membership import Registration, Timeouts, Workers
from workers.coordinator.run_records import RunIdentity, Storage
from workers.coordinator.worker_pool import NoWorkerPool
from workers.devices import Placement
from workers.heap import give_back, keep_vectors_apart, set_malloc_thresholds
from workers.numerics import facts_of_machine, facts_of_process, processor_name
from workers.probe import check_repeatable, probe
from workers.protocol_messages import WorkerConfig, WorkerManifest, sources_of
from workers.storage.checkpoints import Checkpoints
from workers.storage.client_states import ClientStates
from workers.storage.durability import by_size
from workers.storage.growing_file import JOURNAL, LEDGER, METRICS, TIMELINE
from workers.storage.journal import Journal
from workers.storage.recovery import NOTHING, Recovery, recover
from workers.storage.shared_frozen import (
    FILE as FROZEN,
    START,
    map_frozen,
    map_start,
    write_frozen,
    write_start,
)
from workers.transport.eventfd import Wakeup
from workers.transport.join_credentials import JOIN, JOIN_HERE


@dataclass
class Session:
    """The parts of a run, from its manifest to its summary."""

    problem: Problem
    execution: Execution
    placements: tuple[Placement, ...]
    schedule: Schedule
    recorder: Recorder
    start: Start
    recovery: Recovery | None = None
    run_name: str = field(default_factory=lambda: secrets.token_hex(8))
    described: Mapping[str, Any] = field(default_factory=dict)
    """The manifest's experiment."""
    header: tuple[str, ...] = ()
    probe: Mapping[str, str] = field(default_factory=dict)
    """The probe digest of this process, by the kind of device."""
    _began: bool = False

    @property
    def folder(self) -> Path:
        return self.recorder.rundir.path

    @staticmethod
    def prepare(
        experiment: Experiment,
        execution: Execution,
        placements: tuple[Placement, ...],
        supervisor: Supervisor,
        start: Start,
        quiet: bool,
        rundir: RunDir,
        stored: Resumption | None = None,
        auto: str = "",
    ) -> Session:
        """Check all settings, then write the manifest.

        `placements` has the device and cores of every worker. `stored` is the run to resume, if any. `auto`
        is the reason for the number of workers if that number may be lowered to fit into memory; else ''.
        """
        device: Literal["cpu", "cuda"] = "cuda" if placements[0].gpu is not None else "cpu"
        experiment = replace(experiment, device=device)
        if experiment.numerics == "tf32" and device == "cpu":
            raise UsageError("--numerics tf32 needs a GPU, and this run computes on the CPU; leave it out")
        data_dir = Path(execution.data_dir).resolve() if execution.data_dir else None
        problem = assemble(experiment, data_dir, "cpu" if execution.workers else device)
        check_repeatable(problem, data_dir)
        remarks: tuple[str, ...] = ()
        if auto:
            workers, why = decide(execution.workers, auto, problem)
            execution, placements, remarks = replace(execution, workers=workers), placements[:workers], (why,)
        asked, execution = execution, replace(execution, lanes=lanes_of(execution, problem))
        problem.rounds.check()
        participations = problem.rounds.schedule()
        display = Display(problem.experiment.rounds, quiet)
        recorder = Recorder(problem, rundir, display, supervisor, bool(execution.remote_workers))
        session = Session(problem, execution, placements, participations, recorder, start)
        duals, clients = bool(problem.algorithm.duals), len(problem.clients)
        biased = bias_remarks(problem.messages.codecs["up"], problem.messages.exchanges, duals, clients)
        first = len(participations(1).participants) or clients
        at = problem.context(1, 1, asked=first).at()
        noisy = noise_remarks(problem.messages.codecs["up"], problem.algorithm.dual_damping(at))
        lines = header(problem, execution, of_a_round(problem, first))
        session.header = (*lines, *compressed(experiment.compress, problem), *remarks, *biased, *noisy)
        experiment_entry, name = manifest.described(problem), session.run_name
        session.probe = probe(problem)
        today = manifest.describe(experiment_entry, asked, name, session.probe)
        session.described = today["experiment"]
        if stored is None:
            rundir.write_json(manifest.MANIFEST, today)
        else:
            session._go_on(stored, today)
        recorder.experiment_sha256 = manifest.digest(session.described)
        return session

    def _go_on(self, stored: Resumption, today: dict[str, Any]) -> None:
        """Continue with the files of earlier starts of the run."""
        stored.check(today)
        recorder, folder, display = self.recorder, self.folder, self.recorder.display
        before = stored.manifest
        lasting = manifest.lasting_digest(before["experiment"])
        self.recovery = recover(folder, self.problem, lasting, before["run"])
        recorder.rundir.remove_summary()
        recorder.restore(self.recovery)
        start = {k: today[k] for k in ("started", "execution", "command", "commit")}
        goes_on = manifest.resumed(before, self.problem.experiment, start)
        drift = [f"start {self.recovery.epoch}: {difference}" for difference in stored.drifts(today)]
        goes_on = manifest.with_workers(goes_on, {}, drift)
        self.run_name, self.described = goes_on["run"], goes_on["experiment"]
        recorder.rundir.write_json(manifest.MANIFEST, goes_on)
        for note in self.recovery.notes:
            display.note(note)
        last = self.recovery.round
        where = f"after round {last}" if last > NOTHING else "from the start, for no round was committed"
        display.note(f"{folder} continues {where}, start {self.recovery.epoch}")

    def run(self, wakeup: Wakeup, started: Callable[[], None]) -> None:
        """Run, and write summary.json however the run ends. A run that did not begin leaves no files.

        A signal sets `wakeup` to stop the run. `started` is called when the coordinator begins to check it;
        until then, a signal raises StopRequested.
        """
        recorder, supervisor, display = self.recorder, self.recorder.supervisor, self.recorder.display
        supervisor.changed = recorder.rundir.write_processes
        set_malloc_thresholds()
        try:
            if self._own_workers:
                display.status(f"starting {counted(self.execution.workers, 'worker')}")
            outcome = self._coordinate(wakeup, started)
            summary = recorder.write_summary("done", self.start, self._states(), outcome)
            display.traffic_summary(summary, str(self.folder), recorder.target)
            if self.execution.verify_bytes:
                recorder.verify_bytes(outcome)
            if self.problem.evaluation.samples and "ensemble_accuracy" not in summary:
                display.note("no average over posterior samples: this algorithm's model is a point")
        except BaseException as e:
            supervisor.stop(gently=False)
            if not self._began and self.recovery is None:
                supervisor.changed = lambda _: None
                recorder.rundir.discard()
            elif isinstance(e, Interrupted):
                recorder.write_summary("interrupted", self.start)
                raise Interrupted(
                    f"interrupted after round {recorder.last_round}; fedsim resume {self.folder} continues"
                ) from None
            elif not isinstance(e, NotCompared) and (self._began or not isinstance(e, StopRequested)):
                error = str(e) if isinstance(e, FedsimError) else repr(e)
                recorder.write_summary("failed", self.start, error=error)
            raise
        finally:
            display.stop()
            recorder.finish_tracking()
            recorder.rundir.close()

    def _states(self) -> ClientStates:
        return ClientStates(self.folder / "state", self.problem.algorithm.client_type, self.run_name)

    def _coordinate(self, wakeup: Wakeup, started: Callable[[], None]) -> Outcome:
        """Build the coordinator and its parts, run it, and write the model."""
        recorder, problem, folder, e = self.recorder, self.problem, self.folder, self.execution
        with ExitStack() as closing:  # closes all parts, even if one of them fails
            # resume reads the first four files; a finished run has all five of them
            synced = (JOURNAL, LEDGER, METRICS, TIMELINE, "model.safetensors")
            beside = [folder / name for name in synced]
            durability = e.durability or by_size(problem.net.layout.size)
            checkpoints = Checkpoints(folder / "checkpoints", self._states(), beside, durability)
            if self.recovery is not None:
                checkpoints.adopt(self.recovery.kept)
            closing.callback(checkpoints.close)
            for left in (JOIN, JOIN_HERE, FROZEN, START):  # left by a start that was killed
                (folder / left).unlink(missing_ok=True)
            journal = Journal(folder / JOURNAL)
            closing.callback(lambda: recorder.close_journal(journal))
            endpoint = open_endpoint(problem, e, self.placements, folder, self.run_name, recorder)
            closing.callback(endpoint.close)
            closing.callback((folder / JOIN).unlink, missing_ok=True)  # its keys are no longer valid
            local = self._local_node() if e.remote_workers and e.local_workers else None
            if local is not None:
                closing.callback((folder / JOIN_HERE).unlink, missing_ok=True)
                closing.callback(local.end, gently=False)
            closing.push(lambda kind, *_: recorder.close_ledger(whole=kind is None))
            recorder.display.header(self.header)
            pool = recorder.supervisor if self._own_workers else NoWorkerPool(wakeup)
            timeouts = Timeouts(e.join_within, e.lease, e.patience, bool(e.remote_workers))
            if self._own_workers:
                self._share(closing)
            if e.workers or e.remote_workers:
                problem.net.release()  # only the workers train and evaluate
                give_back(problem.net.layout.size)
                keep_vectors_apart(problem.net.layout.size)
            lasting = manifest.lasting_digest(self.described)
            coordinator = Coordinator(
                problem,
                self.schedule,
                RunIdentity(self.run_name, self.start.at),
                Workers(endpoint, pool, self._registration(), timeouts, e.lanes),
                Storage(checkpoints, journal, self.recovery, lasting),
                recorder,
            )
            self._began = True
            if trackers := selected(e.track):
                recorder.tracking = Tracking(folder, trackers)
            started()
            outcome = coordinator.run()
            write_model(folder / "model.safetensors", problem, outcome.model)
            recorder.supervisor.stop(gently=True)  # before closing the socket, which may drop envelopes
            if local is not None:
                local.end(gently=True)
            return outcome

    def _share(self, closing: ExitStack) -> None:
        """Share one copy of the frozen parameters and of the start model among this machine's workers."""
        problem, folder = self.problem, self.folder
        for shared in (write_frozen(problem.net.module, folder), write_start(problem.start, folder)):
            if shared is not None:
                closing.callback(shared.unlink, missing_ok=True)
        map_frozen(problem.net.module, folder)
        map_start(problem.start, folder)

    def _local_node(self) -> LocalNode:
        """Start the workers of this machine in a run that also has remote workers."""
        e, experiment = self.execution, self.problem.experiment
        return LocalNode(
            (self.folder / JOIN_HERE).resolve(),
            threads=experiment.threads,
            devices="auto" if experiment.device == "cuda" else "cpu",
            data_dir=str(Path(e.data_dir).resolve()) if e.data_dir else None,
        )

    @property
    def _own_workers(self) -> bool:
        """True if the workers are processes of this machine."""
        return bool(self.execution.workers) and not self.execution.remote_workers

    def _registration(self) -> Registration:
        """Return the settings that a registering worker gets, and the facts that it must match."""
        e, problem, execution = self.problem.experiment, self.problem, self.execution
        remote = bool(execution.remote_workers)
        data = problem.data_digest if remote else ""
        worker_config = WorkerConfig(
            experiment=asdict(e),
            data_dir=str(Path(execution.data_dir).resolve()) if execution.data_dir else None,
            run_dir=None if remote else str(self.folder.resolve()),
            lanes=execution.lanes if execution.lanes > 1 else UNSET,
        )
        expected = WorkerManifest(data, sources_of(problem), self._facts(), processor_name())
        return Registration(worker_config, expected, execution.workers, execution.allow_drift)

    def _facts(self) -> dict[str, str]:
        """Return the facts that all workers must share: those of this process and those of earlier workers.

        If the workers compute on GPUs, the coordinator still computes on the CPU, and knows only the facts
        that do not depend on the device.
        """
        device, mine = self.problem.experiment.device, self.problem.net.device.type
        recorded = manifest.facts_of(document(self.folder / manifest.MANIFEST, Manifest), device)
        facts = facts_of_process(mine, self.probe) if mine == device else facts_of_machine()
        return recorded | facts | {"device": device}
