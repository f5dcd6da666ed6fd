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

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from itertools import groupby
from typing import Any, ClassVar, Generic, cast, get_args, get_origin

from fedsim.errors import UsageError
from fedsim.learning.gaussian import Model
from fedsim.optional_methods import (
    Client,
    Down,
    OptionalMethods,
    Server,
    SetUp as SetUp,
    Unsent as Unsent,
    Up,
)
from fedsim.round_values import (
    AnyShard as AnyShard,
    Arrival as Arrival,
    Context as Context,
    Exchange as Exchange,
    Task as Task,
)
from fedsim.step_rules import At as At, OverK as OverK, Step as Step, step_size as step_size
from fedsim.sums import SumsOfUploads, annotated_result
from fedsim.wire.gaussian_messages import in_full


def _is_state(argument: Any) -> bool:
    """Return whether a type argument is a class, and neither Any nor a type variable."""
    return isinstance(argument, type) and argument is not Any


class Algorithm(
    SumsOfUploads, OptionalMethods[Server, Client, Down, Up], ABC, Generic[Server, Client, Down, Up]
):
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
            return None if inherited else annotated_result(vars(kind)[name])

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
        down, up = self.down_type, self.up_type
        if self.is_full:
            down, up = in_full(down), in_full(up)
        return (Exchange(down, up, self.sums_type),)

    def exchanges_in(self, round: int) -> tuple[Exchange, ...]:
        """Return the exchanges of this round; round 0 is the set-up."""
        return self.exchanges if round else self.setup

    @abstractmethod
    def server_init(self, ctx: Context) -> Server: ...

    @abstractmethod
    def client_init(self, ctx: Context, k: int) -> Client: ...

    @abstractmethod
    def broadcast(self, server: Server, ctx: Context) -> Down:
        """Return the message that every participant of this exchange receives; it is encoded once."""

    @abstractmethod
    def client_update(self, client: Client, down: Down, shard: AnyShard, task: Task) -> tuple[Client, Up]:
        """Train locally, and return a draft of the client's next state and the upload."""

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        """Return the client's next state, made from its draft; it becomes current if the upload is folded.

        An algorithm takes its dual step here, with the decoded upload.
        """
        return client

    def server_update(self, server: Server, down: Down, arrivals: Iterable[Arrival], ctx: Context) -> Server:
        """Fold the uploads, and return the server's next state.

        `down` is the decoded broadcast of this exchange. `arrivals` yields the uploads in ascending client
        id, once and one at a time; with edge servers (--tree), by edge server and then by client id. Rounds
        without uploads do not call this method. An algorithm defines the method, or `add` and `from_sums`.
        """
        if self.set_up is not None and not ctx.round:
            return self.set_up.server_update(server, down, arrivals, ctx)
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
        raise UsageError(f"{self.name} defines from_sums, and no add")

    def from_sums(self, server: Server, down: Down, sums: Any, ctx: Context) -> Server:
        """Compute the server's next state from the sums over all uploads of the exchange."""
        raise UsageError(f"{self.name} defines add, and no from_sums: the server's next state from the sums")

    @abstractmethod
    def model(self, server: Server, ctx: Context) -> Model:
        """Return the model to evaluate; before the first fold, this is Point(ctx.start)."""
