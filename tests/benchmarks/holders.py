"""Accounts for the memory of one task and one fold: bytes per parameter, by holder.

    python -m tests.benchmarks.holders [--tiny]

A task of the second round is computed in this process, and one upload folded. Counted are the buffers of all
tensors that are alive, each once: when the last forward pass begins (of the curvature, where there is one),
after the commit, and after the fold. What a named object holds is its own; "local" is the rest: optimiser,
cavity, curvature. The coordinator's objects are not counted for the worker, nor the other way round. Float32
has 4 bytes a parameter, float64 8. The model is the MLP 64-H-H-10 on digits, with H = 4000 (--tiny: 40).
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from fedsim.round_events import TaskId
from fedsim.wire.envelope import Envelope, decode_own, encode
from protocols import find
from tests.benchmarks.common import options_of
from tests.benchmarks.model_size import HERE
from workers import protocol_messages as messages
from workers.coordinator.aggregation import read_upload
from workers.worker.runtime import WorkerRuntime

ALGORITHMS = ("fedavg", "fedlap_cov", "ivon_admm")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a (nested) dataclass, tuple or mapping."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


class Account:
    """Bytes by holder; a buffer that an earlier holder has is not counted again."""

    def __init__(self, params: int) -> None:
        self.params, self.seen = params, set[int]()
        self.rows: dict[str, float] = {}

    def add(self, holder: str, *values: Any) -> None:
        self.rows[holder] = sum(map(self._own, tensors_in(values))) / self.params

    def leave_out(self, *values: Any) -> None:
        """What the other process would have."""
        for tensor in tensors_in(values):
            self._own(tensor)

    def rest(self, holder: str) -> None:
        """Everything else that is alive, if it is a share of a vector and not a batch."""
        gc.collect()
        alive = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        large = [t for t in alive if t.untyped_storage().nbytes() >= self.params]
        self.rows[holder] = sum(map(self._own, large)) / self.params

    def _own(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.seen:
            return 0
        self.seen.add(storage.data_ptr())
        return storage.nbytes()


def show(title: str, account: Account) -> None:
    parts = ", ".join(f"{holder} {size:.0f}" for holder, size in account.rows.items() if size >= 0.5)
    print(f"{title}: {sum(account.rows.values()):.0f} bytes a parameter ({parts})", flush=True)


def measure(algo: str, hidden: int, scratch: Path) -> None:
    """Two rounds of one client, of which the second is looked at."""
    settings = {"epochs": 1}
    experiment = Experiment(algo=algo, model=f"{HERE}:mlp_{hidden}", clients=8, hyperparameters=settings)
    algorithm = build_algorithm(find(algo), settings)
    problem = Problem.build(experiment, algorithm, None)
    params, layout = problem.net.layout.size, problem.net.layout
    runtime = WorkerRuntime(problem, scratch / algo, "run", 0)
    held: dict[str, Any] = {"elsewhere": ()}
    accounts: dict[str, Account] = {}

    def account() -> Account:
        counted = Account(params)
        counted.add("network", problem.net.weights, problem.net.grads)
        counted.add("start", problem.start)
        counted.add("state", held["state"])
        counted.add("broadcast", held["down"])
        counted.leave_out(held["elsewhere"])
        counted.add("cache of states", [state for state, _ in runtime.states._cache.values()])
        return counted

    def before_batch(*_: object) -> None:
        if held.get("training"):
            accounts["training"] = account()
            accounts["training"].rest("local")

    problem.net.module.register_forward_pre_hook(before_batch)
    update, commit = type(algorithm).client_update, type(algorithm).client_commit

    def watched_update(self: Any, state: Any, down: Any, shard: Any, task: Any) -> Any:
        held.update(state=state, down=down, training=True)
        drafted = update(self, state, down, shard, task)
        held["training"] = False
        return drafted

    def watched_commit(self: Any, draft: Any, down: Any, up: Any, task: Any) -> Any:
        committed = commit(self, draft, down, up, task)
        accounts["commit"] = account()
        accounts["commit"].add("draft", draft)
        accounts["commit"].add("upload", up)
        accounts["commit"].add("next state", committed)
        accounts["commit"].rest("other")
        return committed

    vars_of = {"client_update": watched_update, "client_commit": watched_commit}
    watching = type(f"Watched{algo}", (type(algorithm),), vars_of)
    object.__setattr__(algorithm, "__class__", watching)
    server = algorithm.server_init(problem.context(0, 0))
    base = 0
    for r in (1, 2):
        ctx = problem.context(r, 1, r - 1, 1)
        broadcast = algorithm.broadcast(server, ctx)
        payload = encode(broadcast, problem.codecs["down"], problem.dims, layout=layout)
        down: Any = decode_own(type(broadcast), payload, problem.codecs["down"], problem.dims, layout=layout)
        held["elsewhere"] = (server, broadcast, down)
        reply: Envelope = runtime.handle(
            messages.task("run", 1, TaskId(r, 1, 0, base), payload, False, r - 1, 1)
        )
        if reply.header.kind != "upload":
            raise SystemExit(bytes(reply.frames[0]).decode())
        for name in ("state", "down", "draft"):
            held.pop(name, None)
        up = read_upload(problem, reply, down)
        fold = Account(params)
        fold.leave_out([state for state, _ in runtime.states._cache.values()])
        fold.add("network", problem.net.weights, problem.net.grads)
        fold.add("start", problem.start)
        fold.add("server", server)
        fold.add("broadcast", down)
        fold.add("upload", up)
        server = algorithm.server_update(server, down, iter([(0, up)]), ctx)
        fold.add("next server", server)
        fold.add("model to evaluate", algorithm.model(server, ctx))
        del broadcast
        del up
        fold.rest("other")
        accounts["fold"] = fold
        base = problem.version(r, 1)
    show(f"{algo}, a worker at its last batch", accounts["training"])
    show(f"{algo}, a worker at its commit", accounts["commit"])
    show(f"{algo}, the coordinator after a fold", accounts["fold"])
    print(f"{algo}, a state on the disk: {runtime.states.path(0, base).stat().st_size / params:.0f} bytes")


def main() -> None:
    options = options_of(__doc__).parse_args()
    hidden = 40 if options.tiny else 4000
    with tempfile.TemporaryDirectory() as folder:
        for algo in ALGORITHMS:
            measure(algo, hidden, Path(folder))


if __name__ == "__main__":
    main()
