"""What the battery is played with: short runs through the real coordinator, and the same by hand.

ALGORITHMS           those that the battery is about
problem_of, play     a short run: logistic regression on digits, 3 clients, 2 rounds
steps                the same by hand, method by method
envelope_of, carried   a message's way through the wire
leaves, frozen       a value's parts, and its bits
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsim import plugins
from fedsim.algorithm import Algorithm
from fedsim.experiment import Experiment, build_algorithm, resolved_hyperparameters
from fedsim.participation import Participation, Schedule
from fedsim.problem import Problem
from fedsim.round_events import Commit
from fedsim.wire.envelope import VERSION, Envelope, Header, decode, encode, pack, unpack
from fedsim.wire.ledger import Ledger
from fedsim.wire.ledger_rows import Entry
from fedsim.wire.message_context import NOTHING, MessageContext, of_upload
from fedsim.wire.schema import check_values, optional_group
from fedsim.wire.state_file import encode_state
from launch.runs.summary import digest_of
from protocols import REGISTRY, find
from tests.support.reproducible import without_seconds
from workers.coordinator.loop import Coordinator, Outcome
from workers.coordinator.membership import Registration, Timeouts, Workers
from workers.coordinator.run_records import RunIdentity, Storage
from workers.coordinator.task_timeline import Span
from workers.coordinator.worker_pool import NoWorkerPool
from workers.numerics import Facts
from workers.place import Place
from workers.probe import SHORT
from workers.protocol_messages import WorkerConfig, WorkerManifest
from workers.storage.checkpoints import Checkpoint, Checkpoints, read_checkpoint
from workers.storage.client_states import ClientStates, clients_digest
from workers.storage.growing_file import FileDigest
from workers.storage.journal import Journal
from workers.transport.endpoint import Endpoint, Loopback
from workers.transport.handshake import Hello
from workers.worker.runtime import WorkerRuntime

Class = type[Algorithm[Any, Any, Any, Any]]
CLIENTS, ROUNDS, P = 3, 2, 640

BROUGHT = os.environ.get("FEDSIM_BATTERY", "")
"""path/to/file.py:Name of a user's algorithm, which is then the only one; a registered name will do, too."""

ALGORITHMS: tuple[Class, ...] = (find(BROUGHT),) if BROUGHT else REGISTRY


# ---- playing a run


def problem_of(algorithm: Class, settings: Mapping[str, Any] | None = None, **changes: Any) -> Problem:
    """settings: hyperparameters by dotted name, over those that make a run short."""
    settings = short_settings(algorithm) | dict(settings or {})
    described: dict[str, Any] = {"model": "logistic", "clients": CLIENTS, "rounds": ROUNDS} | changes
    experiment = Experiment(algo=choice_of(algorithm), hyperparameters=settings, **described)
    return Problem.build(experiment, build_algorithm(algorithm, settings), None)


def choice_of(algorithm: Class) -> str:
    """What --algo calls it."""
    return algorithm.name if algorithm in REGISTRY else plugins.absolute(BROUGHT)


def short_settings(algorithm: Class) -> dict[str, Any]:
    """Hyperparameters that make a run short."""
    return {name: value for name, value in SHORT.items() if has_setting(algorithm, name)}


def has_setting(algorithm: Class, name: str) -> bool:
    return any(key.rpartition(".")[2] == name for key in resolved_hyperparameters(algorithm()))


@dataclass
class Recorder:
    """workers.coordinator.loop.RunCallbacks: keeps what it is informed of."""

    entries: list[Entry] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[Span] = field(default_factory=list)
    news: list[str] = field(default_factory=list)

    def committed(self, commit: Commit, entries: list[Entry]) -> tuple[FileDigest, ...]:
        self.entries += entries
        return ()

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self.metrics.append(dict(metrics))

    def spans(self, spans: list[Span]) -> None:
        self.timeline += spans

    def admitted(self, worker: int, facts: Facts, drift: str, place: Place) -> None:
        """Nothing to record."""

    def joined(self, worker: int, hello: Hello) -> None:
        self.news.append(f"{worker} joined")

    def waits(self, why: str) -> None:
        pass

    def left(self, worker: int, why: str) -> None:
        self.news.append(f"{worker} left: {why}")


@dataclass(frozen=True)
class Run:
    """A finished run: entries are all ledger rows; states of all clients at the end."""

    problem: Problem
    folder: Path
    outcome: Outcome
    endpoint: Endpoint
    entries: list[Entry]
    metrics: list[dict[str, Any]]
    states: list[Any]

    @property
    def bits(self) -> tuple[Any, ...]:
        """Everything that must not depend on how the run was carried out."""
        metrics = sorted(self.metrics, key=lambda m: m["round"])
        return bits_of(self.problem, self.folder, self.outcome, self.entries, metrics)

    def checkpoint(self, round: int) -> Checkpoint[Any]:
        path = self.folder / "checkpoints" / f"{round:06d}.checkpoint"
        return read_checkpoint(path, self.problem.algorithm.server_type)


def bits_of(
    problem: Problem, folder: Path, outcome: Outcome, rows: Iterable[Entry], metrics: list[dict[str, Any]]
) -> tuple[Any, ...]:
    """Model, client states, server, versions, the algorithm's ledger rows, metrics."""
    model, states = outcome.model, ClientStates(folder / "state", problem.algorithm.client_type)
    return (
        digest_of(model),
        clients_digest(problem, states, outcome.versions),
        encode_state(outcome.server),
        outcome.versions,
        sorted(e._replace(worker=0) for e in exchanged(rows)),
        without_seconds(metrics),
    )


Connect = Callable[[Problem, Path, Ledger], Endpoint]


def loopback(problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
    return Loopback(ledger, WorkerRuntime(problem, folder, "run", 0))


def play(
    problem: Problem,
    folder: Path,
    participations: Schedule | None = None,
    connect: Connect = loopback,
    workers: int = 0,
    worker_pool: Any = None,
    lanes: int = 1,
) -> Run:
    """One run through the coordinator and the encoded wire."""
    for name in ("state", "checkpoints", "logs"):
        (folder / name).mkdir(parents=True)
    experiment, kind = problem.experiment, problem.algorithm.client_type
    participations = present(participations, problem) if participations else problem.rounds.schedule()
    ledger, recorder = Ledger(centralised=problem.algorithm.centralised), Recorder()
    states = ClientStates(folder / "state", kind)
    checkpoints = Checkpoints(folder / "checkpoints", states)
    endpoint = connect(problem, folder, ledger)
    registration = Registration(
        WorkerConfig(asdict(experiment), run_dir=str(folder)), WorkerManifest("", {}), workers
    )
    journal = Journal(folder / "journal")
    try:
        coordinator = Coordinator(
            problem,
            participations,
            RunIdentity("run", 0.0),
            Workers(
                endpoint,
                worker_pool or NoWorkerPool(),
                registration,
                Timeouts(60.0, 60.0, 60.0),
                lanes=lanes,
            ),
            Storage(checkpoints, journal),
            recorder,
        )
        outcome = coordinator.run()
    finally:
        journal.close()
        endpoint.close()
        checkpoints.close()
    entries = recorder.entries + ledger.close(experiment.rounds)
    initial, fresh = problem.context(0, 0), ClientStates(folder / "state", kind)
    held = [
        fresh.load(k, v) if v else problem.algorithm.client_init(initial, k)
        for k, v in enumerate(outcome.versions)
    ]
    return Run(problem, folder, outcome, endpoint, entries, recorder.metrics, held)


def present(participations: Schedule, problem: Problem) -> Schedule:
    """The same without clients that the problem does not have: a centralised algorithm has one."""
    clients = frozenset(range(len(problem.clients)))

    def restricted(round: int) -> Participation:
        p = participations(round)
        participants = tuple(k for k in p.participants if k in clients)
        return Participation(participants, p.lost_uploads & clients, p.dropouts & clients)

    return restricted


EXCHANGED = ("task", "gone", "upload", "relayed", "sums")


def exchanged(rows: Iterable[Entry]) -> list[Entry]:
    """The rows of broadcasts and uploads: those of kind algorithm, but of a centralised algorithm, too."""
    return [e for e in rows if e.message in EXCHANGED and e.kind != "retry"]


def listed(*participations: Participation) -> Schedule:
    return lambda round: participations[round - 1]


# ---- looking into values


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested dataclasses and tuples."""
    if is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from leaves(getattr(value, f.name), f"{name}.{f.name}".lstrip("."))
    elif isinstance(value, tuple):
        for i, v in enumerate(value):
            yield from leaves(v, f"{name}.{i}")
    else:
        yield name, value


def envelope_of(
    message: object,
    codecs: Mapping[str, str],
    problem: Problem,
    context: MessageContext = NOTHING,
) -> Envelope:
    """The message as it arrives: encoded, and opened from copies of its bytes."""
    payload = encode(message, codecs, problem.messages.dims, context, problem.net.layout)
    sent = pack(Header(VERSION, "task", "run", fields=payload.fields), payload.frames)
    return unpack([bytes(f) for f in (sent.head, *sent.frames)], "here")


def carried(message: Any, problem: Problem, direction: str, down: Any = None) -> Any:
    """The message as the other side gets it; `down`: the decoded broadcast that an upload answers."""
    codecs, context = problem.messages.codecs[direction], NOTHING if down is None else of_upload(down)
    envelope = envelope_of(message, codecs, problem, context)
    return decode(type(message), envelope, codecs, problem.messages.dims, "here", context, problem.net.layout)


@dataclass(frozen=True)
class Step:
    """One client's part of one exchange: arguments and results of client_update and what followed."""

    client: Any
    down: Any
    shard: Any
    task: Any
    draft: Any
    up: Any
    committed: Any


def steps(problem: Problem) -> tuple[list[Step], list[Any], list[Any]]:
    """Two rounds by hand: every client's step, every server state, every message that was sent."""
    algorithm = problem.algorithm
    ctx = problem.context(0, 0)
    server = algorithm.server_init(ctx)
    clients = [algorithm.client_init(ctx, k) for k in range(len(problem.clients))]
    created: list[Step] = []
    servers, messages = [server], []
    for r in range(ROUNDS + 1):
        for e in range(1, len(algorithm.exchanges_in(r)) + 1):
            folds = max(0, r - 1)
            ctx = problem.context(r, e, folds, CLIENTS)
            sent = algorithm.broadcast(server, ctx)
            common, ups = carried(sent, problem, "down"), []
            messages.append(sent)
            for k in range(len(clients)):
                own = algorithm.broadcast_to(server, k, ctx)
                part = optional_group(type(sent))
                if own is not None:
                    assert part is not None and isinstance(own, part.message)
                    messages.append(replace(sent, **{part.name: own}))
                down = carried(replace(sent, **{part.name: own}) if part else sent, problem, "down")
                task, shard = problem.task(r, e, k, folds, CLIENTS), problem.shard(k)
                draft, up = algorithm.client_update(clients[k], down, shard, task)
                messages.append(up)
                seen = carried(up, problem, "up", down)
                check_values(seen, "here")
                committed = algorithm.client_commit(draft, down, seen, task)
                created.append(Step(clients[k], down, shard, task, draft, up, committed))
                clients[k] = committed
                ups.append(ctx.arrival(k, down, seen))
            server = algorithm.server_update(server, common, iter(ups), ctx)
            servers.append(server)
    return created, servers, messages


def frozen(*values: Any) -> list[bytes]:
    """Every bit of states, messages, shards and tensors."""
    return [
        v.detach().contiguous().numpy().tobytes() if isinstance(v, Tensor) else encode_state(v)
        for v in values
    ]
