"""Events and commands of the round machine, the names of tasks, and the numbers of client versions.

The coordinator gives events to the round machine (fedsim.round_machine) and executes the commands that
it returns.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskId:
    """The name of a task: its round, exchange and client, and the version (base) of the client's state from
    which the task starts. The result of the task depends on this name alone."""

    round: int
    exchange: int
    client: int
    base: int


@dataclass(frozen=True)
class ChunkId:
    """One chunk of the test set, evaluated with the model of `round`."""

    round: int
    chunk: int


WorkItem = TaskId | ChunkId
"""The work that a worker can hold."""


# ---- events


@dataclass(frozen=True)
class Joined:
    """A worker is ready."""

    worker: int


@dataclass(frozen=True)
class Left:
    """A worker has left and will not answer its tasks; it may join again."""

    worker: int


@dataclass(frozen=True)
class Arrived:
    """A worker has answered a task.

    The whole upload has arrived and is checked when it is folded. If the schedule makes this client a
    dropout, the worker has reported that no upload will come.

    Attributes:
        late: The upload is counted but not folded: it missed the deadline of the virtual clock, or its
            content must not be folded.
    """

    worker: int
    task: TaskId
    late: bool = False


@dataclass(frozen=True)
class Rejected:
    """A worker has answered a task with an upload that must not be folded, and the task is computed again."""

    worker: int
    task: TaskId


@dataclass(frozen=True)
class Scored:
    """A worker has evaluated one chunk of the test set.

    Attributes:
        reached: True if the chunk completes the round's evaluation and the model reaches the target accuracy.
    """

    worker: int
    chunk: ChunkId
    reached: bool = False


@dataclass(frozen=True)
class Folded:
    """server_update has returned."""


# ---- commands


@dataclass(frozen=True)
class Open:
    """Encode the broadcast of this exchange. Start folding if `folds`: at least one upload will be folded."""

    round: int
    exchange: int
    participants: tuple[int, ...]
    folds: bool
    folded_rounds: int = 0
    """The number of rounds before this one that folded an upload."""
    asked: int = 0
    """The number of clients that take part in the round, including dropouts."""


@dataclass(frozen=True)
class Give:
    """Send a task to a worker.

    Attributes:
        dropout: The client gets the broadcast, which the ledger counts, and computes nothing.
        retry: The task was sent before, to a worker that has left or whose upload was rejected.
    """

    worker: int
    task: TaskId
    dropout: bool = False
    retry: bool = False


@dataclass(frozen=True)
class Release:
    """Pass this client's upload, the next in the order of the fold, to server_update."""

    client: int


@dataclass(frozen=True)
class Drop:
    """Discard this client's upload: the schedule lost it, or it came after the deadline."""

    client: int


@dataclass(frozen=True)
class Close:
    """No further upload will be folded in this exchange."""


@dataclass(frozen=True)
class Commit:
    """Commit the round. `versions` are the current versions of all clients' states."""

    round: int
    participants: tuple[int, ...]
    folded: tuple[int, ...]
    versions: tuple[int, ...]
    folded_rounds: int = 0
    """The number of rounds up to this one that folded an upload."""


@dataclass(frozen=True)
class ScoreChunk:
    """Let this worker evaluate one chunk of the test set."""

    worker: int
    chunk: ChunkId


@dataclass(frozen=True)
class Finish:
    """All rounds, or those up to the target accuracy, are committed and evaluated."""


Event = Joined | Left | Arrived | Rejected | Scored | Folded
Command = Open | Give | Release | Drop | Close | Commit | ScoreChunk | Finish


# ---- numbers that follow from the configuration


def version(round: int, exchange: int, exchanges: int, setup: int = 0) -> int:
    """Return the version of a client's state that an exchange produces.

    Exchange e of round r produces version S + (r-1)*E + e; exchange e of the set-up produces e. S and E are
    the numbers of exchanges of the set-up and of a round.
    """
    return setup + (round - 1) * exchanges + exchange if round else exchange


def evaluates(round: int, rounds: int, eval_every: int, chunks: int) -> bool:
    """Return whether a round's model is evaluated: round 0, every eval_every-th round and the last one."""
    return bool(chunks) and (round % eval_every == 0 or round == rounds)


def reaches(round: int, accuracy: float | None, until: float) -> bool:
    """Return whether a round's model has reached the target accuracy `until`; 0: there is no target.

    The initial model, of round 0, does not count, because nothing was sent to get it.
    """
    return bool(until and round) and accuracy is not None and accuracy >= until
