"""One run in its folder: sets everything up, carries it out, writes what there is to know about it."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape

from fedsim import plugins, traces
from fedsim.errors import FedsimError, Interrupted
from fedsim.experiment import Experiment, build_algorithm, resolved_hyperparameters
from fedsim.participation import Schedule, schedule
from fedsim.problem import Problem
from fedsim.round_machine import Commit
from fedsim.virtual_clock import is_file
from fedsim.wire.ledger import Entry, Ledger
from fedsim.wire.schema import all_fields
from launch.display import Display
from launch.execution import Execution
from launch.processes.supervisor import Supervisor
from launch.runs import manifest
from launch.runs.resume import Stored
from launch.runs.summary import process_start, summarise, write_model
from launch.runs.writer import RunDir
from protocols import find
from workers.coordinator.loop import Coordinator, Outcome
from workers.coordinator.membership import Timeouts
from workers.coordinator.registration import Registration, WorkerManifest
from workers.coordinator.task_timeline import Span
from workers.coordinator.worker_pool import NoWorkerPool
from workers.devices import Placement
from workers.memory import set_malloc_thresholds
from workers.numerics import fix_numerics
from workers.probe import probe
from workers.storage.journal import Journal
from workers.storage.recovery import NOTHING, Recovery, recover
from workers.storage.store import Checkpoints, ClientStates
from workers.storage.upload_archive import uploads_folder
from workers.transport.dealer import Hello
from workers.transport.endpoint import Endpoint, Loopback
from workers.transport.eventfd import Wakeup
from workers.transport.join_credentials import FORMAT, JOIN, JoinCredentials, KeyPair
from workers.transport.listeners import CurveListener, local_listener
from workers.transport.revocation import REVOKED, Revocations
from workers.transport.router import ZmqEndpoint
from workers.worker.runtime import WorkerRuntime

FRAME_SLACK = 1 << 16
HELD = 2
"""Tasks that a worker may have answered before the coordinator looks: one, and one given in advance."""
STATE_FACTOR = 16
"""A client's state, which remote workers borrow, is at most so many times as long as a message's field."""


@dataclass
class Session:
    """A run from its manifest to its summary; also the coordinator's Observer."""

    problem: Problem
    execution: Execution
    placements: tuple[Placement, ...]
    schedule: Schedule
    rundir: RunDir
    display: Display
    supervisor: Supervisor
    recovery: Recovery | None = None
    run_name: str = field(default_factory=lambda: secrets.token_hex(8))
    ledger: Ledger = field(default_factory=Ledger)
    last_round: int = 0
    last_metrics: Mapping[str, Any] | None = None
    took_part: Counter[int] = field(default_factory=Counter)
    folded: Counter[int] = field(default_factory=Counter)
    """How often, by client."""
    messages: int = 0
    started: float = field(default_factory=process_start)
    """Seconds since the epoch, from which the time to the first round counts."""

    @staticmethod
    def prepare(
        experiment: Experiment,
        execution: Execution,
        placements: tuple[Placement, ...],
        supervisor: Supervisor,
        quiet: bool,
        stored: Stored | None = None,
    ) -> Session:
        """Check everything that can be wrong, then make the run folder with its manifest; or go on with the
        stored run that is there."""
        device: Literal["cpu", "cuda"] = "cuda" if placements[0].gpu is not None else "cpu"
        experiment = replace(experiment, device=device)
        # before denormals are flushed: "> 0" is stored as ">= the smallest denormal", which would be 0
        algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
        fix_numerics(experiment.threads, "cpu" if execution.workers else device)
        data_dir = Path(execution.data_dir).resolve() if execution.data_dir else None
        problem = Problem.build(experiment, algorithm, data_dir, "cpu" if execution.workers else device)
        participations = schedule(
            experiment.participation, clients=experiment.clients, seed=experiment.seed, sizes=problem.sizes
        )
        problem.clock  # noqa: B018  (checks the options now)
        default = RunDir.default_path(experiment.algo, experiment.seed)
        rundir = RunDir(Path(execution.out) if execution.out else default, resumed=stored is not None)
        try:
            display = Display(problem.experiment.rounds, quiet)
            session = Session(problem, execution, placements, participations, rundir, display, supervisor)
            today = manifest.describe(session.described(), execution, session.run_name, probe(problem))
            if stored is None:
                rundir.write_json("manifest.json", today)
            else:
                session._go_on(stored, today)
        except BaseException:
            rundir.close()  # its lock: this process may try again
            raise
        return session

    def _go_on(self, stored: Stored, today: dict[str, Any]) -> None:
        """Take over what earlier starts of the run have left.

        Raises:
            MismatchError: if what must not change has changed.
            DiskError: if the disk cannot be read or written.
        """
        stored.check(today)
        experiment, folder = self.problem.experiment, self.rundir.path
        self.run_name = stored.manifest["run"]
        self.recovery = recover(folder, self.problem)
        self.rundir.cut(self.recovery)
        self.ledger.restore(self.rundir.ledger_rows())
        for label in (record["about"] for record in self.recovery.commits.values()):
            self._count(label["number"], label["participants"], label["folded"])
        before = dict(stored.manifest)
        resumes = [*before.get("resumes", []), {k: today[k] for k in ("started", "execution", "command")}]
        before["experiment"] = {**before["experiment"], "rounds": experiment.rounds}
        self.rundir.write_json("manifest.json", before | {"resumes": resumes})
        for why in self.recovery.skipped:
            self.display.note(f"not used: {why}")
        last = self.recovery.round
        where = f"after round {last}" if last > NOTHING else "from the start, for no round was committed"
        self.display.note(f"{folder} goes on {where}, start {self.recovery.epoch}")

    def described(self) -> dict[str, Any]:
        """The experiment with every default resolved, as the manifest records it; sources: the user's own
        files and their sha256."""
        experiment, problem = self.problem.experiment, self.problem
        return asdict(experiment) | {
            "hyperparameters": resolved_hyperparameters(problem.algorithm.unwrapped),
            "params": problem.net.layout.size,
            "client_sizes": list(problem.sizes),
            "data": problem.data_digest,
            "sources": plugins.sources(plugins.all_choices(experiment))
            | traces.digest(experiment.participation)
            | ({experiment.link: traces.sha256(experiment.link)} if is_file(experiment.link) else {}),
        }

    def run(self, wakeup: Wakeup) -> None:
        """See below.

        Raises:
            FedsimError: any FedsimError, after summary.json has been written with the status.
        """
        supervisor = self.supervisor
        supervisor.changed = self.rundir.write_processes
        set_malloc_thresholds()
        try:
            outcome = self._carry_out(wakeup)
            summary = self._summary("done", outcome)
            self.display.traffic_summary(summary, str(self.rundir.path))
            self._verify(outcome)
            if self.problem.eval_samples and "ensemble_accuracy" not in summary:
                self.display.note("no average over posterior samples: this algorithm's model is a point")
        except Interrupted:
            supervisor.stop(gently=False)
            self._summary("interrupted")
            where = f"interrupted after round {self.last_round}; fedsim resume {self.rundir.path} goes on"
            raise Interrupted(where) from None
        except BaseException as e:
            supervisor.stop(gently=False)
            self._summary("failed", error=str(e) if isinstance(e, FedsimError) else repr(e))
            raise
        finally:
            self.display.stop()
            self.rundir.close()

    def _verify(self, outcome: Outcome) -> None:
        """See below.

        Raises:
            FedsimError: if the kernel has counted other bytes than the ledger.
        """
        if not self.execution.verify_bytes:
            return
        left = outcome.kernel_residual
        if left is None or any(left.values()):
            raise FedsimError(f"--verify-bytes: kernel minus ledger is {left}; some bytes are unexplained")
        streams = {d: f"{self.ledger.booked(d):,}" for d in ("down", "up")}
        self.display.note(
            f"kernel and ledger agree: {streams['down']} bytes down and {streams['up']} up, residual 0"
        )

    def _summary(
        self, status: str, outcome: Outcome | None = None, error: str | None = None
    ) -> dict[str, Any]:
        summary = summarise(
            self.problem,
            self.ledger,
            status=status,
            error=error,
            rounds=self.last_round,
            metrics=self.last_metrics,
            took_part=[self.took_part[k] for k in range(len(self.problem.clients))],
            folded=[self.folded[k] for k in range(len(self.problem.clients))],
            messages=self.messages,
            outcome=outcome,
            states=self._states(),
        )
        self.rundir.write_json("summary.json", summary)
        return summary

    def _states(self) -> ClientStates:
        return ClientStates(self.rundir.path / "state", self.problem.algorithm.client_type)

    def _carry_out(self, wakeup: Wakeup) -> Outcome:
        supervisor, problem, rundir = self.supervisor, self.problem, self.rundir
        with ExitStack() as closing:  # all of it, also if one of them fails
            # a resume reads the first three, and a run that is done has all of them
            synced = ("journal", "ledger.csv", "metrics.jsonl", "model.safetensors")
            beside = [rundir.path / name for name in synced]
            checkpoints = Checkpoints(rundir.path / "checkpoints", self._states(), beside)
            if self.recovery is not None:
                checkpoints.adopt(self.recovery.kept)
            closing.callback(checkpoints.close)
            journal = Journal(rundir.path / "journal")
            closing.callback(journal.close)
            endpoint = self._endpoint()
            closing.callback(endpoint.close)
            closing.callback((rundir.path / JOIN).unlink, missing_ok=True)  # its keys open nothing any more
            closing.callback(lambda: rundir.append_ledger(self.ledger.close(problem.experiment.rounds)))
            self.display.header(self._header())
            coordinator = Coordinator(
                problem,
                endpoint,
                supervisor if self._own_workers else NoWorkerPool(wakeup),
                checkpoints,
                self.schedule,
                self,
                journal,
                run=self.run_name,
                registration=self._registration(),
                timeouts=self._timeouts(),
                started=self.started,
                recovery=self.recovery,
                keep=uploads_folder(rundir.path) if self.execution.keep_uploads else None,
            )
            outcome = coordinator.run()
            write_model(rundir.path / "model.safetensors", problem, outcome.model)
            supervisor.stop(gently=True)  # while the socket is open: closing it may drop stop envelopes
            return outcome

    @property
    def _own_workers(self) -> bool:
        return bool(self.execution.workers) and not self.execution.remote_workers

    def _timeouts(self) -> Timeouts:
        e = self.execution
        return Timeouts(e.join_within, e.lease, e.patience, bool(e.remote_workers))

    def _registration(self) -> Registration:
        e, problem, execution = self.problem.experiment, self.problem, self.execution
        remote = bool(execution.remote_workers)
        data = problem.data_digest if remote else ""
        worker_config = {
            "experiment": asdict(e),
            "data_dir": str(Path(execution.data_dir).resolve()) if execution.data_dir else None,
            "run_dir": None if remote else str(self.rundir.path.resolve()),
        }
        return Registration(
            worker_config,
            WorkerManifest(data, plugins.sources(plugins.computing_choices(e))),
            execution.workers,
        )

    def _curve_endpoint(self, max_frame: int, envelope: int) -> Endpoint:
        """Open the CURVE listener and write RUN/join.json. Its keys are new: those of an earlier start open
        nothing, and which of them were revoked is forgotten. envelope: bytes of the longest upload."""
        path, revocations = self.rundir.path / JOIN, Revocations(self.rundir.path / REVOKED)
        path.unlink(missing_ok=True)
        revocations.clear()
        server, count = KeyPair.new(), self.execution.remote_workers
        pairs = tuple(KeyPair.new() for _ in range(count))
        listener = CurveListener(self.execution.bind, server, pairs, revocations)
        largest = STATE_FACTOR * max_frame
        endpoint = ZmqEndpoint(
            self.ledger, listener, largest, HELD * (envelope + largest)
        )  # a draft before each
        written_credentials = JoinCredentials(
            FORMAT, self.run_name, endpoint.address, server.public, largest, pairs
        )
        try:
            written_credentials.write(path)
        except BaseException:
            endpoint.close()
            raise
        self.display.note(
            f"waiting for {count} workers at {endpoint.address}, at most {self.execution.join_within:g} s; "
            f"elsewhere: fedsim worker --join {path.resolve()}"
        )
        return endpoint

    def _endpoint(self) -> Endpoint:
        path = self.rundir.path
        if not self.execution.workers:
            return Loopback(self.ledger, WorkerRuntime(self.problem, path, self.run_name, 0))
        largest = max(self.problem.largest_field, 4 * self.problem.net.layout.size)
        max_frame = 2 * largest + FRAME_SLACK
        # a field with its indices is never longer than dense, so its frames together are not above max_frame
        envelope = max_frame * max(len(all_fields(e.up)) for e in self.problem.exchanges)
        if self.execution.remote_workers:
            return self._curve_endpoint(max_frame, envelope)
        listener = local_listener(self.execution.transport)
        endpoint = ZmqEndpoint(self.ledger, listener, max_frame, HELD * envelope)
        try:
            specs = [
                {
                    "index": i,
                    "address": endpoint.address,
                    "token": listener.token,
                    "max_frame": max_frame,
                    "log": str((path / "logs" / f"worker-{i:03d}.log").resolve()),
                    "device": placed.device,
                    "cores": placed.cores,
                    "env": {"CUDA_VISIBLE_DEVICES": placed.gpu or ""},
                    "fresh": placed.fresh,
                }
                for i, placed in enumerate(self.placements)
            ]
            self.supervisor.start_workers(specs, self.placements)
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    def _header(self) -> list[str]:
        e, p = self.problem.experiment, self.problem
        workers = self.execution.workers
        where = f"{workers} workers over {self.execution.transport}" if workers else "in process"
        if self.execution.remote_workers:
            where = f"{workers} remote workers"
        devices = ", ".join(dict.fromkeys(str(assign_devices) for assign_devices in self.placements))
        # commas, because rich takes a word between two colons for an emoji
        algo, dataset, model = (escape(plugins.short(choice)) for choice in (e.algo, e.dataset, e.model))
        return [
            f"[bold]{algo}[/] on {dataset}, {sum(p.sizes):,} of {len(p.dataset.train_targets):,} "
            f"training examples, {len(p.dataset.test_targets):,} test",
            f"model {model}, P = {p.net.layout.size:,}; {len(p.clients)} clients ({e.partition}, "
            f"{min(p.sizes)} to {max(p.sizes)} examples)",
            f"{e.rounds} rounds, participation {e.participation}, seed {e.seed}; {where} ({devices})",
        ]

    # ---- Observer

    def spans(self, spans: list[Span]) -> None:
        self.rundir.append_timeline(spans)

    def joined(self, worker: int, hello: Hello) -> None:
        if self.execution.remote_workers:
            self.display.note(f"worker {worker} comes from {hello.host}, process {hello.pid}")
            self.supervisor.note_remote_worker(worker, hello.pid, hello.host)

    def left(self, worker: int, why: str) -> None:
        self.display.note(f"worker {worker} is gone: {why}")
        self.supervisor.note_left(worker)

    def committed(self, commit: Commit, entries: list[Entry]) -> int:
        end = self.rundir.append_ledger(entries)
        self._count(commit.round, commit.participants, commit.folded)
        self.display.committed(commit.round)
        return end

    def _count(self, round: int, participants: Sequence[int], folded: Sequence[int]) -> None:
        self.last_round = round
        if round:
            self.took_part.update(participants)
            self.folded.update(folded)
        self.messages += len(participants) * len(self.problem.algorithm.exchanges_in(round))

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        # JSON has no NaN: a diverged model has null
        self.last_metrics = {k: None if v != v else v for k, v in metrics.items()}
        self.rundir.append_metrics(self.last_metrics)
        self.display.evaluated(metrics)
