"""The node agents of a run on Ray: an actor on every bundle of its placement group."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec

from fedsim.errors import UsageError
from launch.engines.job import Job
from launch.processes.fork_server import die_with_parent
from workers.place import ENGINE
from workers.scratch import Scratch
from workers.transport.join_credentials import JOIN, JoinCredentials

FEDSIM = (sys.executable, "-m", "launch")
END = 20.0
"""Seconds for the agents to end with the run, before they are killed."""


class NodeActor:
    """The actor of a bundle."""

    def serve(self, credentials: bytes, workers: int, threads: int) -> int:
        """Run the node agent of these keys' workers; returns its exit code.

        The agent ends with this process, however that ends.
        """
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
    """The actors of a run. Ray restarts none; one whose node is gone is asked for again."""

    def __init__(self, ray: Any, group: Any, job: Job) -> None:
        """ray: the module, connected. group: the placement group, with a bundle for each node of the job."""
        self._ray, self._group, self._job, self._per_node = ray, group, job, job.per_node
        self._futures: dict[Any, int] = {}
        self._actors: dict[int, Any] = {}

    def look_after(self) -> None:
        """Start the agents once the join file is there; restart agents whose actor has died."""
        if not self._actors:
            for bundle in range(self._job.nodes):
                self._start(bundle)
        futures = [*self._futures]
        for future in self._ray.wait(futures, num_returns=len(futures), timeout=0)[0] if futures else []:
            bundle = self._futures.pop(future)
            try:
                self._ray.get(future)  # it ended by itself: with the run, or refused, as the coordinator says
            except self._ray.exceptions.RayError:
                self._start(bundle)

    def _start(self, bundle: int) -> None:
        """Ask for an actor with this bundle's keys; do nothing where the run has no join file (any more)."""
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
        """Wait for the agents, kill those that do not end, and give the machines back."""
        if self._futures:
            self._ray.wait([*self._futures], num_returns=len(self._futures), timeout=END)
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)
