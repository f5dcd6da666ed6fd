"""`fedsim launch --on ray`: a coordinator on this machine, and a node agent in an actor on every machine.

Ray places the agents in a placement group and assigns GPUs to them. It restarts nothing (max_restarts = 0)
and transfers no tensors: an actor gets the keys of its machine's workers, starts `fedsim node` and returns
its exit code. If the node of an actor is lost, a new actor is requested. Until Ray starts the new actor,
other workers compute its tasks.

Ray has no access control between the jobs of a cluster: anyone who can submit a job can read an actor's
arguments, including the keys. A cluster is trusted as a whole (SECURITY.md).

References:
    https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
    https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fedsim.errors import Interrupted, TaskError, UsageError
from launch.configuration.listen_address import own_address
from launch.engines.job import JOIN_WITHIN, Job
from launch.processes.fork_server import die_with_parent
from workers.place import ENGINE
from workers.scratch import Scratch
from workers.transport.join_credentials import JOIN, JoinCredentials

LOOK = 0.2
"""Seconds between two checks of coordinator and actors."""
ANSWER = 5.0
"""Seconds that a cluster's head may take to accept a connection."""
STOP = 90.0
"""Seconds that the coordinator may take to end after it was told to stop; then it is killed."""


class Ray:
    """An Engine for Ray. Its only option is `address`: auto (this machine's cluster) or ray://HEAD."""

    def plan(self, job: Job) -> str:
        """Return the bundles to request from Ray and the commands to run, as text."""
        agents = f"fedsim node --workers {job.per_node} --threads {job.threads}"
        return (
            f"placement group: {job.nodes} x {self._bundle(job)}, strategy SPREAD\n"
            f"here: {' '.join(self._coordinator(job))}\n"
            f"in an actor of each bundle: {agents}"
        )

    def submit(self, job: Job) -> str:
        """Run the job to its end, or raise TaskError. The same command resumes an interrupted run.

        The coordinator is told to stop after Ctrl-C, and after any error of Ray or of this process.
        """
        ray, again = connected(job.options or {}), f"the same command with --out {job.run} continues"
        job.write_config()
        (job.run / JOIN).unlink(missing_ok=True)  # the keys of an earlier start are no longer valid
        parent = os.getpid()
        coordinator = subprocess.Popen(
            self._coordinator(job), preexec_fn=lambda: die_with_parent(parent), start_new_session=True
        )
        interrupted = False
        try:
            group = ray.util.placement_group([self._bundle(job)] * job.nodes, strategy="SPREAD")
            agents = RayAgents(ray, group, job)
            while coordinator.poll() is None:
                agents.look_after()
                time.sleep(LOOK)
            agents.end()
        except KeyboardInterrupt:
            interrupted = True
        except (ray.exceptions.RayError, OSError, RuntimeError) as e:
            # of a run that has ended, only the agents' end failed, which ray.shutdown brings about, too
            if coordinator.poll() is None:
                raise TaskError(f"Ray failed ({e}), so the run was stopped; {again}") from e
        finally:
            code = _stopped(coordinator)
            ray.shutdown()
        if code == Interrupted.exit_code or (interrupted and code < 0):
            raise Interrupted(f"interrupted; {again}")
        if code:
            error = TaskError(f"the coordinator ended with exit code {code}")
            error.exit_code = code
            raise error
        return f"run folder: {job.run}"

    def _bundle(self, job: Job) -> dict[str, float]:
        gpus = job.per_node * job.gpus_per_worker
        return {"CPU": job.per_node * job.threads} | ({"GPU": gpus} if gpus else {})

    def _coordinator(self, job: Job) -> list[str]:
        again = (job.run / "manifest.json").exists()
        how = (
            ["resume", str(job.run)]
            if again
            else ["launch", "--config", str(job.config), "--out", str(job.run)]
        )
        address = own_address() or "127.0.0.1"
        come_in = ["--remote-workers", str(job.workers), "--bind", f"tcp://{address}:*"]
        return [*FEDSIM, *how, *come_in, "--join-within", str(JOIN_WITHIN)]


def _stopped(coordinator: subprocess.Popen[bytes]) -> int:
    """Return the coordinator's exit code. Tell it to stop if it still runs, and kill it if it does not end
    within STOP seconds or at a second Ctrl-C; a resume continues after the last commit in any case."""
    if coordinator.poll() is None:
        coordinator.send_signal(signal.SIGINT)
    try:
        return coordinator.wait(STOP)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        coordinator.kill()
        return coordinator.wait()


def connected(options: Mapping[str, str] | Sequence[str]) -> Any:
    """Return the module ray, connected to the cluster that the option address names."""
    pairs = dict(options if isinstance(options, Mapping) else (o.partition("=")[::2] for o in options))
    address = pairs.pop("address", "auto")
    if pairs:
        raise UsageError(f"--engine-option {next(iter(pairs))}: on ray there is address=auto or ray://HEAD")
    try:
        import ray
    except ImportError:
        raise UsageError("--on ray needs the package ray: pip install -e '.[ray]'") from None
    try:
        _answers(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as e:
        raise UsageError(f"--on ray: no cluster at {address!r} ({e}); ray start --head makes one") from None
    return ray


def _answers(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT or ray://HOST:PORT; ray.init would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()


# ---- the node agents, in actors

FEDSIM = (sys.executable, "-m", "launch")
END = 20.0
"""Seconds that the agents may take to end after the run; then they are killed."""


class NodeActor:
    """The actor that runs in a bundle of the placement group."""

    def serve(self, credentials: bytes, workers: int, threads: int) -> int:
        """Run a node agent for the workers with these keys; return its exit code. The agent ends with this
        process, however the process ends."""
        parent, keys = os.getpid(), msgspec.json.decode(credentials, type=JoinCredentials)
        with Scratch("fedsim-node-") as folder:
            path = folder / JOIN
            keys.write(path)
            what = ("node", "--join", str(path), "--workers", str(workers), "--seat", str(keys.first))
            return subprocess.Popen(
                [*FEDSIM, *what, "--threads", str(threads)],
                env={**os.environ, ENGINE: "ray"},
                preexec_fn=lambda: die_with_parent(parent),
            ).wait()


class RayAgents:
    """The actors of a run. Ray restarts no actor; this class requests a lost actor again."""

    def __init__(self, ray: Any, group: Any, job: Job) -> None:
        """Start no actor yet. ray: the connected module. group: one bundle for each node of the job."""
        self._ray, self._group, self._job, self._per_node = ray, group, job, job.per_node
        self._futures: dict[Any, int] = {}
        self._actors: dict[int, Any] = {}

    def look_after(self) -> None:
        """Start the agents once the join file exists; restart agents whose actor has died."""
        if not self._actors:
            for bundle in range(self._job.nodes):
                self._start(bundle)
        futures = [*self._futures]
        for future in self._ray.wait(futures, num_returns=len(futures), timeout=0)[0] if futures else []:
            bundle = self._futures.pop(future)
            try:
                self._ray.get(future)  # the agent ended with the run, or the coordinator refused it
            except self._ray.exceptions.RayError:
                self._start(bundle)

    def _start(self, bundle: int) -> None:
        """Request an actor with this bundle's keys; do nothing if the run has no join file (any more)."""
        job, first = self._job, bundle * self._per_node
        try:
            keys = JoinCredentials.read(job.run / JOIN).part(range(first, first + self._per_node))
        except UsageError:
            return
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )
        bundle_spec = self._group.bundle_specs[bundle]
        actor = self._ray.remote(NodeActor).options(
            num_cpus=bundle_spec["CPU"],
            num_gpus=bundle_spec.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        self._actors[bundle] = started = actor.remote()
        self._futures[started.serve.remote(msgspec.json.encode(keys), self._per_node, job.threads)] = bundle

    def end(self) -> None:
        if self._futures:
            self._ray.wait([*self._futures], num_returns=len(self._futures), timeout=END)
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)
