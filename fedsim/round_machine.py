"""The round machine without I/O: events in, commands out.

It knows who takes part, which task goes to which worker, in what order uploads are folded, and when
a round is committed; it knows nothing of sockets, threads, tensors or algorithms. Every decision that
can change bits depends on ids and versions only. Which worker computes a task, and when, does depend
on the order of events, and changes nothing: a task's result depends on its TaskId alone.

Commit on fold: a client's new version is named by the round's commit, and only if its upload was
folded. Versions count exchanges from 1 (`version`); 0 is client_init. An algorithm with a set-up has a
round 0 before round 1, in which all clients take part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedsim.participation import Participation, Schedule


@dataclass(frozen=True)
class TaskId:
    """What a result depends on: the broadcast of (round, exchange), the client, and the version of
    its state that the task starts from."""

    round: int
    exchange: int
    client: int
    base: int


# ---- events


@dataclass(frozen=True)
class Joined:
    """A worker is ready."""

    worker: int


@dataclass(frozen=True)
class Left:
    """A worker is gone, and with it the answers to whatever it held; it may join again."""

    worker: int


@dataclass(frozen=True)
class Arrived:
    """A worker has answered a task: its upload is here whole, to be checked when it is folded; or, if the
    schedule says that this client is gone, it has said that nothing will come."""

    worker: int
    task: TaskId
    late: bool = False
    """Too late on the virtual clock, or not fit to be folded: it is paid for and not folded."""


@dataclass(frozen=True)
class Rejected:
    """A worker has answered a task with what must not be folded, and it is to be computed once more."""

    worker: int
    task: TaskId


@dataclass(frozen=True)
class Scored:
    """A worker has evaluated one chunk of the test set."""

    worker: int
    round: int
    chunk: int


@dataclass(frozen=True)
class Folded:
    """server_update has returned."""


# ---- commands


@dataclass(frozen=True)
class Open:
    """Encode the broadcast of this exchange; start folding unless every upload will be lost."""

    round: int
    exchange: int
    participants: tuple[int, ...]
    folds: bool


@dataclass(frozen=True)
class Give:
    """gone: the client gets the broadcast, as the ledger shall know, and computes nothing. again: the task
    was given before, to a worker that has left or that answered with what must not be folded."""

    worker: int
    task: TaskId
    dropout: bool = False
    retry: bool = False


@dataclass(frozen=True)
class Release:
    """Hand this client's upload to the fold: it is next in ascending order of ids."""

    client: int


@dataclass(frozen=True)
class Drop:
    """Forget this client's upload: the schedule lost it, or it came after the deadline."""

    client: int


@dataclass(frozen=True)
class Close:
    """No further upload will be folded in this exchange."""


@dataclass(frozen=True)
class Commit:
    """The round is complete; versions of all clients as of now."""

    round: int
    participants: tuple[int, ...]
    folded: tuple[int, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class ScoreChunk:
    """Let this worker evaluate one chunk of the test set with the model of `round`."""

    worker: int
    round: int
    chunk: int


@dataclass(frozen=True)
class Finish:
    """All rounds are committed and evaluated."""


Event = Joined | Left | Arrived | Rejected | Scored | Folded
Command = Open | Give | Release | Drop | Close | Commit | ScoreChunk | Finish

MAX_EVALUATIONS_BEHIND = 2
ANYWHERE = -1


def version(round: int, exchange: int, exchanges: int, setup: int = 0) -> int:
    """The version of a client's state that this exchange makes: exchange e of round r makes
    S + (r-1)*E + e, and e in the set-up, whose exchanges are S."""
    return setup + (round - 1) * exchanges + exchange if round else exchange


def evaluates(round: int, rounds: int, eval_every: int, chunks: int) -> bool:
    """Whether a round's model is evaluated: round 0, every eval_every-th and the last."""
    return bool(chunks) and (round % eval_every == 0 or round == rounds)


class ProtocolError(Exception):
    """An event that cannot happen: a defect of the caller, or a stale or forged message."""


@dataclass
class RoundMachine:
    """Feed it events with `handle`; carry out what it returns, in order, before the next event.

    cost(client) orders the tasks of a round, largest first, which balances workers; ties go by id.
    chunks: how many pieces the test set has; 0 switches evaluation off. setup: exchanges of round 0.
    """

    rounds: int
    exchanges: int
    schedule: Schedule
    versions: list[int]
    cost: Callable[[int], float]
    chunks: int
    eval_every: int = 1
    setup: int = 0
    round: int = 0
    _exchange: int = 0
    _participation: Participation = field(default_factory=lambda: Participation(()))
    _load: dict[int, list[TaskId | tuple[int, int]]] = field(default_factory=dict)
    _waiting: dict[int, deque[TaskId]] = field(default_factory=dict)
    _home: dict[int, int] = field(default_factory=dict)
    _in_flight: dict[TaskId, int] = field(default_factory=dict)
    _taken_back: set[TaskId] = field(default_factory=set)
    _arrived: set[int] = field(default_factory=set)
    _late: set[int] = field(default_factory=set)
    _to_fold: deque[int] = field(default_factory=deque)
    _drafts: dict[int, int] = field(default_factory=dict)
    _reached: dict[int, int] = field(default_factory=dict)
    _folding: bool = False
    _to_score: deque[tuple[int, int]] = field(default_factory=deque)
    _unscored: dict[int, int] = field(default_factory=dict)
    _finished: bool = False

    def start(self, resumed: bool = False, unscored: Sequence[int] = ()) -> list[Command]:
        """Open the first round. Call once, before any event.

        resumed: `round` was committed before (0: the set-up), and of these rounds the evaluation is missing.
        """
        for number in unscored:
            self._evaluate(number)
        if not self.round and not resumed:
            self._evaluate(0)
            if self.setup:
                return self._begin(Participation(tuple(range(len(self.versions)))))
        return self._next_round()

    def handle(self, event: Event) -> list[Command]:
        """See below.

        Raises:
            ProtocolError: for an event that does not fit the state.
        """
        if isinstance(event, Joined):
            if event.worker in self._load:
                raise ProtocolError(f"worker {event.worker} joined twice")
            self._load[event.worker] = []
            commands: list[Command] = []
        elif isinstance(event, Left):
            commands = self._on_left(event.worker)
        elif isinstance(event, Arrived):
            commands = self._on_arrived(event)
        elif isinstance(event, Rejected):
            commands = self._on_rejected(event)
        elif isinstance(event, Scored):
            commands = self._on_scored(event)
        else:
            commands = self._on_folded()
        return commands + self._assign()

    def is_dropout(self, task: TaskId) -> bool:
        """Whether the schedule takes this client out after the download."""
        return task.client in self._participation.dropouts

    def holds(self, worker: int, piece: TaskId | tuple[int, int]) -> bool:
        """Whether a worker is to answer this task, or to score this chunk (round, chunk), now."""
        return piece in self._load.get(worker, [])

    def held_by(self, worker: int) -> list[TaskId]:
        """The training tasks that a worker holds."""
        return [t for t in self._load.get(worker, []) if isinstance(t, TaskId)]

    @property
    def working(self) -> list[int]:
        """The workers that hold work."""
        return [worker for worker, held in self._load.items() if held]

    def doing(self, worker: int) -> TaskId | tuple[int, int] | None:
        """What a worker is at: its oldest task, or chunk (round, chunk)."""
        return next(iter(self._load.get(worker, [])), None)

    def evaluates(self, round: int) -> bool:
        """Whether this round's model is evaluated."""
        return evaluates(round, self.rounds, self.eval_every, self.chunks)

    def busy(self) -> bool:
        """True while workers hold work, so that silence of all of them means trouble."""
        return any(self._load.values())

    # ---- rounds

    def _next_round(self) -> list[Command]:
        commands: list[Command] = []
        while self.round < self.rounds:
            self.round += 1
            participation = self.schedule(self.round)
            commands += self._begin(participation)
            if participation.participants:
                return commands
            commands += self._commit()
        return commands + self._maybe_finish()

    def _begin(self, participation: Participation) -> list[Command]:
        self._exchange, self._participation, self._drafts, self._reached = 0, participation, {}, {}
        return self._next_exchange() if participation.participants else []

    def _next_exchange(self) -> list[Command]:
        self._exchange += 1
        participants = self._receivers()
        self._to_fold = deque(sorted(participants))
        self._arrived, self._late, self._taken_back = set(), set(), set()
        self._folding = any(
            k not in self._participation.lost_uploads | self._participation.dropouts for k in participants
        )
        for k in sorted(participants, key=lambda k: (-self.cost(k), k)):
            # within a round a client goes on from its own draft, also if the schedule loses what it sends
            base = self._reached.get(k, self.versions[k])
            task = TaskId(self.round, self._exchange, k, base)
            self._waiting.setdefault(self._home.get(k, ANYWHERE), deque()).append(task)
        return [Open(self.round, self._exchange, tuple(sorted(participants)), self._folding)]

    def _receivers(self, later: bool = False) -> tuple[int, ...]:
        """Whom this exchange is with: whoever is gone got the broadcast of the first one and no other."""
        participants = self._participation.participants
        if later or self._exchange > 1:
            return tuple(k for k in participants if k not in self._participation.dropouts)
        return participants

    def _on_left(self, worker: int) -> list[Command]:
        """Its tasks and chunks go to the front of the queues, and its clients have no home any more."""
        if worker not in self._load:
            raise ProtocolError(f"worker {worker} left without having joined")
        back: list[TaskId] = []
        for item in reversed(self._load.pop(worker)):
            if isinstance(item, TaskId):
                del self._in_flight[item]
                self._taken_back.add(item)
                back.insert(0, item)
            else:
                self._to_score.appendleft(item)
        back += self._waiting.pop(worker, ())
        if back:
            self._waiting.setdefault(ANYWHERE, deque()).extendleft(reversed(back))
        self._home = {k: w for k, w in self._home.items() if w != worker}
        return []

    def _on_arrived(self, event: Arrived) -> list[Command]:
        task = event.task
        self._take_from(event.worker, task)
        self._arrived.add(task.client)
        if event.late:
            self._late.add(task.client)
        commands: list[Command] = []
        while self._to_fold and self._to_fold[0] in self._arrived:
            k = self._to_fold.popleft()
            if k in self._participation.dropouts:
                continue
            self._reached[k] = version(self.round, self._exchange, self.exchanges, self.setup)
            if k in self._participation.lost_uploads or k in self._late:
                commands.append(Drop(k))
            else:
                self._drafts[k] = self._reached[k]
                commands.append(Release(k))
        if not self._to_fold:
            commands += [Close()] if self._folding else self._exchange_done()
        return commands

    def _on_rejected(self, event: Rejected) -> list[Command]:
        """The task is given again before all others, to whoever is free first."""
        self._take_from(event.worker, event.task)
        self._taken_back.add(event.task)
        self._home.pop(event.task.client, None)
        self._waiting.setdefault(ANYWHERE, deque()).appendleft(event.task)
        return []

    def _take_from(self, worker: int, task: TaskId) -> None:
        if self._in_flight.get(task) != worker:
            raise ProtocolError(f"worker {worker} does not hold {task}")
        del self._in_flight[task]
        self._load[worker].remove(task)

    def _on_folded(self) -> list[Command]:
        if self._to_fold or not self._folding:
            raise ProtocolError("folded before all uploads were released")
        self._folding = False
        return self._exchange_done()

    def _exchange_done(self) -> list[Command]:
        if self._exchange < (self.exchanges if self.round else self.setup) and self._receivers(later=True):
            return self._next_exchange()
        return self._commit() + self._next_round()

    def _commit(self) -> list[Command]:
        for k, created in self._drafts.items():
            self.versions[k] = created
        if self.round and self.evaluates(self.round):  # the start model is evaluated at the start
            self._evaluate(self.round)
        participants = self._participation.participants
        return [Commit(self.round, participants, tuple(sorted(self._drafts)), tuple(self.versions))]

    # ---- evaluation, which fills the gaps between training tasks

    def _evaluate(self, round: int) -> None:
        if self.chunks:
            self._unscored[round] = self.chunks
            self._to_score.extend((round, chunk) for chunk in range(self.chunks))

    def _on_scored(self, event: Scored) -> list[Command]:
        piece = (event.round, event.chunk)
        if piece not in self._load.get(event.worker, []):
            raise ProtocolError(f"worker {event.worker} was not evaluating {piece}")
        self._load[event.worker].remove(piece)
        self._unscored[event.round] -= 1
        if not self._unscored[event.round]:
            del self._unscored[event.round]
        return self._maybe_finish()

    def _maybe_finish(self) -> list[Command]:
        done = self.round == self.rounds and not self._unscored and not self._folding
        if done and not self._in_flight and not self._count() and not self._finished:
            self._finished = True
            return [Finish()]
        return []

    # ---- assignment

    def _assign(self) -> list[Command]:
        """Training first, evaluation where a worker would idle; a second task in advance while there
        is plenty, so that no worker waits for a message, but not at the end of a round."""
        commands: list[Command] = []
        for ahead in (0, 1):
            for worker in self._by_load():
                if len(self._load[worker]) > ahead:
                    continue
                waiting = self._count()
                if ahead == 0 and self._evaluation_is_late():
                    commands.append(self._give_score(worker))
                elif waiting and (ahead == 0 or waiting > len(self._load)):
                    task = self._next_task(worker)
                    self._home[task.client] = worker
                    self._load[worker].append(task)
                    self._in_flight[task] = worker
                    dropout, retry = task.client in self._participation.dropouts, task in self._taken_back
                    commands.append(Give(worker, task, dropout, retry))
                elif self._to_score and not waiting:
                    commands.append(self._give_score(worker))
        return commands

    def _evaluation_is_late(self) -> bool:
        return bool(self._to_score) and self._to_score[0][0] < self.round - MAX_EVALUATIONS_BEHIND

    def _count(self) -> int:
        return sum(len(tasks) for tasks in self._waiting.values())

    def _next_task(self, worker: int) -> TaskId:
        """A client's tasks go where its state is cached; an idle worker takes over from the longest queue."""
        queues = self._waiting
        queue = queues.get(worker) or queues.get(ANYWHERE) or max(queues.values(), key=len)
        return queue.popleft()

    def _by_load(self) -> Sequence[int]:
        """Idle workers first, and among them those whose own clients wait: or else a worker without
        any would take a client from one that is just as idle and holds its state."""
        return sorted(self._load, key=lambda w: (len(self._load[w]), not self._waiting.get(w), w))

    def _give_score(self, worker: int) -> ScoreChunk:
        piece = self._to_score.popleft()
        self._load[worker].append(piece)
        return ScoreChunk(worker, *piece)
