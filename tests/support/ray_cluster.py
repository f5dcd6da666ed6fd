"""A Ray cluster of pretended nodes on this machine.

python -m tests.support.ray_cluster 2            prints its address, and lives until its standard input ends
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.commands import DEADLINE

ARGUMENTS: dict[str, Any] = {"object_store_memory": 80_000_000, "include_dashboard": False}


class RayCluster:
    """A cluster in a process of its own; this one must not have Ray's threads."""

    def __init__(self, nodes: int = 2) -> None:
        command = [sys.executable, "-m", "tests.support.ray_cluster", str(nodes)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": "/tmp"},  # a socket's path has at most 107 bytes
        )
        self.address = self._answer()
        assert self.address, "no cluster"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._answer().endswith("done")

    def close(self) -> None:
        with self._process as process:
            try:
                process.communicate(timeout=DEADLINE)
            finally:
                process.kill()


def main() -> None:
    """One line on standard input ends a node without grace: `remove I`; the answer is `removed`."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**ARGUMENTS, "num_cpus": 0})
    nodes = [cluster.add_node(**ARGUMENTS, num_cpus=5, num_gpus=2) for _ in range(int(sys.argv[1]))]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, number = line.split()
        if word == "remove":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        elif word == "add":
            nodes.append(cluster.add_node(**ARGUMENTS, num_cpus=5, num_gpus=2))
        print(f"{word} done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
