"""What comes in from workers that have joined: uploads, absences, states and scores."""

from __future__ import annotations

from collections.abc import Callable

from fedsim.errors import WireError
from fedsim.learning.gaussian import Gaussian
from fedsim.problem import Problem
from fedsim.round_machine import Arrived, Event, Scored, Spoilt, TaskId
from fedsim.wire.envelope import Letter
from fedsim.wire.ledger import Ledger, stream_bytes
from workers.coordinator.aggregation import read_upload
from workers.coordinator.broadcasts import Dispatch
from workers.coordinator.exchange_clock import Simulated
from workers.coordinator.response_filter import Fence, Misconduct, checksums
from workers.coordinator.round_log import Scoreboard
from workers.storage.journal import Journal
from workers.storage.store import ClientStates
from workers.storage.upload_spool import Spool
from workers.worker.runtime import task_of, unpack_score


class Intake:
    """handle: gives the machine an event, and carries out what follows."""

    def __init__(
        self,
        problem: Problem,
        fence: Fence,
        dispatch: Dispatch,
        simulated: Simulated,
        board: Scoreboard,
        spool: Spool,
        states: ClientStates,
        ledger: Ledger,
        journal: Journal,
        handle: Callable[[Event], None],
    ) -> None:
        self.problem, self.fence, self.dispatch, self.simulated = problem, fence, dispatch, simulated
        self.board, self.spool, self.states = board, spool, states
        self.ledger, self.journal, self._handle = ledger, journal, handle
        self.seconds_clients = 0.0
        self._again: set[TaskId] = set()
        """Tasks of this exchange that are computed once more (bad_uploads = retry)."""

    def take(self, worker: int, letter: Letter) -> bool:
        """False: an echo, which was dropped.

        Errors: Misconduct if no worker that keeps to the protocol sends this; TaskError, DiskError.
        """
        try:
            counts = self._take(worker, letter)
        except Misconduct:
            self._does_not_count(worker, letter)
            raise
        if not counts:
            h = letter.header
            self.journal.append("echo", kind=h.kind, round=h.round, client=h.client, worker=worker)
            self._does_not_count(worker, letter)
        return counts

    def _does_not_count(self, worker: int, letter: Letter) -> None:
        """An algorithm's rows are of what was folded, or lost by the schedule."""
        if letter.header.kind == "upload":
            self.ledger.book_as_retry(letter, worker)

    def _take(self, worker: int, letter: Letter) -> bool:
        h = letter.header
        if h.run != self.dispatch.run:
            raise Misconduct(f"answers for run {h.run!r}, and this is {self.dispatch.run!r}")
        take = {"upload": self._upload, "absent": self._absent, "draft": self._draft, "score": self._score}
        if h.kind not in take:
            raise Misconduct(f"sent a letter of kind {h.kind!r}")
        if not self.fence.admits(worker, letter):
            return False
        take[h.kind](worker, letter)
        return True

    def _upload(self, worker: int, letter: Letter) -> None:
        task, h, loans = task_of(letter), letter.header, self.dispatch.loans
        if loans is not None and loans.lacks(worker, task.client, self._makes(task)):
            raise Misconduct(f"uploaded {task} without the state that goes with it")
        self._answered(worker, letter)
        seconds, about = h.micros / 1e6, self.board[task.round]
        about.seconds_clients += seconds
        self.seconds_clients += seconds
        bad, policy = self._unfit(worker, letter), self.problem.experiment.bad_uploads
        if bad and policy == "retry" and task not in self._again:
            self._once_more(worker, letter, bad)
            return
        self._again.discard(task)
        self.fence.answered(letter)
        self.journal.append(
            "upload",
            round=task.round,
            exchange=task.exchange,
            client=task.client,
            worker=worker,
            xxh3=checksums(letter),
        )
        self.spool.put(task.client, letter, worker)
        late = self.simulated.late(task, stream_bytes(letter))
        skipped = bool(bad) and policy == "skip" and not late
        if late:
            about.late = tuple(sorted({*about.late, task.client}))
        if skipped:
            self.journal.append("refused", round=h.round, exchange=h.exchange, client=h.client, why=bad)
            about.refused = tuple(sorted({*about.refused, h.client}))
        self._handle(Arrived(worker, task, late or skipped))

    def _unfit(self, worker: int, letter: Letter) -> str:
        """Why this upload must not be folded, if somebody is to know before the fold; '' otherwise: with
        bad_uploads = stop the fold finds out, and the run stops."""
        if self.problem.experiment.bad_uploads == "stop":
            return ""
        try:
            read_upload(self.problem, letter, self.dispatch.sent, worker)
        except WireError as e:
            return str(e)
        return ""

    def _once_more(self, worker: int, letter: Letter, why: str) -> None:
        """Tasks are pure, so this helps against broken memory and the like, and not against a divergence."""
        task = task_of(letter)
        self._again.add(task)
        self._does_not_count(worker, letter)
        self.journal.append(
            "retried", round=task.round, exchange=task.exchange, client=task.client, worker=worker, why=why
        )
        self._handle(Spoilt(worker, task))

    def _draft(self, worker: int, letter: Letter) -> None:
        """The state that a worker elsewhere has made, which comes before its upload."""
        task, loans = task_of(letter), self.dispatch.loans
        if loans is None or len(letter.frames) != 1:
            raise Misconduct(f"sent a state of {task}, for which nobody asked")
        try:
            self.states.put(task.client, self._makes(task), bytes(letter.frames[0]))
        except WireError as e:
            raise Misconduct(f"sent an unreadable state of {task}: {e}") from None
        loans.has(worker, task.client, task.base, self._makes(task))

    def _absent(self, worker: int, letter: Letter) -> None:
        """A client that the schedule takes out after the download."""
        task = task_of(letter)
        self._answered(worker, letter)
        self.journal.append("gone", round=task.round, client=task.client)
        self._handle(Arrived(worker, task))

    def _score(self, worker: int, letter: Letter) -> None:
        h, about = letter.header, self.board[letter.header.round]
        about.sampled = bool(self.problem.eval_samples) and isinstance(about.model, Gaussian)
        width = self.problem.measure.width(self.problem.dataset.classes)
        try:
            about.scores[h.exchange] = unpack_score(letter, width, about.sampled)
        except WireError as e:
            raise Misconduct(f"sent an unreadable score of round {h.round}: {e}") from None
        self._answered(worker, letter)
        self.board.flush()
        self._handle(Scored(worker, h.round, h.exchange))

    def _answered(self, worker: int, letter: Letter) -> None:
        h = letter.header
        self.dispatch.timeline.arrived(worker, h.round, h.exchange, h.client, h.micros)

    def _makes(self, task: TaskId) -> int:
        """The version of the client's state that a task makes."""
        return self.problem.version(task.round, task.exchange)
