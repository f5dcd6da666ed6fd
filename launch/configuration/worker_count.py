"""The number of workers for --workers auto, and of lanes for --lanes auto; and how many workers fit."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.errors import UsageError
from launch.configuration.execution import AUTO, Execution
from workers.devices import gpus_of

if TYPE_CHECKING:  # imports torch, but the fork server must start before
    from fedsim.problem import Problem

THREADS = 4
"""Threads of a worker process. Limits of processes count threads."""
SHARE = 0.7
"""The share of the available memory to use. The rest is for the page cache and other programs."""
PROCESS_BYTES = 60 * 2**20
"""Memory of a process without its vectors, in bytes."""
VECTORS, PER_STATE_VECTOR = 20, 6
"""A process has VECTORS vectors of P float32 values, and PER_STATE_VECTOR more for each vector in a client's
first state (docs/benchmarks.md, "Models of millions of parameters")."""


GROUP = Path("/sys/fs/cgroup")
"""The folder of this process's control group, as a container sees it."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""The file with the path of this process's control group in each hierarchy, as the machine sees it."""


def by_cores(threads: int, clients: int, gpus: int) -> tuple[int, str]:
    """Return the number of workers before the model is known, and the reason.

    The number is one per GPU, or one for every `threads` cores if `gpus` is 0 (the run computes on the CPU),
    but at most one per client.
    """
    cores, remark = usable_cores()
    workers, why = (gpus, f"{gpus} GPUs") if gpus else (max(1, cores // threads), remark)
    if not gpus and threads > 1:
        why += f" with {threads} threads a worker"
    return (workers, why) if workers <= clients else (clients, f"{clients} clients")


def usable_cores() -> tuple[int, str]:
    """Return the number of cores that this process may use, and a text with it for messages.

    A control group, such as that of `docker --cpus=1.5`, limits the time of all cores and leaves every core
    usable. The number is then the limit, rounded up.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    if quota is None or quota >= cores:
        return cores, f"{cores} cores"
    return max(1, math.ceil(quota)), f"{cores} cores with a CPU quota of {quota:g} (control group)"


def cpu_quota() -> float | None:
    """Return how many cores' time the control group and the groups around it allow; None without a limit."""
    quotas = []
    for group in _groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # no such file; or `max`
                words = " ".join((group / name).read_text(encoding="ascii") for name in names)
                limit, period = map(int, words.split())
                quotas += [limit / period] if limit > 0 < period else []  # -1 is no limit
    return min(quotas, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those around it, of versions 2 and 1."""
    yield GROUP
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    own = [line.split(":", 2)[1:] for line in lines]
    for names, path in [*own, (controller, "/")]:
        if names and controller not in names.split(","):
            continue
        root = GROUP / names
        folder = root / path.lstrip("/")
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(root))


def by_memory(problem: Problem) -> int:
    """Return the number of workers that fit into the available memory beside the coordinator; at least 1."""
    from fedsim.wire.state_file import state_chunks

    state = problem.algorithm.client_init(problem.context(0, 0), 0)
    held = sum(memoryview(chunk).nbytes for chunk in state_chunks(state))
    process = PROCESS_BYTES + VECTORS * 4 * problem.net.layout.size + PER_STATE_VECTOR * held
    return max(1, int(SHARE * available_memory()) // process - 1)


def check_room(workers: int) -> None:
    """Check that this number of worker processes can be started, whatever the model.

    Raises:
        UsageError: if the available memory or the limit of processes does not allow it.
    """
    memory, processes = available_memory(), _allowed_threads() // THREADS
    for most, why in (
        (memory // PROCESS_BYTES, f"{memory / 2**30:.1f} GiB of memory are available"),
        (processes, "the limit of processes (ulimit -u, or pids.max of the control group) is reached"),
    ):
        if workers > most:
            raise UsageError(
                f"--workers {workers}: {why}, which is enough for {max(0, most)} at most; take fewer, or auto"
            )


def _allowed_threads() -> int:
    """Return how many threads more this user and this control group may have."""
    allowed = [1 << 31]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid():  # root has no such limit
        allowed.append(soft)
    for group in _groups("pids"):
        with suppress(OSError, ValueError):  # no such file; or `max`
            most, now = (int((group / name).read_text("ascii")) for name in ("pids.max", "pids.current"))
            allowed.append(most - now)
    return min(allowed)


def available_memory() -> int:
    """Return the available memory in bytes, of the machine or of the control group if that has less.

    Files that no process has read lately (inactive_file) are available: the kernel drops them from the page
    cache when a process needs the memory. MemAvailable and the tools of containers count in the same way.
    """
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used, stat = (
            (GROUP / name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current", "memory.stat")
        )
        if limit == "max":
            return available
        cached = dict(line.split() for line in stat.splitlines()).get("inactive_file", "0")
        return min(available, int(limit) - int(used) + int(cached))
    except (OSError, ValueError):
        return available


def decide(workers: int, why: str, problem: Problem) -> tuple[int, str]:
    """Return the number of workers for this problem, and a line with the reason."""
    fit = by_memory(problem)
    if fit < workers:
        memory = f"{available_memory() / 2**30:.0f} GiB of memory for {problem.net.layout.size:,} parameters"
        why = f"{memory}; {why} would allow {workers}"
        workers = fit
    return workers, f"workers auto: {workers}, for there are {why}"


LANES, LARGE = 10, 1 << 22
"""The number of parallel tasks with which small networks use a GPU fully (docs/benchmarks.md), and the number
of parameters from which one task does."""


def lanes_of(execution: Execution, problem: Problem) -> int:
    """Return the number of parallel tasks of a worker: 1 on a CPU, and by default 1 for a large model."""
    where = "on the CPU" if problem.experiment.device == "cpu" else "" if execution.workers else "in process"
    if where:
        if execution.lanes > 1:
            raise UsageError(
                f"--lanes {execution.lanes}: lanes are streams of a worker's GPU, and this run computes "
                f"{where}; leave it out"
            )
        return 1
    if execution.lanes != AUTO:
        return execution.lanes
    if problem.net.layout.size >= LARGE:
        return 1
    gpus = 0 if execution.remote_workers else gpus_of(execution.devices)
    sharing = -(-execution.workers // gpus) if gpus else 1
    return min(max(1, LANES // sharing), -(-len(problem.clients) // execution.workers))
