"""The round machine: it takes events and returns commands, without I/O.

It decides which clients take part, in what order uploads are folded, and when a round is committed. It does
not use sockets, threads, tensors or algorithms. Every decision that can change results depends on ids and
versions only. The choice of a worker for a task depends on the order of events, but does not change results
(fedsim.task_assignment).

Commit on fold: a round's commit names a client's new version only if the client's upload was folded.
Versions count exchanges from 1 (fedsim.round_events.version), and version 0 is from client_init. An algorithm
with a set-up has a round 0 before round 1, in which all clients take part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedsim.participation import Participation, Schedule
from fedsim.round_events import (
    Arrived,
    Close,
    Command,
    Commit,
    Drop,
    Event,
    Finish,
    Joined,
    Left,
    Open,
    Rejected,
    Release,
    Scored,
    TaskId,
    WorkItem,
    evaluates,
    version,
)
from fedsim.task_assignment import MAX_EVALUATIONS_BEHIND, ProtocolError, TaskAssignment

__all__ = ["MAX_EVALUATIONS_BEHIND", "Phase", "ProtocolError", "RoundMachine"]

Phase = Literal["ready", "collecting", "folding", "evaluating", "finished"]
"""The stages of a run, in their order."""


@dataclass
class RoundMachine:
    """The decisions of a run, one event at a time.

    Give it events with `handle`, and execute the commands that it returns, in order, before the next event.

    Attributes:
        cost: The cost of a client's task. Costly tasks start first, to balance workers; ties go by id.
        order: Sorts clients into the order of the fold (fedsim.tree); by default ascending ids.
        chunks: The number of chunks of the test set; 0 disables evaluation.
        setup: The number of exchanges in round 0.
        lanes: The number of tasks that a worker computes at once.
        ahead: True if a worker gets its next task before it answers the last one.
        round: The current round.
        folded_rounds: The number of committed rounds, without the set-up, that folded an upload.
        has_target: True if the run ends with the first round that reaches a target accuracy. No round is then
            opened while a score of an earlier round is missing.
        target_reached: True if a committed round reached the target accuracy; no other round is then opened.
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
    folded_rounds: int = 0
    has_target: bool = False
    target_reached: bool = False
    order: Callable[[Iterable[int]], list[int]] = sorted
    lanes: int = 1
    ahead: bool = True
    _assignment: TaskAssignment = field(init=False)
    _exchange: int = 0
    _participation: Participation = field(default_factory=lambda: Participation(()))
    _arrived: set[int] = field(default_factory=set)
    _late: set[int] = field(default_factory=set)
    _to_fold: deque[int] = field(default_factory=deque)
    _drafts: dict[int, int] = field(default_factory=dict)
    _reached: dict[int, int] = field(default_factory=dict)
    _folding: bool = False
    _unscored: dict[int, int] = field(default_factory=dict)
    _awaits_scores: bool = False
    _finished: bool = False

    def __post_init__(self) -> None:
        self._assignment = TaskAssignment(lanes=self.lanes, ahead=self.ahead)

    def start(self, resumed: bool = False, unscored: Sequence[int] = ()) -> list[Command]:
        """Open the first round. Call it once, before any event.

        resumed: True if an earlier process committed `round` (0: the set-up). unscored: committed rounds
        without an evaluation.
        """
        for number in unscored:
            self._evaluate(number)
        if not self.round and not resumed:
            self._evaluate(0)
            if self.setup:
                return self._begin(Participation(tuple(range(len(self.versions)))))
        return self._next_round()

    def handle(self, *events: Event) -> list[Command]:
        """Process one or more simultaneous events, and return the commands that follow.

        An event that does not fit the state raises a ProtocolError and changes nothing.
        """
        commands = [command for event in events for command in self._take(event)]
        return commands + self._assignment.assign(self.round, self._participation.dropouts)

    def _take(self, event: Event) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Joined(worker):
                self._assignment.join(worker)
            case Left(worker):
                self._assignment.leave(worker)
            case Arrived():
                commands = self._on_arrived(event)
            case Rejected(worker, task):
                self._assignment.take_back(worker, task)
            case Scored():
                commands = self._on_scored(event)
            case _:
                commands = self._on_folded()
        return commands

    @property
    def phase(self) -> Phase:
        """The phase of the run, which says what the machine waits for.

        ready: `start` has not been called. collecting: answers of this exchange are missing; an upload is
        folded as soon as all uploads before it in the fold have arrived, and idle workers evaluate. folding:
        all uploads are released, and server_update has not returned. evaluating: no round is open, and scores
        are missing (those of the last rounds, or those that decide whether the target accuracy is reached).
        finished: Finish was returned.
        """
        if self._finished:
            return "finished"
        if self._to_fold:
            return "collecting"
        if self._folding:
            return "folding"
        return "evaluating" if self._unscored else "ready"

    def is_dropout(self, task: TaskId) -> bool:
        """Return whether this client is a dropout: it gets the broadcast and sends nothing."""
        return task.client in self._participation.dropouts

    def holds(self, worker: int, item: WorkItem) -> bool:
        """Return whether a worker is to answer this task, or to score this chunk, now."""
        return self._assignment.holds(worker, item)

    def held_by(self, worker: int) -> list[TaskId]:
        """Return the training tasks that a worker holds."""
        return [item for item in self._assignment.held_by(worker) if isinstance(item, TaskId)]

    @property
    def working(self) -> list[int]:
        """The workers that hold work; while there are any, a long silence of all workers is a failure."""
        return self._assignment.working

    def doing(self, worker: int) -> list[WorkItem]:
        """Return the oldest tasks and chunks that a worker holds, as many as it may compute now."""
        return self._assignment.held_by(worker)[: self.lanes]

    def evaluates(self, round: int) -> bool:
        """Return whether this round's model is evaluated."""
        return evaluates(round, self.rounds, self.eval_every, self.chunks)

    # ---- rounds

    def _next_round(self) -> list[Command]:
        commands: list[Command] = []
        while self.round < self.rounds and not self.target_reached:
            self._awaits_scores = self.has_target and max(self._unscored, default=0) > 0
            if self._awaits_scores:
                return commands
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
        self._to_fold = deque(self.order(participants))
        self._arrived, self._late = set(), set()
        self._folding = any(
            k not in self._participation.lost_uploads | self._participation.dropouts for k in participants
        )
        # within a round a client continues from its own draft, even if the schedule loses its upload
        self._assignment.start_exchange(
            [
                TaskId(self.round, self._exchange, k, self._reached.get(k, self.versions[k]))
                for k in sorted(participants, key=lambda k: (-self.cost(k), k))
            ]
        )
        asked, here = len(self._participation.participants), tuple(sorted(participants))
        return [Open(self.round, self._exchange, here, self._folding, self.folded_rounds, asked)]

    def _receivers(self, later: bool = False) -> tuple[int, ...]:
        """Return the clients of this exchange, or of the next one (later).

        A dropout gets the broadcast of the first exchange and no other.
        """
        participants = self._participation.participants
        if later or self._exchange > 1:
            return tuple(k for k in participants if k not in self._participation.dropouts)
        return participants

    def _on_arrived(self, event: Arrived) -> list[Command]:
        task = event.task
        self._assignment.take(event.worker, task)
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
        for k, draft in self._drafts.items():
            self.versions[k] = draft
        self.folded_rounds += bool(self.round and self._drafts)
        if self.round and self.evaluates(self.round):  # the initial model is evaluated by `start`
            self._evaluate(self.round)
        participants = self._participation.participants
        folded, versions = tuple(sorted(self._drafts)), tuple(self.versions)
        return [Commit(self.round, participants, folded, versions, self.folded_rounds)]

    # ---- evaluation, which fills the gaps between training tasks

    def _evaluate(self, round: int) -> None:
        if self.chunks:
            self._unscored[round] = self.chunks
            self._assignment.start_evaluation(round, self.chunks)

    def _on_scored(self, event: Scored) -> list[Command]:
        round = event.chunk.round
        self._assignment.take_chunk(event.worker, event.chunk)
        self._unscored[round] -= 1
        if not self._unscored[round]:
            del self._unscored[round]
            self.target_reached = self.target_reached or event.reached
        return self._next_round() if self._awaits_scores else self._maybe_finish()

    def _maybe_finish(self) -> list[Command]:
        last = self.round == self.rounds or self.target_reached
        done = last and not self._unscored and not self._folding
        if done and self._assignment.training_done and not self._finished:
            self._finished = True
            return [Finish()]
        return []
