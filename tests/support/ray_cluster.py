"""A Ray cluster of pretended nodes on this machine.

python -m tests.support.ray_cluster 2            prints its address, and lives until its standard input ends
"""

from __future__ import annotations

import sys
from typing import Any

ARGUMENTS: dict[str, Any] = {
    "object_store_memory": 80_000_000,
    "include_dashboard": False,
}


def main() -> None:
    """One line on standard input ends a node without grace: `remove I`; the answer is `removed`."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**ARGUMENTS, "num_cpus": 0})
    nodes = [cluster.add_node(**ARGUMENTS, num_cpus=4, num_gpus=2) for _ in range(int(sys.argv[1]))]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, number = line.split()
        if word == "remove":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        elif word == "add":
            nodes.append(cluster.add_node(**ARGUMENTS, num_cpus=4, num_gpus=2))
        print(f"{word} done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
