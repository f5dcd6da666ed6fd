"""Assign tasks and test chunks to workers.

The round machine (fedsim.round_machine) fills the queues and asks for assignments. The choice of a worker for
a task depends on the order of events. The task's result does not: it depends on the TaskId alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set as AbstractSet
from dataclasses import dataclass, field

from fedsim.round_events import ChunkId, Command, Give, ScoreChunk, TaskId, WorkItem

MAX_EVALUATIONS_BEHIND = 2
"""The number of rounds that evaluation may lag behind training before it gets priority."""
ANYWHERE = -1
"""The queue of clients whose state no worker has cached."""


class ProtocolError(Exception):
    """An event that cannot happen: a defect of the caller, or a stale or forged message.

    Examples are a worker that joins twice, and one that answers for a task or chunk that it does not hold.
    """


@dataclass
class TaskAssignment:
    """The queues of waiting work and the loads of the workers.

    lanes: the number of tasks that a worker computes at once. ahead: True if a worker also holds tasks in
    advance.
    """

    lanes: int = 1
    ahead: bool = True
    _load: dict[int, list[WorkItem]] = field(default_factory=dict)
    _waiting: dict[int, deque[TaskId]] = field(default_factory=dict)
    """The waiting tasks, by the worker that has the clients' states cached."""
    _home: dict[int, int] = field(default_factory=dict)
    """The worker that has a client's state cached, by client."""
    _in_flight: dict[TaskId, int] = field(default_factory=dict)
    _taken_back: set[TaskId] = field(default_factory=set)
    _to_score: deque[ChunkId] = field(default_factory=deque)

    # ---- what workers hold

    def holds(self, worker: int, item: WorkItem) -> bool:
        """Return whether a worker is to answer this task, or to score this chunk, now."""
        return item in self._load.get(worker, [])

    def held_by(self, worker: int) -> list[WorkItem]:
        """Return the work that a worker holds, the oldest first."""
        return self._load.get(worker, [])

    @property
    def working(self) -> list[int]:
        """The workers that hold work."""
        return [worker for worker, held in self._load.items() if held]

    @property
    def training_done(self) -> bool:
        """True if no task waits and no worker holds one."""
        return not self._in_flight and not self._waiting_tasks()

    # ---- changes

    def start_exchange(self, tasks: Sequence[TaskId]) -> None:
        """Queue the tasks of an exchange, in the order in which they are to start."""
        self._taken_back = set()
        for task in tasks:
            self._queue(self._home.get(task.client, ANYWHERE)).append(task)

    def start_evaluation(self, round: int, chunks: int) -> None:
        """Queue all chunks of the test set for a round's model."""
        self._to_score.extend(ChunkId(round, chunk) for chunk in range(chunks))

    def join(self, worker: int) -> None:
        """Add a worker without work."""
        if worker in self._load:
            raise ProtocolError(f"worker {worker} joined twice")
        self._load[worker] = []

    def leave(self, worker: int) -> None:
        """Move a worker's tasks and chunks to the front of the queues, and forget which clients it cached."""
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
        self._queue(ANYWHERE).extendleft(reversed(back))
        self._home = {k: w for k, w in self._home.items() if w != worker}

    def take(self, worker: int, task: TaskId) -> None:
        """Remove an answered task from a worker's load."""
        if self._in_flight.get(task) != worker:
            raise ProtocolError(f"worker {worker} does not hold {task}")
        del self._in_flight[task]
        self._load[worker].remove(task)

    def take_back(self, worker: int, task: TaskId) -> None:
        """Take a task from a worker, and put it at the front of the queue."""
        self.take(worker, task)
        self._taken_back.add(task)
        self._home.pop(task.client, None)
        self._queue(ANYWHERE).appendleft(task)

    def _queue(self, home: int) -> deque[TaskId]:
        return self._waiting.setdefault(home, deque())

    def take_chunk(self, worker: int, chunk: ChunkId) -> None:
        """Remove an evaluated chunk from a worker's load."""
        if chunk not in self._load.get(worker, []):
            raise ProtocolError(f"worker {worker} was not evaluating {chunk}")
        self._load[worker].remove(chunk)

    # ---- assignment

    def assign(self, round: int, dropouts: AbstractSet[int]) -> list[Command]:
        """Assign waiting work to workers.

        Training has priority over evaluation, unless evaluation is late: then a worker without a chunk gets
        one. Workers get tasks in turn until each has one for every lane. While many tasks wait, each worker
        gets the same number in advance, so that it does not wait for messages.
        """
        commands: list[Command] = []
        busy = self.lanes * len(self._load)
        for ahead in range(2 * self.lanes):
            for worker in self._by_load():
                if len(self._load[worker]) > ahead:
                    continue
                waiting = self._waiting_tasks()
                scoring = sum(isinstance(item, ChunkId) for item in self._load[worker])
                if not scoring and self._evaluation_is_late(round):
                    commands.append(self._give_chunk(worker))
                elif waiting and (ahead < self.lanes or (self.ahead and waiting > busy)):
                    commands.append(self._give_task(worker, dropouts))
                elif self._to_score and not waiting and scoring <= 1 and ahead < max(2, self.lanes):
                    commands.append(self._give_chunk(worker))
        return commands

    def _evaluation_is_late(self, round: int) -> bool:
        return bool(self._to_score) and self._to_score[0].round < round - MAX_EVALUATIONS_BEHIND

    def _waiting_tasks(self) -> int:
        """Return the number of waiting tasks."""
        return sum(map(len, self._waiting.values()))

    def _by_load(self) -> Sequence[int]:
        """Return the workers, idle ones first; of equally idle ones, first those whose cached clients wait.

        Otherwise an idle worker could get a client whose state another idle worker has cached.
        """
        return sorted(self._load, key=lambda w: (len(self._load[w]), not self._waiting.get(w), w))

    def _give_task(self, worker: int, dropouts: AbstractSet[int]) -> Give:
        """Give a worker a task of a client that it has cached, else of an uncached one, else of any."""
        queues = self._waiting
        queue = queues.get(worker) or queues.get(ANYWHERE) or max(queues.values(), key=len)
        task = queue.popleft()
        self._home[task.client] = worker
        self._load[worker].append(task)
        self._in_flight[task] = worker
        return Give(worker, task, task.client in dropouts, task in self._taken_back)

    def _give_chunk(self, worker: int) -> ScoreChunk:
        chunk = self._to_score.popleft()
        self._load[worker].append(chunk)
        return ScoreChunk(worker, chunk)
