"""Shows where the time of one client's task and of one fold goes, by operation.

    python -m tests.benchmarks.waterfall [--algo fedlap_cov] [--rounds 12] [--tiny]

The settings are those of tests.benchmarks.steady_state, in one process with one thread. Each row is an
operation without the operations inside it: CPU milliseconds (the mean of all rounds), and the bytes that
its tensor operations read, write and allocate. Traffic is counted in a run of its own, because counting takes
time: reads and writes are the sizes of the arguments and results of every torch operation that is no view, as
if nothing stayed in a cache; allocations are the sizes of new results. Bytes that numpy, xxh3 and files move
are not counted.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsim.evaluation import Evaluation
from fedsim.learning import gaussian
from fedsim.messages import Messages
from fedsim.round_values import Task
from launch.configuration.execution import Execution
from launch.session.run import launch
from protocols import find
from tests.benchmarks.common import FEW, FULL, fashion_shaped, options_of
from tests.benchmarks.steady_state import experiment
from workers.coordinator import aggregation
from workers.coordinator.aggregation import AggregationThread
from workers.coordinator.broadcasts import Broadcasts
from workers.storage.client_states import ClientStates
from workers.worker.runtime import WorkerRuntime

ROOTS = ("a task", "a fold", "the next broadcast", "a chunk of evaluation")
"""The operations that no other one contains; what is called inside one of them belongs to it."""


class Clock:
    """CPU time and traffic by root and operation, without the operations inside.

    milliseconds, calls: by (root, operation). traffic: bytes read, written and allocated. runs: by root.
    """

    def __init__(self, counts: bool) -> None:
        self.mode, self.thread = Traffic(self) if counts else nullcontext(), threading.local()
        self.milliseconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self.traffic: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        self.runs: dict[str, int] = defaultdict(int)

    @property
    def stack(self) -> list[tuple[tuple[str, str], list[float]]]:
        """The operations of this thread that are under way, each with the seconds spent inside it."""
        result: list[tuple[tuple[str, str], list[float]]] = self.thread.__dict__.setdefault("stack", [])
        return result

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        stack = self.stack
        if not stack and name not in ROOTS:
            yield
            return
        key, inside, before = (stack[0][0][0] if stack else name, name), [0.0], time.thread_time()
        stack.append((key, inside))
        try:
            with self.mode if len(stack) == 1 else nullcontext():
                yield
        finally:
            stack.pop()
            spent = time.thread_time() - before
            if stack:
                stack[-1][1][0] += spent
            self.milliseconds[key] += 1000 * (spent - inside[0])
            self.calls[key] += 1
            self.runs[name] += not stack

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            with self.within(name):
                return function(*arguments, **named)

        return measured


class Traffic(TorchDispatchMode):
    """Adds the bytes that operations read, write and allocate to the innermost operation of a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in sources}
        results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        new = [x for x in results if x.untyped_storage().data_ptr() not in storages]
        if new or func._schema.is_mutable:  # a view reads and writes nothing
            total = self.clock.traffic[self.clock.stack[-1][0]]
            total[0] += sum(x.nbytes for x in sources)
            total[1] += sum(x.nbytes for x in results)
            total[2] += sum(x.nbytes for x in new)
        return result


def operations(algo: str) -> list[tuple[Any, str, str]]:
    """The measured functions: owner, name, and the operation's name in the table."""
    kind = find(algo)
    return [
        (WorkerRuntime, "_train", "a task"),
        (WorkerRuntime, "_decoded", "decode the broadcast"),
        (ClientStates, "load", "read and check the state"),
        (kind, "client_update", "client_update"),
        (Task, "minimise", "local training"),
        (Task, "curvature", "curvature"),
        *((gaussian, name, "formulas of Gaussians") for name in ("_applied", "evaluate")),
        (Messages, "sent", "encode the message and decode it"),
        (kind, "client_commit", "client_commit"),
        (ClientStates, "save", "hash and write the state"),
        (AggregationThread, "_fold", "a fold"),
        (aggregation, "read_upload", "decode and check an upload"),
        (kind, "add", "add"),
        (kind, "from_sums", "from_sums"),
        (Broadcasts, "encode", "the next broadcast"),
        (Evaluation, "score", "a chunk of evaluation"),
    ]


def measured(algo: str, data: Path, rounds: int, out: Path, counts: bool) -> Clock:
    """Run with every operation wrapped."""
    clock = Clock(counts)
    with ExitStack() as stack:
        for owner, name, label in operations(algo):
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, clock.wrapped(label, getattr(owner, name))))
        place = Execution(workers=0, devices="cpu", out=str(out), data_dir=str(data))
        launch(experiment(algo, rounds), place, quiet=True)
    return clock


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--algo", default="fedlap_cov")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDSIM_CACHE"] = f"{scratch}/cache"
        data = fashion_shaped(Path(scratch) / "data", FEW if options.tiny else FULL)
        rounds = 3 if options.tiny else options.rounds
        timed = measured(options.algo, data, rounds, Path(scratch) / "timed", counts=False)
        counted = measured(options.algo, data, 3, Path(scratch) / "counted", counts=True)
    print(f"{options.algo}: CPU milliseconds, and MB of tensors, of each root and the operations inside it")
    print("| root | operation | calls | ms | MB read | MB written | MB allocated |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for root in ROOTS:
        for key in [(root, root), *(key for key in timed.calls if key[0] == root and key[1] != root)]:
            n = timed.runs[root]
            traffic = [total / counted.runs[root] / 1e6 for total in counted.traffic[key]]
            cells = [
                f"{timed.calls[key] / n:.1f}",
                f"{timed.milliseconds[key] / n:.2f}",
                *(f"{x:.1f}" for x in traffic),
            ]
            name = "the rest" if key[1] == root else key[1]
            print(f"| {root} | {name} | {' | '.join(cells)} |")
        total = sum(ms for key, ms in timed.milliseconds.items() if key[0] == root) / timed.runs[root]
        print(f"| {root} | in all | | {total:.2f} | | | |")


if __name__ == "__main__":
    main()
