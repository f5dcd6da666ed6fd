"""What an algorithm may define in addition to its eight methods, because its paper or a feature demands it.

Every method has a default that follows from the messages and `duals`. The features call them: +event and
+quiet (fedsim.event_trigger), --async (fedsim.asynchrony), --error-feedback and the set-up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

from fedsim.errors import UsageError
from fedsim.round_values import AnyShard, Arrival, Context, Exchange, Task
from fedsim.step_rules import At

Server = TypeVar("Server")
Client = TypeVar("Client")
Down = TypeVar("Down")
Up = TypeVar("Up")

Unsent = Literal["dual", "zero", "last"]
"""The kinds of substitute for the upload of a participant that sends nothing (Algorithm.unsent)."""


class SetUp(ABC, Generic[Server, Client]):
    """The exchanges of an algorithm with all clients before round 1 (round 0), and their methods."""

    @property
    @abstractmethod
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of round 0."""

    @abstractmethod
    def broadcast(self, server: Server, ctx: Context) -> Any: ...

    @abstractmethod
    def client_update(self, client: Client, down: Any, shard: AnyShard, task: Task) -> tuple[Client, Any]: ...

    @abstractmethod
    def server_update(
        self, server: Server, down: Any, arrivals: Iterable[Arrival], ctx: Context
    ) -> Server: ...


class OptionalMethods(Generic[Server, Client, Down, Up]):
    """The optional methods and class variables of an algorithm, with their defaults."""

    name: ClassVar[str]
    duals: ClassVar[Mapping[str, str | None]]
    default_rounds: ClassVar[int] = 20
    eval_samples: ClassVar[int] = 0
    """The number of posterior samples whose predictions an evaluation averages, in addition to scoring the
    mean; only for algorithms whose model is a distribution."""
    centralised: ClassVar[bool] = False
    """True for a reference that is not federated: one client has all rows and takes part in every round. Its
    traffic counts as simulation, so that the algorithm's communication cost is 0."""
    folds_stale: ClassVar[bool] = False
    """True if the server can fold uploads that answer different broadcasts (--async, +quiet, +own)."""
    stale_damping: ClassVar[float] = 0.0
    """P in the weight (1 + staleness)^-P of a stale upload, if --async does not set it."""
    damped_by: ClassVar[str] = ""
    """The hyperparameter, a Step, that damps the dual step, if there is one (+event)."""
    fed_back: ClassVar[tuple[str, ...]] = ()
    """The upload fields of shape (P,) that fedsim.error_feedback may correct: plain increments, which the
    server adds up and does not use again."""

    # ---- exchanges beside the broadcast and the upload

    @property
    def set_up(self) -> SetUp[Server, Client] | None:
        """The exchanges before round 1 and their methods, or None; called by broadcast and client_update."""
        return None

    @property
    def setup(self) -> tuple[Exchange, ...]:
        """Exchanges with ALL clients before round 1 (round 0 in tasks, messages and the ledger)."""
        return () if self.set_up is None else self.set_up.exchanges

    @property
    def public_inputs(self) -> int:
        """The number of unlabelled inputs that the server and all clients have: `ctx.public`, `task.public`.

        They are random training rows, are removed from the clients' data, and never cross the wire.
        """
        return 0

    def broadcast_to(self, server: Server, k: int, ctx: Context) -> object | None:
        """Return Down's optional field group with the data that client k lacks; None if it lacks none.

        Data count as received only when an upload of the client is folded, which proves that they arrived.
        """
        return None

    def sizes_on_wire(self, clients: int, classes: int) -> Mapping[str, int]:
        """Return upper bounds of the sizes that only this algorithm's messages have, by name ('M')."""
        return {}

    def check(self, params: int) -> None:
        """Check that the algorithm can work on a model of P = `params` parameters.

        Raises:
            UsageError: if it cannot.
        """

    # ---- participants that compute an upload and do not send it (fedsim.event_trigger)

    def unsent(self) -> Unsent:
        """Return the kind of substitute for the upload of a participant that sends nothing (+event).

        dual: the server's sum keeps the client's dual, as if the client had not taken part. zero: an
        increment of 0 enters the mean with the client's weight. last: the server stores every client's last
        upload and folds it again.

        Raises:
            UsageError: If the algorithm needs an upload of every participant.
        """
        return "dual" if self.duals else "zero" if self.fed_back else "last"

    def dual_damping(self, at: At) -> float:
        """Return the exponent or factor that damps a dual step; 1 if steps are not damped.

        After rounds in which the client sent nothing, a damped step may count up to 1 / damping times."""
        return at.value(getattr(self, self.damped_by)) if self.damped_by else 1.0

    def own_and_held(self, client: Client, down: Down, up: Up, task: Task) -> tuple[Any, Any]:
        """Return the two messages or Gaussians whose difference decides whether an upload is sent (+event).

        The first is the client's; the second is the one that the server has without the upload. `client` is
        the draft. By default they are the decoded upload and broadcast; if these agree, no site changes.
        """
        return up, down

    def client_unsent(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        """Return the client's next state if `up` is not sent; duals in the server's sum must not change."""
        return client

    # ---- uploads that answer different broadcasts (fedsim.asynchrony)

    def check_stale(self, damped: bool) -> None:
        """Check that uploads that answer older broadcasts can be folded. damped: weights may be below 1.

        Raises:
            UsageError: if they cannot; the message says why.
        """
        if not self.folds_stale:
            raise UsageError(
                f"--async: {self.name} has no rule for an upload that answers an older broadcast; a class "
                "whose fold has one (ctx.mixed) says folds_stale = True"
            )

    # ---- records

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return numbers for metrics.jsonl, in addition to the standard ones and the scalars of Up."""
        return {}
