"""Ray: a run is a coordinator on this machine and a node agent on every machine.

Agents are tasks of Ray, which starts a task again if its node is lost. Ray places the agents in a placement
group, assigns GPUs to them, and transfers no tensors: an agent's task gets the keys of its machine's workers.
Until a lost agent is started again, other workers compute its tasks.

Ray has no access control between the jobs of a cluster: anyone who can submit a job can read a task's
arguments, including the keys. A cluster is trusted as a whole (SECURITY.md).

References:
    https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
    https://docs.ray.io/en/latest/ray-core/fault_tolerance/tasks.html (a task whose node is lost runs again)
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from fedsim.errors import Interrupted, TaskError, UsageError
from launch.configuration.listen_address import own_address
from launch.engines.job import Job
from launch.processes.fork_server import die_with_parent
from workers.place import ENGINE
from workers.scratch import Scratch
from workers.transport.join_credentials import JOIN, JoinCredentials

FEDSIM = (sys.executable, "-m", "launch")
LOOK = 0.2
"""Seconds between two checks of the coordinator."""
ANSWER = 5.0
"""Seconds that a cluster's head may take to accept a connection."""
STOP = 90.0
"""Seconds that the coordinator may take to end after it was told to stop; then it is killed."""
END = 20.0
"""Seconds that the agents may take to end after the run; then they are killed."""
RETRIES = 20
"""Restarts of a task whose node was lost."""


class Ray:
    """An Engine for Ray. Its only option is `address`: auto (this machine's cluster) or ray://HEAD."""

    def plan(self, job: Job) -> str:
        """Return the bundles to request from Ray and the commands to run, as text."""
        return (
            f"placement group: {job.nodes} x {_bundle(job)}, strategy SPREAD\n"
            f"here: {' '.join(_coordinator(job))}\n"
            f"in a task of each bundle: fedsim {' '.join(job.agent('KEYS', 'FIRST'))}"
        )

    def submit(self, job: Job) -> str:
        """Run the job to its end, or raise TaskError. The same command resumes an interrupted run.

        The coordinator is told to stop after Ctrl-C, and after any error of Ray or of this process.
        """
        ray, again = connected(job.options), f"the same command with --out {job.run} continues"
        job.write_config()
        (job.run / JOIN).unlink(missing_ok=True)  # the keys of an earlier start are no longer valid
        parent = os.getpid()
        coordinator = subprocess.Popen(
            _coordinator(job), preexec_fn=lambda: die_with_parent(parent), start_new_session=True
        )
        interrupted = False
        try:
            group = ray.util.placement_group([_bundle(job)] * job.nodes, strategy="SPREAD")
            agents = list[Any]()
            while coordinator.poll() is None:
                if not agents and (job.run / JOIN).exists():
                    agents = _agents(ray, group, job)
                time.sleep(LOOK)
            if agents:
                ray.wait(agents, num_returns=len(agents), timeout=END)
            ray.util.remove_placement_group(group)
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


def _bundle(job: Job) -> dict[str, float]:
    gpus = job.per_node * job.gpus_per_worker
    return {"CPU": job.cores} | ({"GPU": gpus} if gpus else {})


def _coordinator(job: Job) -> list[str]:
    command = job.coordinator(str(job.run), str(job.config), (job.run / "manifest.json").exists())
    return [*FEDSIM, *command, "--bind", f"tcp://{own_address() or '127.0.0.1'}:*"]


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


def connected(options: Mapping[str, str]) -> Any:
    """Return the module ray, connected to the cluster that the option address names."""
    address = options.get("address", "auto")
    if others := [name for name in options if name != "address"]:
        raise UsageError(f"--engine-option {others[0]}: on ray there is address=auto or ray://HEAD")
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


def _agents(ray: Any, group: Any, job: Job) -> list[Any]:
    """Start a node agent in each bundle of the group; return the futures of their exit codes."""
    keys, k, futures = JoinCredentials.read(job.run / JOIN), job.per_node, []
    for bundle, first in enumerate(range(0, job.workers, k)):
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        agent = ray.remote(serve_agent).options(
            num_cpus=job.cores,
            num_gpus=k * job.gpus_per_worker,
            max_retries=RETRIES,
            scheduling_strategy=strategy,
        )
        own = msgspec.json.encode(keys.part(range(first, first + k)))
        futures.append(agent.remote(own, job.agent(JOIN, str(first))))
    return futures


def serve_agent(credentials: bytes, agent: list[str]) -> int:
    """Run a node agent for the workers with these keys; return its exit code. The agent ends with this
    process, however the process ends. agent: its command, in which JOIN stands for the join file."""
    parent, keys = os.getpid(), msgspec.json.decode(credentials, type=JoinCredentials)
    with Scratch("fedsim-node-") as folder:
        keys.write(folder / JOIN)
        return subprocess.Popen(
            [*FEDSIM, *(str(folder / JOIN) if word == JOIN else word for word in agent)],
            env={**os.environ, ENGINE: "ray"},
            preexec_fn=lambda: die_with_parent(parent),
        ).wait()
