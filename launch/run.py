"""One run from configuration to summary.

The order matters: the fork server is forked off right after torch is imported, before this process
has a thread, a socket or anything else that a fork must not copy.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedsim.errors import FedsimError, Interrupted
from launch.supervisor import Supervisor
from workers.devices import Placement, place
from workers.wakeup import Wakeup

if TYPE_CHECKING:
    from fedsim.experiment import Experiment
    from fedsim.problem import Problem
    from fedsim.wire.ledger import Entry, Ledger
    from launch.display import Display
    from launch.execution import Execution
    from launch.rundir import RunDir
    from workers.coordinator import Outcome
    from workers.endpoint import Endpoint

FRAME_SLACK = 1 << 16


@contextmanager
def stop_signals(wakeup: Wakeup) -> Iterator[None]:
    """SIGINT and SIGTERM wake the main loop, once; a second one ends the process at once.

    At once is safe: the kernel ends the fork server and the workers with this process.
    """
    seen = 0

    def handler(number: int, frame: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            os._exit(130)
        wakeup.set()

    old = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


def process_start() -> float:
    """When this process was started, in seconds since the epoch, from /proc."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def launch(experiment: Experiment, execution: Execution, *, quiet: bool = False) -> Path:
    """Run an experiment; returns the run folder.

    Errors: any FedsimError, after summary.json has been written with the status.
    """
    wakeup = Wakeup()
    supervisor = Supervisor(wakeup)
    places = place(execution.devices, max(1, execution.workers), experiment.threads)
    with stop_signals(wakeup):
        try:
            if execution.workers:
                supervisor.start_server()
            path = _run(experiment, execution, supervisor, places, wakeup, quiet)
        except BaseException:
            supervisor.stop(gently=False)
            raise
    return path


def _run(
    experiment: Experiment,
    execution: Execution,
    supervisor: Supervisor,
    places: tuple[Placement, ...],
    wakeup: Wakeup,
    quiet: bool,
) -> Path:
    import secrets
    from dataclasses import replace

    from fedsim.experiment import build_algorithm
    from fedsim.problem import Problem
    from fedsim.schedules import schedule
    from launch.display import Display
    from launch.rundir import RunDir
    from protocols import find
    from workers.numerics import fix_numerics

    device: Literal["cpu", "cuda"] = "cuda" if places[0].gpu is not None else "cpu"
    experiment = replace(experiment, device=device)
    fix_numerics(experiment.threads, device)
    algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
    data_dir = Path(execution.data_dir).resolve() if execution.data_dir else None
    in_process = not execution.workers
    here = device if in_process else "cpu"
    turnouts = schedule(experiment.participation, clients=experiment.clients, seed=experiment.seed)
    problem = Problem.build(experiment, algorithm, data_dir, here)
    path = Path(execution.out) if execution.out else RunDir.default_path(experiment.algo, experiment.seed)
    rundir = RunDir(path)
    display = Display(experiment.rounds, quiet)
    run = secrets.token_hex(8)
    rundir.write_manifest(_described(experiment, problem), execution, run)
    supervisor.changed = rundir.write_processes
    session = _Session(problem, execution, rundir, display, run)
    try:
        outcome = session.carry_out(supervisor, places, turnouts, wakeup)
        session.finish("done", outcome)
    except Interrupted:
        supervisor.stop(gently=False)
        session.finish("interrupted", None)
        raise Interrupted(f"interrupted after round {session.last_round}; run folder: {path}") from None
    except BaseException as e:
        supervisor.stop(gently=False)
        session.finish("failed", None, str(e) if isinstance(e, FedsimError) else repr(e))
        raise
    finally:
        display.stop()
        rundir.close()
    return path


def _described(experiment: Experiment, problem: Problem) -> dict[str, Any]:
    """The experiment with every default resolved, as the manifest records it."""
    from dataclasses import asdict

    from fedsim.experiment import resolved_hyperparameters

    described = asdict(experiment)
    described["model"] = experiment.model or problem.algorithm.default_model
    described["inputs"] = "raw" if problem.scale == 1.0 else "scaled"
    described["hyperparameters"] = resolved_hyperparameters(problem.algorithm)
    described["params"] = problem.net.layout.size
    described["client_sizes"] = list(problem.sizes)
    return described


@dataclass
class _Session:
    """A run in its folder: writes and shows what the coordinator reports (workers.coordinator.Observer)."""

    problem: Problem
    execution: Execution
    rundir: RunDir
    display: Display
    run: str
    last_round: int = 0
    last_metrics: Mapping[str, Any] | None = None
    ledger: Ledger | None = None
    participations: int = 0

    def carry_out(
        self, supervisor: Supervisor, places: tuple[Placement, ...], turnouts: Any, wakeup: Wakeup
    ) -> Outcome:
        from fedsim.wire.ledger import Ledger
        from workers.coordinator import Coordinator, NoCrew
        from workers.store import Checkpoints, ClientStates

        problem, rundir, workers = self.problem, self.rundir, self.execution.workers
        self.ledger = Ledger()
        states = ClientStates(rundir.path / "state", problem.algorithm.client_type)
        checkpoints = Checkpoints(rundir.path / "checkpoints", states)
        endpoint = self._endpoint(supervisor, places, checkpoints.states)
        try:
            self.display.header(self._header(places))
            orders = {
                "experiment": _wire_experiment(problem.experiment),
                "data_dir": str(Path(self.execution.data_dir).resolve()) if self.execution.data_dir else None,
                "run_dir": str(rundir.path.resolve()),
            }
            coordinator = Coordinator(
                problem,
                endpoint,
                supervisor if workers else NoCrew(wakeup),
                checkpoints,
                self._counted(turnouts),
                self,
                run=self.run,
                workers=workers,
                orders=orders,
                started=process_start(),
            )
            outcome = coordinator.run()
            self._write_model(outcome)
            supervisor.stop(gently=True)  # while the socket is open: closing it may drop stop letters
            return outcome
        finally:
            rundir.append_ledger(self.ledger.close(problem.experiment.rounds))
            endpoint.close()
            checkpoints.close()

    def _endpoint(self, supervisor: Supervisor, places: tuple[Placement, ...], states: Any) -> Endpoint:
        from workers.endpoint import Loopback, ZmqEndpoint
        from workers.worker import WorkerRuntime

        assert self.ledger is not None
        path = self.rundir.path
        if not self.execution.workers:
            return Loopback(self.ledger, WorkerRuntime(self.problem, path, self.run, 0))
        max_frame = 8 * self.problem.net.layout.size + FRAME_SLACK
        endpoint = ZmqEndpoint(self.ledger, self.execution.transport, max_frame)
        try:
            specs = [
                {
                    "index": i,
                    "address": endpoint.address,
                    "token": endpoint.token,
                    "max_frame": max_frame,
                    "log": str((path / "logs" / f"worker-{i:03d}.log").resolve()),
                    "device": placed.device,
                    "cores": placed.cores,
                    "env": {"CUDA_VISIBLE_DEVICES": placed.gpu or ""},
                    "fresh": placed.fresh,
                }
                for i, placed in enumerate(places)
            ]
            supervisor.start_workers(specs, places)
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    def _counted(self, turnouts: Any) -> Any:
        def counted(round: int) -> Any:
            turnout = turnouts(round)
            self.participations += len(turnout.participants)
            return turnout

        return counted

    def _header(self, places: tuple[Placement, ...]) -> list[str]:
        e, p = self.problem.experiment, self.problem
        model = e.model or p.algorithm.default_model
        workers = self.execution.workers
        where = f"{workers} workers over {self.execution.transport}" if workers else "in process"
        devices = ", ".join(dict.fromkeys(str(place) for place in places))
        return [
            f"[bold]{e.algo}[/] on {e.dataset} ({sum(p.sizes):,} of {len(p.dataset.train_targets):,} "
            f"training examples, {len(p.dataset.test_targets):,} test), model {model}, "
            f"P = {p.net.layout.size:,}",
            f"{len(p.clients)} clients ({e.partition}, {min(p.sizes)} to {max(p.sizes)} examples), "
            f"participation {e.participation}, {e.rounds} rounds, seed {e.seed}; {where} ({devices})",
        ]

    # ---- Observer

    def committed(self, round: int, entries: list[Entry]) -> None:
        self.rundir.append_ledger(entries)
        self.last_round = round
        self.display.committed(round)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self.rundir.append_metrics(metrics)
        self.last_metrics = metrics
        self.display.evaluated(metrics)

    def progress(self, round: int, uploads: int, participants: int) -> None:
        self.display.uploads(uploads, participants)

    # ---- the end

    def _write_model(self, outcome: Outcome) -> None:
        from safetensors.torch import save_file

        from fedsim.learning.gaussian import Gaussian

        mean = outcome.model.mean.float().cpu()
        tensors = {name: t.clone() for name, t in self.problem.net.layout.unflatten(mean).items()}
        if isinstance(outcome.model, Gaussian):
            import torch

            precision = torch.as_tensor(outcome.model.precision).float().cpu().expand_as(mean).contiguous()
            named = self.problem.net.layout.unflatten(precision)
            tensors |= {f"precision.{name}": t.clone() for name, t in named.items()}
        save_file(
            tensors, self.rundir.path / "model.safetensors", {"algorithm": self.problem.experiment.algo}
        )

    def finish(self, status: str, outcome: Outcome | None, error: str | None = None) -> None:
        """Write summary.json and show the bill."""
        from fedsim.learning.gaussian import Gaussian
        from fedsim.wire.ledger import Ledger
        from workers.store import ClientStates, clients_digest, model_digest

        p, ledger = self.problem, self.ledger or Ledger()
        params = p.net.layout.size
        down, up = ledger.bytes_of("algorithm", "down"), ledger.bytes_of("algorithm", "up")
        messages = self.participations * len(p.algorithm.exchanges)
        summary: dict[str, Any] = {
            "format": 1,
            "status": status,
            "error": error,
            "rounds": self.last_round,
            "params": params,
            "test_accuracy": self.last_metrics["test_accuracy"] if self.last_metrics else None,
            "test_nll": self.last_metrics["test_nll"] if self.last_metrics else None,
            "bytes": ledger.nested(),
            "bytes_down": down,
            "bytes_up": up,
            "participations": self.participations,
            "units_of_p_down": down / (4 * params * messages) if messages else 0.0,
            "units_of_p_up": up / (4 * params * messages) if messages else 0.0,
            "seconds_to_first_round": None,
            "seconds_round_median": None,
            "seconds_clients": None,
            "model_sha256": None,
            "clients_sha256": None,
        }
        if outcome is not None:
            mean, precision = outcome.model.mean, None
            if isinstance(outcome.model, Gaussian):
                import torch

                precision = torch.as_tensor(outcome.model.precision).expand_as(mean).contiguous()
            states = ClientStates(self.rundir.path / "state", p.algorithm.client_type)
            later = outcome.seconds_rounds[1:] or outcome.seconds_rounds
            summary |= {
                "seconds_to_first_round": round(outcome.seconds_to_first_round, 3),
                "seconds_round_median": round(statistics.median(later), 6) if later else None,
                "seconds_clients": round(outcome.seconds_clients, 3),
                "model_sha256": model_digest(mean, precision),
                "clients_sha256": clients_digest(p, states, outcome.versions),
            }
        self.rundir.write_json("summary.json", summary)
        if outcome is not None:
            self.display.bill(summary, str(self.rundir.path))


def _wire_experiment(experiment: Experiment) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(experiment)
