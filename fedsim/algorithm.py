"""The contract of a federated algorithm: messages as types, updates as pure methods.

An algorithm is one frozen dataclass; its fields are the hyperparameters (the "Require:" line of the
paper's box) and its methods are the box. Both sides compute from what crossed the wire: `down` is
the decoded broadcast, on the server too, and `client_commit` and `server_update` get the upload as
decoded. A dual step is therefore one function that both call with the same arguments, and a
client's dual and the server's sum cannot drift apart under any codec.

Server is checkpointed every round; Client lives with its client and never crosses the wire; Down
and Up are the only things that do. State in, state out: no method changes its arguments, but for tensors
that their owner gave up (fedsim.learning.ownership).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache, reduce
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedsim.errors import UsageError
from fedsim.learning.gaussian import Gaussian, Model, unpacked
from fedsim.learning.ownership import give_up, keep
from fedsim.learning.params import Layout, Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.seeds import RandomStream
from fedsim.step_rules import At as At, OverK as OverK, Step as Step, step_size as step_size
from fedsim.wire.schema import Sum, map_tensors, zeros_of

Unsent = Literal["dual", "zero", "last"]
"""What counts for a client that was asked and sends nothing (Algorithm.unsent)."""

Server = TypeVar("Server")
Client = TypeVar("Client")
Down = TypeVar("Down")
Up = TypeVar("Up")

AnyShard = Shard | QuadraticShard


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round: the class that goes down and the class that comes up.

    Either may have an optional part (fedsim.wire.schema); a broadcast's part is filled per client by
    `broadcast_to`. sums: what an edge server sends up in the place of its clients' uploads (Algorithm.add),
    all fields in float64; None: nothing that adds up has all that the server needs.
    """

    down: type
    up: type
    sums: type | None = None


@dataclass(frozen=True)
class Context:
    """The values that server methods receive.

    start: the shared random initialisation (P,) float32; sizes: N_k of all K clients; round counts
    the rounds of the schedule from 1, also empty ones, and is 0 in the set-up; exchange counts from 1
    within a round; folds counts the rounds before this one in which an upload was folded; asked: |S|, the
    clients that get the round's broadcast, 0 outside of rounds.
    """

    start: Tensor
    layout: Layout
    sizes: tuple[int, ...]
    round: int
    exchange: int
    rng: RandomStream
    network: Callable[[], Net] | None = field(default=None, compare=False)
    read: Callable[[Tensor], Tensor] = field(default=lambda stored: stored, compare=False)
    """Stored inputs (n, I) as the network takes them."""
    folds: int = 0
    asked: int = 0
    public: Tensor = field(default_factory=lambda: torch.zeros(0, 0), compare=False)
    """Inputs that the server and all clients have, without labels (public_inputs): (M, I) as stored."""
    weight: float = 1.0
    """The weight of the upload that is folded alone in an asynchronous run (Arrival)."""

    @property
    def K(self) -> int:
        return len(self.sizes)

    def at(self, k: int = 0) -> At:
        """The point of evaluation of client k's formulas in this round; the client has it as task.at."""
        return At(self.sizes, k, self.round, self.asked, self.weight)

    @property
    def net(self) -> Net:
        """A network for the server's own computations: no other thread uses its buffers."""
        if self.network is None:
            raise UsageError("this problem has no network that a server could use")
        return self.network()


@dataclass(frozen=True)
class Task:
    """The values that client methods receive: those of Context, and the client. Round 0 is the set-up."""

    start: Tensor
    sizes: tuple[int, ...]
    round: int
    exchange: int
    client: int
    rng: RandomStream
    folds: int = 0
    asked: int = 0
    public: Tensor = field(default_factory=lambda: torch.zeros(0, 0), compare=False)
    weight: float = 1.0
    """The weight of its upload in an asynchronous run (Arrival)."""

    @property
    def K(self) -> int:
        return len(self.sizes)

    @property
    def at(self) -> At:
        """The point at which this client's formulas are evaluated in this round."""
        return At(self.sizes, self.client, self.round, self.asked, self.weight)

    @property
    def started(self) -> bool:
        """True if an upload was folded in an earlier round, so that the broadcast is more than the start."""
        return self.folds > 0


@dataclass(frozen=True)
class Arrival:
    """An upload of an asynchronous run (fedsim.asynchrony).

    down: the decoded broadcast that it answers. staleness: how many steps the server has taken since that.
    weight: in (0, 1], what --async lets it count for its staleness.
    """

    client: int
    down: Any
    up: Any
    staleness: int
    weight: float


@cache
def _type_of_sums(algorithm: type) -> Any:
    """The type that `add` returns: a message, or Tensor or Gaussian as `duals` names it on the server."""
    return get_type_hints(algorithm.add).get("return")  # type: ignore[attr-defined]


@cache
def _message_of(*names: str) -> type:
    """The message of these sums, (P,) each."""
    return make_dataclass("Sums", [(name, Sum) for name in names], frozen=True)


def _factor(state: Any, name: str) -> Gaussian:
    """The dual of a state that a dotted name names, as a factor."""
    for part in name.split("."):
        state = getattr(state, part)
    return state if isinstance(state, Gaussian) else Gaussian(state, 0.0)


def _products(ones: list[Gaussian], others: list[Gaussian]) -> list[Gaussian]:
    return [a * b for a, b in zip(ones, others, strict=True)]


def _plus(own: Any, sent: Any) -> Any:
    """A sum with what an edge server has sent, where a matrix is its triangle."""
    return own + (unpacked(sent) if isinstance(own, Tensor) and own.dim() == 2 else sent)


def _is_state(argument: Any) -> bool:
    """True if a type argument is a class: not Any and not a variable."""
    return isinstance(argument, type) and argument is not Any


class Algorithm(ABC, Generic[Server, Client, Down, Up]):
    """Base class of all algorithms. Subclasses are frozen dataclasses."""

    name: ClassVar[str]
    """As on the command line."""
    paper: ClassVar[str]
    """Short citation with equation or algorithm number."""
    default_model: ClassVar[str]
    url: ClassVar[str] = ""
    """Public address of the paper."""
    server_type: ClassVar[type]
    client_type: ClassVar[type]
    """The states' classes; __init_subclass__ reads them off Algorithm[Server, Client, Down, Up]."""
    default_rounds: ClassVar[int] = 20
    eval_samples: ClassVar[int] = 0
    """Posterior samples that an evaluation averages over, beside the mean; for members whose model is a
    distribution."""
    centralised: ClassVar[bool] = False
    """True for a reference that is not federated: one client has the rows of all, takes part in every
    round, and its traffic is booked as simulation, so that the algorithm's bill is 0."""
    folds_stale: ClassVar[bool] = False
    """True if uploads that answer older broadcasts can be folded (--async)."""
    default_codecs: ClassVar[Mapping[str, str]] = {}
    """Codecs by field, as --codec names them, of fields for which the user names none."""
    stale_damping: ClassVar[float] = 0.0
    """P of the weight (1 + staleness)^-P that a stale upload has where --async leaves it open."""
    fed_back: ClassVar[tuple[str, ...]] = ()
    """Upload fields of shape (P,) that fedsim.error_feedback may correct: increments to which nothing refers
    once they are added up."""

    duals: ClassVar[Mapping[str, str | None]] = {}
    """Tensors and Gaussians that every client keeps in float64, and the server keeps the sum of them (of
    Gaussians the product) over ALL clients: the dotted name in Client -> that in Server. A fold begins with
    it. None: it is no dual."""

    _exchange: ClassVar[Exchange | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Read the types of Algorithm[Server, Client, Down, Up]; what the class itself states stays."""
        super().__init_subclass__(**options)
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is not Algorithm:
                continue
            server, client, down, up = get_args(base)
            if _is_state(server) and "server_type" not in cls.__dict__:
                cls.server_type = server
            if _is_state(client) and "client_type" not in cls.__dict__:
                cls.client_type = client
            if is_dataclass(down) and is_dataclass(up):
                cls._exchange = Exchange(cast(type, down), cast(type, up))

    @property
    def unwrapped(self) -> Algorithm[Any, Any, Any, Any]:
        """The algorithm itself, where this is a wrapper around it."""
        return self

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of a round; the schedule's participants serve all of them.

        There is one, of Down and Up of Algorithm[Server, Client, Down, Up], unless an algorithm states
        others. They may depend on the hyperparameters.
        """
        if self._exchange is None:
            raise UsageError(
                f"{type(self).__name__} names no messages: derive it from "
                "Algorithm[Server, Client, Down, Up], or define exchanges"
            )
        sums = _type_of_sums(type(self))
        if sums is Tensor:
            sums = _message_of(self._total)
        elif sums is Gaussian:
            sums = _message_of("shift", "precision")
        return (replace(self._exchange, sums=cast(type, sums) if is_dataclass(sums) else None),)

    @property
    def setup(self) -> tuple[Exchange, ...]:
        """Exchanges with ALL clients before round 1 (round 0 in tasks, messages and the ledger)."""
        return ()

    @property
    def public_inputs(self) -> int:
        """The number of unlabelled inputs that the server and all clients have: `ctx.public`, `task.public`.

        They are random training rows that no client then has, and never cross the wire.
        """
        return 0

    def exchanges_in(self, round: int) -> tuple[Exchange, ...]:
        """Those of this round; round 0 is the set-up."""
        return self.exchanges if round else self.setup

    def sizes_on_wire(self, clients: int, classes: int) -> Mapping[str, int]:
        """Bounds of sizes that are this algorithm's own, by the names its messages use ('M')."""
        return {}

    def check(self, params: int) -> None:
        """Check that the algorithm can work on a model of P = `params` parameters.

        Raises:
            UsageError: if it cannot.
        """

    @abstractmethod
    def server_init(self, ctx: Context) -> Server: ...

    @abstractmethod
    def client_init(self, ctx: Context, k: int) -> Client: ...

    @abstractmethod
    def broadcast(self, server: Server, ctx: Context) -> Down:
        """The message that every participant of this exchange receives; it is encoded once."""

    def broadcast_to(self, server: Server, k: int, ctx: Context) -> object | None:
        """The optional part of Down for client k: what it has not been sent yet. None: nothing.

        Only what a folded upload proves to have arrived counts as sent.
        """
        return None

    @abstractmethod
    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        """Local training: a draft of the client's next state, and the upload."""

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        """The client's next state from its draft; it becomes current only if the upload is folded.

        The dual step lives here, from the upload as decoded.
        """
        return client

    def local_mean(self, down: Down, up: Up) -> Tensor:
        """The weights (P,) at which local training has ended, or their posterior mean, by an upload that
        answers `down` (fedsim.personalisation)."""
        mean: Tensor = up.mean  # type: ignore[attr-defined]
        return mean

    # ---- a client that computes and sends nothing (fedsim.event_trigger)

    def unsent(self) -> Unsent:
        """What the server counts for a client that was asked and sends nothing, by --participation +event.

        dual: the server's sum keeps the client's dual, as if the client had not taken part. zero: its
        increment is 0, and it has its weight in the mean. last: its last upload counts again, of which the
        server keeps one for every client.

        Raises:
            UsageError: If the algorithm needs every upload that it asked for.
        """
        return "dual" if self.duals else "zero" if self.fed_back else "last"

    def dual_damping(self, at: At) -> float:
        """The exponent, or factor, of a dual step that may count 1 / damping times, after rounds in which the
        client sent nothing. 1: a dual step counts once.
        """
        return 1.0

    def own_and_held(self, client: Client, down: Down, up: Up, task: Task) -> tuple[Any, Any]:
        """What an upload says of its client, and what the server has of it without that, in the same terms:
        two messages, or two Gaussians. client: its draft; up: as decoded. For duals: a site stays as it is
        where the upload agrees with the broadcast.
        """
        return up, down

    def client_unsent(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        """The client's next state from its draft if `up` is not sent; a dual that the server has stays."""
        return client

    def server_update(
        self, server: Server, down: Down, ups: Iterable[tuple[int, Up]], ctx: Context
    ) -> Server:
        """Fold the uploads: (client, Up) in ascending client id, consumed once, one in memory.

        Never called with no upload at all: an empty round changes nothing but its number. An algorithm
        defines this, or `add` and `from_sums`.
        """
        return self.from_sums(server, down, self.added(self.sums(server, down, ctx), down, ups, ctx), ctx)

    def add(self, sums: Any, down: Down, k: int, up: Up, ctx: Context) -> Any:
        """The sums with client k's upload; `sums` may be written over.

        The return type says what the sums are: a message of float64 fields (Exchange.sums), or the Tensor or
        Gaussian of the server that `duals` names.
        """
        raise UsageError(f"{self.name} defines neither server_update nor add and from_sums")

    def from_sums(self, server: Server, down: Down, sums: Any, ctx: Context) -> Server:
        """The server's step from the sums over all uploads of the exchange."""
        raise UsageError(f"{self.name} defines neither server_update nor add and from_sums")

    # ---- what follows from the types of `add` and from `duals`

    @property
    def _totals(self) -> list[str]:
        """The server's fields that are sums over all clients."""
        return [total for total in self.duals.values() if total]

    @property
    def _total(self) -> str:
        """The one that the sums are, where `add` returns no message."""
        if len(self._totals) != 1:
            raise UsageError(f"{self.name}: where add returns no message, duals names one field of Server")
        return self._totals[0]

    def added(self, sums: Any, down: Down, ups: Iterable[tuple[int, Up]], ctx: Context) -> Any:
        """The sums, which are the caller's own and are written over, with these uploads."""
        for k, up in ups:
            before = give_up(sums, above=0)
            sums = self.add(before, down, k, up, ctx)
            keep(before)
            del up  # one in memory
        return sums

    def sums(self, server: Server, down: Down, ctx: Context) -> Any:
        """The server's sums before an exchange, which are the caller's own: its duals' sums, and else 0."""
        if _type_of_sums(type(self)) in (Tensor, Gaussian):
            return map_tensors(getattr(server, self._total), Tensor.clone)
        zero = self.no_sums(down, ctx)
        kept = [f.name for f in fields(zero) if f.name in self._totals]
        return replace(zero, **{name: map_tensors(getattr(server, name), Tensor.clone) for name in kept})

    def no_sums(self, down: Down, ctx: Context) -> Any:
        """The sums of no upload, with which an edge server begins (fedsim.tree)."""
        kind = self.exchanges_in(ctx.round)[ctx.exchange - 1].sums
        if kind is None:
            raise UsageError(f"{self.name} defines neither server_update nor add and from_sums")
        if _type_of_sums(type(self)) in (Tensor, Gaussian):
            return map_tensors(getattr(self.server_init(ctx), self._total), torch.zeros_like)
        return zeros_of(kind, ctx.start)

    def sum_of(self, sums: Any, name: str) -> Any:
        """The sum that Exchange.sums calls by this name."""
        return sums if isinstance(sums, Tensor) else getattr(sums, name)

    def merged(self, sums: Any, sent: Any) -> Any:
        """The server's sums with those that an edge server has sent: field by field, in float64."""
        if isinstance(sums, Tensor):
            return sums + getattr(sent, self._total)
        names = [f.name for f in fields(sent)]
        return replace(sums, **{name: _plus(getattr(sums, name), getattr(sent, name)) for name in names})

    def check_stale(self, damped: bool) -> None:
        """Check that uploads which answer older broadcasts can be folded; damped: with weights below 1.

        Raises:
            UsageError: if they cannot, saying why.
        """
        if not self.folds_stale:
            raise UsageError(
                f"--async: {self.name} has no rule for an upload that answers an older broadcast"
            )

    def stale_update(self, server: Server, arrivals: Iterable[Arrival], ctx: Context) -> Server:
        """Fold uploads that answer broadcasts of different rounds, in ascending client id, consumed once.

        One by one, each with the broadcast that it answers: what a server does that adds up the clients'
        changes. Source: asynchronous PVI, Ashman et al. 2022, Sec. 3, https://arxiv.org/abs/2202.12275.
        """
        for a in arrivals:
            alone = replace(ctx, weight=a.weight)
            server = self.server_update(server, a.down, [(a.client, a.up)], alone)
        return server

    @abstractmethod
    def model(self, server: Server, ctx: Context) -> Model:
        """The model to evaluate; before the first fold, the point ctx.start."""

    def dual_mismatch(self, server: Server, clients: Iterable[Client]) -> float | None:
        """The relative difference between the server's sum of duals and that of all clients' states.

        It is 0 up to rounding, under any schedule, loss and codec. None: the algorithm keeps no such sum.
        """
        names = [own for own, total in self.duals.items() if total]
        if not names:
            return None
        everyone = reduce(_products, ([_factor(client, name) for name in names] for client in clients))
        ours = [_factor(server, total) for total in self._totals]
        return max(a.mismatch(b) for a, b in zip(ours, everyone, strict=True))

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Numbers for metrics.jsonl beyond the standard ones and the scalars of Up."""
        return {}
