"""A federation in memory: the algorithms' own methods, no process, no socket, float64 messages.

Clients are quadratic, l_k(w) = 1/2 w' A_k w - b_k' w, from random regressions. Messages are float64
here; only the wire's encoding makes them float32 (`codecs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.algorithm import Algorithm, Context, Task
from fedsim.event_trigger import EventTriggered
from fedsim.learning.params import Layout
from fedsim.learning.shards import QuadraticShard
from fedsim.seeds import RandomStream
from fedsim.wire.envelope import VERSION, Header, decode, encode, pack, unpack
from fedsim.wire.message_context import NOTHING, codec_stream, of_upload
from fedsim.wire.schema import TRIANGLE, check_values, optional_group


def regressions(
    clients: int = 5,
    dims: int = 20,
    *,
    rows: int = 40,
    spread: float = 0.5,
    diagonal: bool = False,
    sizes: tuple[int, ...] | None = None,
    seed: int = 0,
) -> tuple[QuadraticShard, ...]:
    """Quadratic clients A = X'X, b = X'y, columns of X scaled by exp(spread * N(0, 1)).

    diagonal: only the diagonal of A is kept, so that FedLap-Cov's diagonal Hessians are exact.
    """
    draws = torch.Generator().manual_seed(seed)
    shards = []
    for k in range(clients):
        x = torch.randn(rows, dims, generator=draws, dtype=torch.float64)
        x *= torch.exp(spread * torch.randn(dims, generator=draws, dtype=torch.float64))
        hessian, linear = x.T @ x, x.T @ torch.randn(rows, generator=draws, dtype=torch.float64)
        hessian = torch.diag(hessian.diagonal()) if diagonal else hessian
        shards.append(QuadraticShard(hessian, linear, sizes[k] if sizes else 1))
    return tuple(shards)


def minimiser(shards: tuple[QuadraticShard, ...], delta: float) -> Tensor:
    """argmin sum_k l_k(w) + delta/2 |w|^2."""
    matrix = torch.stack([s.hessian for s in shards]).sum(0)
    matrix = matrix + delta * torch.eye(len(matrix), dtype=torch.float64)
    return torch.linalg.solve(matrix, torch.stack([s.linear for s in shards]).sum(0))


def error(result: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|."""
    return float((result - exact).norm() / exact.norm())


def with_part(message: Any, part: Any) -> Any:
    """A broadcast with its optional part filled in."""
    slot = optional_group(type(message))
    assert slot is not None
    return replace(message, **{slot.name: part})


@dataclass
class Federation:
    """Plays rounds. codecs by direction, or None: messages are handed over as they are. start: (P,) where
    clients have no quadratic loss; else zeros."""

    algorithm: Algorithm[Any, Any, Any, Any]
    shards: tuple[QuadraticShard, ...]
    codecs: Mapping[str, Mapping[str, str]] | None = None
    commit_on_send: bool = False
    """A client commits although its upload is lost: docs/references/equations.md#dual-step-and-commit."""
    server: Any = None
    clients: list[Any] = field(default_factory=list)
    round: int = 0
    folds: int = 0
    """Rounds before the present one in which an upload was folded."""
    uploads: dict[int, Any] = field(default_factory=dict)
    """Of the last exchange, as decoded, also lost ones and those that were not sent (+event)."""
    start: Any = None

    def __post_init__(self) -> None:
        self.sizes = tuple(s.size for s in self.shards)
        if self.start is None:
            self.start = torch.zeros(len(self.shards[0].linear), dtype=torch.float64)
        ctx = self.context()
        self.server = self.algorithm.server_init(ctx)
        self.clients = [self.algorithm.client_init(ctx, k) for k in range(len(self.shards))]

    def context(self, exchange: int = 1, asked: int = 0) -> Context:
        layout, rng = Layout.vector(len(self.start)), RandomStream(0, "server", self.round)
        folds = self.folds
        return Context(self.start, layout, self.sizes, self.round, exchange, rng, folds=folds, asked=asked)

    def set_up(self) -> None:
        """Round 0: the exchanges of the set-up, with all clients."""
        assert not self.round
        for exchange in range(1, len(self.algorithm.setup) + 1):
            self._exchange(exchange, range(len(self.shards)), ())

    def play(self, participants: Collection[int] | None = None, lost: Collection[int] = ()) -> None:
        """One round, before the first of all the set-up; `lost` uploads never reach the server."""
        if not self.round:
            self.set_up()
        self.round += 1
        participants = sorted(range(len(self.shards)) if participants is None else participants)
        for exchange in range(1, len(self.algorithm.exchanges) + 1):
            folded = self._exchange(exchange, participants, lost)
        self.folds += folded

    def _exchange(self, exchange: int, participants: Collection[int], lost: Collection[int]) -> bool:
        """Returns whether an upload was folded."""
        ctx = self.context(exchange, len(participants))
        message = self.algorithm.broadcast(self.server, ctx)
        down = self.carry(message, "down")
        ups, self.uploads = [], {}
        trigger = self.algorithm if isinstance(self.algorithm, EventTriggered) and self.round else None
        older = {} if trigger is None else trigger.older(self.server, down, participants)
        for k in participants:
            rng = RandomStream(0, f"client.{exchange}", self.round, k)
            task = Task(self.start, self.sizes, self.round, exchange, k, rng, self.folds, len(participants))
            part = self.algorithm.broadcast_to(self.server, k, ctx)
            got = older.get(k, down) if part is None else self.carry(with_part(message, part), "down")
            draft, up = self.algorithm.client_update(self.clients[k], got, self.shards[k], task)
            stream = codec_stream(0, self.round, exchange, k)
            self.uploads[k] = up = self.carry(up, "up", got, stream)
            if trigger is None:
                committed, sends = self.algorithm.client_commit(draft, got, up, task), True
            else:
                fresh = k not in older
                committed, sends = trigger.decide(trigger, draft, got, up, task, size=1, fresh=fresh)
            if k not in lost:
                ups.append(ctx.arrival(k, got, up if sends else None))
            if k not in lost or self.commit_on_send:
                self.clients[k] = committed
        if ups:
            self.server = self.algorithm.server_update(self.server, down, iter(ups), ctx)
        return bool(ups)

    def carry(
        self, message: Any, direction: str, down: Any = None, stream: RandomStream | None = None
    ) -> Any:
        """Return the message as the other side gets it. down: the decoded broadcast that an upload answers;
        stream: the random stream of the upload's codecs."""
        if self.codecs is None:
            return message
        size, clients = len(self.start), len(self.shards)
        selected, dims = self.codecs[direction], {"P": size, TRIANGLE: size * (size + 1) // 2, "K": clients}
        refs, layout = NOTHING if down is None else of_upload(down, stream), Layout.vector(size)
        payload = encode(message, selected, dims, refs, layout)
        sent = pack(Header(VERSION, "task", "run", fields=payload.fields), payload.frames)
        envelope = unpack([bytes(f) for f in (sent.head, *sent.frames)], "here")
        received = decode(type(message), envelope, selected, dims, "here", refs, layout)
        check_values(received, "here")
        return received

    @property
    def mean(self) -> Tensor:
        return self.algorithm.model(self.server, self.context()).mean


@pytest.fixture
def quadratics() -> SimpleNamespace:
    """regressions, minimiser, error and Federation of this file."""
    return SimpleNamespace(regressions=regressions, minimiser=minimiser, error=error, Federation=Federation)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs an experiment in this process through the real launcher and wire; returns its folder."""
    from fedsim.experiment import Experiment
    from launch.configuration.execution import Execution
    from launch.session.run import launch

    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))

    def run(name: str, **experiment: Any) -> Path:
        execution = Execution(workers=0, devices="cpu", out=str(tmp_path / name))
        return launch(Experiment(**experiment), execution, quiet=True)

    return run
