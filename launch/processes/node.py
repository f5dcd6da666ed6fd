"""`fedsim node`: several workers of one machine that share one import of torch.

An engine (Slurm, Ray, Kubernetes, or a person with ssh) places one node agent per machine. The agent starts
workers through a fork server, pins each worker to some of the cores and one of the GPUs that the engine has
assigned, and restarts killed workers. The agent ends with its workers, and the workers end with the agent.
"""

from __future__ import annotations

import os
import platform
import select
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.errors import AccessError, FedsimError, Interrupted, TaskError, UsageError
from launch.numbers import counted
from launch.processes.supervisor import Supervisor
from launch.session.stop_signals import StopRequested, StopSignals
from launch.terminal import say
from workers.coordinator.worker_pool import ProcessExit
from workers.devices import assign_devices, remark
from workers.portable import environment_for
from workers.scratch import Scratch
from workers.transport.eventfd import Wakeup
from workers.transport.join_credentials import JoinCredentials
from workers.worker.seats import rank

MAX_RESTARTS = 3
"""How often a worker that was killed is started again."""


@dataclass(frozen=True)
class Node:
    """The workers that a machine adds to a run.

    Attributes:
        join: The join file.
        workers: The number of workers to start.
        seat: The number of the first worker, "auto" for rank times `workers`, or None for free numbers.
        devices: "auto", "cpu" or a list of this machine's GPUs.
        threads: Cores per worker.
        options: Options of workers.worker.remote.run_joined for all workers.
        logs: The folder of the logs, or None for a temporary one.
    """

    join: Path
    workers: int
    seat: str | None = None
    devices: str = "auto"
    threads: int = 1
    options: Mapping[str, Any] | None = None
    logs: Path | None = None

    def serve(self) -> None:
        """Start the workers, and return when all have ended because the run is over.

        Raises:
            UsageError: if the join file or a worker's number is wrong.
            AccessError: if the run refuses a worker.
            TaskError: if a worker fails, or is killed too often.
            Interrupted: after Ctrl-C or SIGTERM, or if the run was interrupted.
        """
        credentials = JoinCredentials.read(self.join)
        seats = self._seats(credentials)
        os.environ.update(environment_for(credentials.numerics))
        scratch = Scratch("fedsim-node-") if self.logs is None else None
        logs = scratch.path if scratch else Path(str(self.logs))
        logs.mkdir(parents=True, exist_ok=True)
        wakeup = Wakeup()
        supervisor = Supervisor(wakeup)
        try:
            with StopSignals(wakeup, in_process=False) as signals:
                self._serve(supervisor, seats, logs, signals)
        except StopRequested:
            raise Interrupted("interrupted before the workers ran") from None
        finally:
            supervisor.stop(gently=False)
            wakeup.close()
            if scratch:
                scratch.remove()

    def _seats(self, credentials: JoinCredentials) -> Sequence[int | None]:
        """Return the number of each worker; None for a worker that takes a free number.

        Raises:
            UsageError: if the join file lacks a number, or the engine gives no rank.
        """
        if self.seat is None:
            return [None] * self.workers
        if self.seat != "auto" and not self.seat.isdecimal():
            raise UsageError(f"--seat {self.seat!r}: give the number of the first worker, or auto")
        first = rank(os.environ) * self.workers if self.seat == "auto" else int(self.seat)
        return credentials.part(range(first, first + self.workers)).seats

    def _serve(
        self, supervisor: Supervisor, seats: Sequence[int | None], logs: Path, signals: StopSignals
    ) -> None:
        supervisor.start_server()
        placements = assign_devices(self.devices, len(seats), self.threads)
        specs = [
            {
                "index": i,
                "join": str(self.join.resolve()),
                "seat": seat,
                "options": dict(self.options or {}),
                "log": str((logs / f"worker-{i if seat is None else seat:03d}.log").resolve()),
                "cores": placed.cores,
                "env": {"CUDA_VISIBLE_DEVICES": placed.gpu or ""},
            }
            for i, (seat, placed) in enumerate(zip(seats, placements, strict=True))
        ]
        supervisor.start_workers(specs, placements)
        signals.started()
        places = ", ".join(dict.fromkeys(map(str, placements)))
        say(f"{platform.node()}: {counted(len(specs), 'worker')} ({places})")
        if fallback := remark(self.devices):
            say(fallback)
        self._watch(supervisor, len(specs))

    def _watch(self, supervisor: Supervisor, running: int) -> None:
        """Restart killed workers until all workers have ended by themselves.

        Raises:
            Interrupted: after a signal to stop.
            AccessError, TaskError: if a worker ended with an error; the others have ended, too.
        """
        killed: Counter[int] = Counter()
        errors: list[ProcessExit] = []
        while running:
            ready, _, _ = select.select(supervisor.fds(), [], [])
            ended = supervisor.check(ready)
            if ended is None:
                continue
            killed[ended.worker] += ended.killed
            if ended.killed and killed[ended.worker] <= MAX_RESTARTS:
                say(f"worker process {ended.worker} {ended.how}; it is started again")
                supervisor.replace(ended.worker, "")
                continue
            running -= 1
            if ended.status != 0:
                errors.append(ended)
        if errors:
            raise _error(errors[0])


def _error(ended: ProcessExit) -> FedsimError:
    """Return the error for a worker that has ended with an error."""
    if ended.status == Interrupted.exit_code:
        return Interrupted("the run was interrupted; once it is resumed, these workers may join again")
    kind = AccessError if ended.status == AccessError.exit_code else TaskError
    return kind(f"worker process {ended.worker} {ended.how}.\n{ended.log_tail}")


def serve(
    file: Path,
    *,
    workers: int,
    seat: str | None,
    devices: str,
    threads: int,
    logs: Path | None,
    codecs: Sequence[Path] = (),
    url: str | None,
    data_dir: Path | None,
    patience: float,
    **choices: Path | None,
) -> None:
    """Run `fedsim node`, whose options are the arguments. Errors are those of Node.serve."""
    options = {
        "url": url,
        "data_dir": str(data_dir.resolve()) if data_dir else None,
        "patience": patience,
        "choices": {name: str(path) for name, path in choices.items() if path},
        "codecs": [str(path) for path in codecs],
    }
    Node(file, workers, seat, devices, threads, options, logs).serve()
