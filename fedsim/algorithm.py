"""The interface of a federated algorithm: its messages are classes, and its updates are pure methods.

An algorithm is one frozen dataclass. Its fields are the hyperparameters (the "Require:" line of the paper's
pseudocode), and its methods are the steps of the pseudocode. Client and server compute from decoded messages:
`down` is the decoded broadcast, even on the server, and `client_commit` and `server_update` get the decoded
upload. Both sides therefore take a dual step with the same function and the same arguments, and the clients'
duals agree with the server's sum of duals under every codec.

The server's state is checkpointed every round. A client's state stays with the client. Only the messages Down
and Up cross the wire. Methods return new states. They do not change their arguments, except tensors that
fedsim.learning.ownership has marked as expendable.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache, reduce
from itertools import groupby
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedsim.errors import UsageError
from fedsim.hyperparameters import GgnEstimator
from fedsim.learning.blocks import settled
from fedsim.learning.gaussian import Gaussian, Model, Penalty
from fedsim.learning.ownership import give_up, keep
from fedsim.learning.params import Layout, Net
from fedsim.learning.shards import QuadraticShard, Shard
from fedsim.learning.solvers import LocalFit
from fedsim.learning.solvers.first_order import LocalTraining, Moments, minimise
from fedsim.seeds import RandomStream
from fedsim.step_rules import At as At, OverK as OverK, Step as Step, step_size as step_size
from fedsim.wire.gaussian_messages import in_full
from fedsim.wire.schema import FullSum, Sum, map_tensors, zeros_of

Unsent = Literal["dual", "zero", "last"]
"""The kinds of substitute for the upload of a participant that sends nothing (Algorithm.unsent)."""

Server = TypeVar("Server")
Client = TypeVar("Client")
Down = TypeVar("Down")
Up = TypeVar("Up")

AnyShard = Shard | QuadraticShard


@dataclass(frozen=True)
class Exchange:
    """One exchange of a round: the class of the broadcast and the class of the upload.

    Either class may have an optional field group (fedsim.wire.schema); Algorithm.broadcast_to fills the
    broadcast's group for each client. `sums` is the class of the message that an edge server sends instead of
    its clients' uploads (Algorithm.add), with float64 fields; None if the server needs every upload itself.

    Examples:
        >>> from dataclasses import dataclass
        >>> import fedsim
        >>> @dataclass(frozen=True)
        ... class Message:
        ...     mean: fedsim.Mean
        >>> exchange = fedsim.Exchange(down=Message, up=Message)
        >>> exchange.down.__name__, exchange.sums
        ('Message', None)
    """

    down: type
    up: type
    sums: type | None = None


@dataclass(frozen=True)
class Context:
    """The values that server methods receive.

    start: the shared random initialisation, shape (P,), float32. sizes: N_k of all K clients. round: counted
    from 1, including empty rounds; 0 in the set-up. exchange: the exchange of the round, counted from 1.
    folds: the number of earlier rounds in which an upload was folded. asked: |S|, the number of clients that
    get the round's broadcast; 0 outside of rounds.

    Examples:
        >>> import fedsim, torch
        >>> from fedsim.learning.params import Layout
        >>> layout = Layout.named([("w", torch.zeros(2))])
        >>> rng = fedsim.RandomStream(seed=0, purpose="server", round=1)
        >>> ctx = fedsim.Context(torch.zeros(2), layout, sizes=(30, 10), round=1, exchange=1, rng=rng)
        >>> ctx.K, ctx.at(k=1).value("N_k/N")
        (2, 0.25)
    """

    start: Tensor
    layout: Layout
    sizes: tuple[int, ...]
    round: int
    exchange: int
    rng: RandomStream
    network: Callable[[], Net] | None = field(default=None, compare=False)
    read: Callable[[Tensor], Tensor] = field(default=lambda stored: stored, compare=False)
    """A function that converts stored inputs, shape (n, I), to inputs of the network."""
    folds: int = 0
    asked: int = 0
    public: Tensor = field(default_factory=lambda: torch.zeros(0, 0), compare=False)
    """The stored unlabelled inputs that server and clients share (Algorithm.public_inputs), shape (M, I)."""
    mixed: bool = False
    """True if the uploads to fold answer different broadcasts (--async, +quiet, +own)."""
    edge_of: Callable[[int], int] | None = field(default=None, compare=False)
    """A function that returns the edge server of a client; None without edge servers (--tree)."""

    @property
    def K(self) -> int:
        return len(self.sizes)

    def at(self, k: int = 0) -> At:
        """Return the values with which client k's step rules are evaluated in this round, as Task.at does."""
        return At(self.sizes, k, self.round, self.asked)

    def arrival(self, client: int, down: Any, up: Any, weight: float = 1.0) -> Arrival:
        """Return the arrival of an upload that answers the broadcast `down`; both are decoded."""
        return Arrival(client, down, up, replace(self.at(client), weight=weight))

    @property
    def net(self) -> Net:
        """A network for the server's computations, whose buffers no other thread uses."""
        if self.network is None:
            raise UsageError("this problem has no network that a server could use")
        return self.network()


@dataclass(frozen=True)
class Task:
    """The values that client methods receive: those of Context and the client's id. Round 0 is the set-up.

    Examples:
        >>> import fedsim, torch
        >>> rng = fedsim.RandomStream(seed=0, purpose="task", round=3, client=1)
        >>> task = fedsim.Task(
        ...     torch.zeros(2), sizes=(30, 10), round=3, exchange=1, client=1, rng=rng, folds=2
        ... )
        >>> task.K, task.started, task.at.value("N_k/N")
        (2, True, 0.25)
    """

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
    """The weight of the client's upload in an asynchronous run (Arrival.at)."""

    @property
    def K(self) -> int:
        return len(self.sizes)

    @property
    def at(self) -> At:
        """The values with which this client's step rules are evaluated in this round."""
        return At(self.sizes, self.client, self.round, self.asked, self.weight)

    @property
    def started(self) -> bool:
        """True if an earlier round folded an upload. Until then the broadcast is the initialisation."""
        return self.folds > 0

    def begin(self, mean: Tensor) -> Tensor:
        """Return the weights (P,) from which training starts: `mean`; before `started`, the random start."""
        return mean if self.started else self.start

    def curvature(
        self, shard: AnyShard, weights: Tensor, estimator: GgnEstimator, *, full: bool = False
    ) -> Tensor:
        """Return the GGN of the SUMMED loss at `weights` (P,): its diagonal (P,), or (P, P) if `full`.

        estimator: of the diagonal; the full matrix is exact."""
        return shard.full_curvature(weights) if full else shard.curvature(weights, estimator, self.rng)

    def minimise(
        self,
        shard: AnyShard,
        how: LocalTraining,
        start: Tensor,
        *,
        weight: float = 1.0,
        penalties: tuple[Penalty, ...] = (),
        moments: Moments | None = None,
        **options: Any,
    ) -> LocalFit[Tensor, Moments]:
        """Minimise weight * (mean loss) + sum of penalties from `start` (P,), with this task's random stream
        and round. options: the other arguments of fedsim.minimise."""
        return minimise(
            shard,
            start,
            how=how,
            rng=self.rng,
            round=self.round,
            weight=weight,
            penalties=penalties,
            moments=moments,
            **options,
        )


@dataclass(frozen=True)
class Arrival:
    """An upload that the server folds. Uploads are folded in ascending client id.

    down: the decoded broadcast that the upload answers (was computed from), of this round or an earlier one.
    up: the decoded upload; a substitute if the client's rule sent none (+event). at: the values for the
    client's step rules; at.weight is the upload's weight: (1 + staleness)^-P in an asynchronous run, above 1
    after rounds in which the client sent nothing, else 1.

    Examples:
        >>> import fedsim
        >>> arrival = fedsim.Arrival(1, down="broadcast", up="upload", at=fedsim.At(sizes=(30, 10), k=1))
        >>> arrival.at.value("N_k/N"), arrival.at.weight
        (0.25, 1.0)
    """

    client: int
    down: Any
    up: Any
    at: At


@cache
def _type_of_sums(algorithm: type) -> Any:
    """Return the return type of `add`: a message class, or the type of the server's sum of duals."""
    results = (_result(vars(kind)["add"]) for kind in algorithm.__mro__ if "add" in vars(kind))
    return next((kind for kind in results if kind is not None), None)


def _result(method: Any) -> Any:
    """Return the annotation of a method's result; None if there is none, or none that its module defines."""
    method = inspect.unwrap(method)
    hints = {k: hint for k, hint in getattr(method, "__annotations__", {}).items() if k == "return"}
    try:
        return get_type_hints(SimpleNamespace(__annotations__=hints), method.__globals__).get("return")
    except (AttributeError, NameError):
        return None


@cache
def _message_of(name: str) -> type:
    """Return a message class with one sum of shape (P,)."""
    return make_dataclass("Sums", [(name, Sum)], frozen=True)


@dataclass(frozen=True)
class _GaussianSums:
    """The change of a product of Gaussian duals."""

    shift: Sum
    precision: Sum


@dataclass(frozen=True)
class _FullGaussianSums:
    """The change of a product of Gaussian duals with full precisions."""

    shift: Sum
    precision: FullSum


def _factor(state: Any, name: str) -> Gaussian:
    """Return the dual with this dotted name in a state, as a Gaussian factor."""
    for part in name.split("."):
        state = getattr(state, part)
    return state if isinstance(state, Gaussian) else Gaussian(state, 0.0)


def _products(ones: list[Gaussian], others: list[Gaussian]) -> list[Gaussian]:
    return [a * b for a, b in zip(ones, others, strict=True)]


def _is_state(argument: Any) -> bool:
    """Return whether a type argument is a class, and neither Any nor a type variable."""
    return isinstance(argument, type) and argument is not Any


class Algorithm(ABC, Generic[Server, Client, Down, Up]):
    """Base class of all algorithms. Subclasses are frozen dataclasses.

    Examples:
        A gradient step of size `lr`, with the weighted mean of the clients' gradients:

        >>> from dataclasses import dataclass
        >>> import fedsim, torch
        >>> @dataclass(frozen=True)
        ... class Down:
        ...     mean: fedsim.Mean
        >>> @dataclass(frozen=True)
        ... class Up:
        ...     gradient: fedsim.Gradient
        >>> @dataclass(frozen=True)
        ... class Descent(fedsim.Algorithm[torch.Tensor, None, Down, Up]):
        ...     lr: float = 1.0
        ...     name, paper, default_model, default_rounds = "descent", "none", "logistic", 3
        ...     def server_init(self, ctx):
        ...         return ctx.start
        ...     def client_init(self, ctx, k):
        ...         return None
        ...     def broadcast(self, server, ctx):
        ...         return Down(server)
        ...     def client_update(self, client, down, shard, task):
        ...         return client, Up(shard.gradient(down.mean) / shard.size)
        ...     def server_update(self, server, down, arrivals, ctx):
        ...         return server - self.lr * sum(a.at.value("N_k/N") * a.up.gradient for a in arrivals)
        ...     def model(self, server, ctx):
        ...         return fedsim.Point(server)
        >>> run = fedsim.run(algo=Descent(lr=0.5), clients=4, quiet=True)
        >>> bool(run.metrics["test_nll"].is_monotonic_decreasing)
        True
    """

    name: ClassVar[str]
    """The name on the command line."""
    paper: ClassVar[str]
    """Short citation with equation or algorithm number."""
    default_model: ClassVar[str]
    url: ClassVar[str] = ""
    """Public address of the paper."""
    server_type: ClassVar[type]
    client_type: ClassVar[type]
    """The classes of both states; __init_subclass__ reads them from Algorithm[Server, Client, Down, Up], and
    in a subclass of an algorithm from the annotations of the methods that it defines."""
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

    duals: ClassVar[Mapping[str, str | None]] = {}
    """The dotted name of each dual in Client, mapped to the name in Server of its sum over ALL clients. Folds
    start from this sum. A dual is a tensor or Gaussian in float64; the "sum" of Gaussians is their product.
    Other client values in float64 map to None: the server has no sum of them."""

    down_type: ClassVar[type | None] = None
    up_type: ClassVar[type | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.read_types()

    @classmethod
    def read_types(cls) -> None:
        """Read the types, unless the class defines them itself; once more when its module is complete."""
        named = (get_args(b) for b in cls.__dict__.get("__orig_bases__", ()) if get_origin(b) is Algorithm)
        server, client, down, up = next(named, None) or cls._annotated()
        if _is_state(server) and "server_type" not in cls.__dict__:
            cls.server_type = server
        if _is_state(client) and "client_type" not in cls.__dict__:
            cls.client_type = client
        if is_dataclass(down):
            cls.down_type = cast(type, down)
        if is_dataclass(up):
            cls.up_type = cast(type, up)

    @classmethod
    def _annotated(cls) -> tuple[Any, Any, Any, Any]:
        """Return Server, Client, Down and Up as far as methods of this class, or of a mixin, name them."""

        def result(name: str) -> Any:
            kind = next(kind for kind in cls.__mro__ if name in vars(kind))
            inherited = kind is not cls and issubclass(kind, Algorithm)
            return None if inherited else _result(vars(kind)[name])

        pair = get_args(result("client_update"))
        return result("server_init"), result("client_init"), result("broadcast"), (*pair, None, None)[1]

    @property
    def unwrapped(self) -> Algorithm[Any, Any, Any, Any]:
        """The innermost algorithm, without the wrappers around it."""
        return self

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of a round; the round's participants take part in all of them.

        By default there is one exchange, with Down and Up of Algorithm[Server, Client, Down, Up]. Exchanges
        may depend on the hyperparameters.
        """
        if self.down_type is None or self.up_type is None:
            raise UsageError(
                f"{type(self).__name__} names no messages: derive it from "
                "Algorithm[Server, Client, Down, Up], or define exchanges"
            )
        sums, down, up = _type_of_sums(type(self)), self.down_type, self.up_type
        if sums is Tensor:
            sums = _message_of(self._total)
        elif sums is Gaussian:
            sums = _FullGaussianSums if self.is_full else _GaussianSums
        if self.is_full:
            down, up = in_full(down), in_full(up)
        return (Exchange(down, up, cast(type, sums) if is_dataclass(sums) else None),)

    @property
    def is_full(self) -> bool:
        """True if the hyperparameter `covariance` is full: precisions are matrices (P, P)."""
        return getattr(self, "covariance", "diagonal") == "full"

    @property
    def setup(self) -> tuple[Exchange, ...]:
        """Exchanges with ALL clients before round 1 (round 0 in tasks, messages and the ledger)."""
        return ()

    @property
    def public_inputs(self) -> int:
        """The number of unlabelled inputs that the server and all clients have: `ctx.public`, `task.public`.

        They are random training rows, are removed from the clients' data, and never cross the wire.
        """
        return 0

    def exchanges_in(self, round: int) -> tuple[Exchange, ...]:
        """Return the exchanges of this round; round 0 is the set-up."""
        return self.exchanges if round else self.setup

    def sizes_on_wire(self, clients: int, classes: int) -> Mapping[str, int]:
        """Return upper bounds of the sizes that only this algorithm's messages have, by name ('M')."""
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
        """Return the message that every participant of this exchange receives; it is encoded once."""

    def broadcast_to(self, server: Server, k: int, ctx: Context) -> object | None:
        """Return Down's optional field group with the data that client k lacks; None if it lacks none.

        Data count as received only when an upload of the client is folded, which proves that they arrived.
        """
        return None

    @abstractmethod
    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        """Train locally, and return a draft of the client's next state and the upload."""

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        """Return the client's next state, made from its draft; it becomes current if the upload is folded.

        An algorithm takes its dual step here, with the decoded upload.
        """
        return client

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

    def server_update(self, server: Server, down: Down, arrivals: Iterable[Arrival], ctx: Context) -> Server:
        """Fold the uploads, and return the server's next state.

        `down` is the decoded broadcast of this exchange. `arrivals` yields the uploads in ascending client
        id, once and one at a time; with edge servers (--tree), by edge server and then by client id. Rounds
        without uploads do not call this method. An algorithm defines the method, or `add` and `from_sums`.
        """
        sums = self.sums(server, down, ctx)
        if ctx.edge_of is None:
            sums = self.added(sums, arrivals, ctx)
        else:
            for _, own in groupby(arrivals, lambda a: ctx.edge_of(a.client)):  # type: ignore[misc]
                sums = self.merged(sums, self.added(self.no_sums(down, ctx), own, ctx))
        return self.from_sums(server, down, sums, ctx)

    def add(self, sums: Any, arrival: Arrival, ctx: Context) -> Any:
        """Add an upload to the sums; `sums` may be overwritten.

        The return annotation gives the type of the sums: a message class with float64 fields (Exchange.sums),
        or the type of the server's sum of duals, Tensor or Gaussian.
        """
        raise UsageError(f"{self.name} defines neither server_update nor add and from_sums")

    def from_sums(self, server: Server, down: Down, sums: Any, ctx: Context) -> Server:
        """Compute the server's next state from the sums over all uploads of the exchange."""
        raise UsageError(f"{self.name} defines neither server_update nor add and from_sums")

    # ---- sums of uploads; their type is the return type of `add`

    @property
    def _totals(self) -> list[str]:
        """The names of the server's sums of duals."""
        return [total for total in self.duals.values() if total]

    @property
    def _total(self) -> str:
        """The name of the server's only sum of duals, for algorithms whose `add` returns no message."""
        if len(self._totals) != 1:
            raise UsageError(f"{self.name}: where add returns no message, duals names one field of Server")
        return self._totals[0]

    def added(self, sums: Any, arrivals: Iterable[Arrival], ctx: Context) -> Any:
        """Add these uploads to the sums, which are overwritten and must belong to the caller."""
        for arrival in arrivals:
            before = give_up(sums, above=0)
            sums = settled(self.add(before, arrival, ctx), before)
            keep(before)
            del arrival  # only one upload is in memory
        return sums

    def sums(self, server: Server, down: Down, ctx: Context) -> Any:
        """Return the initial sums of an exchange: copies of the server's sums of duals, and 0 for others."""
        if _type_of_sums(type(self)) in (Tensor, Gaussian):
            return map_tensors(getattr(server, self._total), Tensor.clone)
        zero = self.no_sums(down, ctx)
        kept = [f.name for f in fields(zero) if f.name in self._totals]
        return replace(zero, **{name: map_tensors(getattr(server, name), Tensor.clone) for name in kept})

    def no_sums(self, down: Down, ctx: Context) -> Any:
        """Return sums of 0, with which an edge server starts (fedsim.tree)."""
        annotated = _type_of_sums(type(self))
        if annotated in (Tensor, Gaussian):
            return map_tensors(getattr(self.server_init(ctx), self._total), torch.zeros_like)
        kind = self.exchanges_in(ctx.round)[ctx.exchange - 1].sums or annotated
        if not is_dataclass(kind):
            raise UsageError(f"{self.name} defines neither server_update nor add and from_sums")
        return zeros_of(cast(type, kind), ctx.start)

    def merged(self, sums: Any, others: Any) -> Any:
        """Add the sums of an edge server to the server's sums, field by field, in float64."""
        if isinstance(sums, Tensor):
            return sums + others
        names = [f.name for f in fields(sums)]
        return replace(sums, **{name: getattr(sums, name) + getattr(others, name) for name in names})

    def check_stale(self, damped: bool) -> None:
        """Check that uploads that answer older broadcasts can be folded. damped: weights may be below 1.

        Raises:
            UsageError: if they cannot; the message says why.
        """
        if not self.folds_stale:
            raise UsageError(
                f"--async: {self.name} has no rule for an upload that answers an older broadcast"
            )

    @abstractmethod
    def model(self, server: Server, ctx: Context) -> Model:
        """Return the model to evaluate; before the first fold, this is Point(ctx.start)."""

    def dual_mismatch(self, server: Server, clients: Iterable[Client]) -> float | None:
        """Return the relative difference between the server's sum of duals and the sum of the clients' duals.

        It is 0 up to rounding, under any schedule, upload loss and codec; None without a sum of duals.
        """
        names = [own for own, total in self.duals.items() if total]
        if not names:
            return None
        everyone = reduce(_products, ([_factor(client, name) for name in names] for client in clients))
        ours = [_factor(server, total) for total in self._totals]
        return max(a.mismatch(b) for a, b in zip(ours, everyone, strict=True))

    def report(self, server: Server, ctx: Context) -> Mapping[str, float]:
        """Return numbers for metrics.jsonl, in addition to the standard ones and the scalars of Up."""
        return {}
