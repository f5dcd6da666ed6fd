"""The rounds of an experiment: who takes part, over which edge servers and links, and by which policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedsim import event_rules
from fedsim.algorithm import Algorithm
from fedsim.asynchrony import asynchrony
from fedsim.client_devices import Link
from fedsim.experiment import Experiment
from fedsim.feature_pairs import (
    ASYNC,
    DEADLINE,
    EVENT,
    LAST,
    NOT_FULL,
    OWN,
    QUIET,
    SERVER_LINK,
    SHARED_LINK,
    TREE,
)
from fedsim.messages import Messages
from fedsim.participation import Schedule, has_all_clients, schedule
from fedsim.round_policy import RoundPolicy
from fedsim.tree import Tree, tree
from fedsim.virtual_clock import Clock, ExchangeClock, clock
from fedsim.wire.codecs import codec


@dataclass(frozen=True)
class Rounds:
    """The rounds of an algorithm on one problem. sizes: N_k of each client; a plan may do without: ()."""

    experiment: Experiment
    algorithm: Algorithm[Any, Any, Any, Any]
    messages: Messages
    sizes: tuple[int, ...]

    @cached_property
    def features(self) -> frozenset[str]:
        """The features of fedsim.feature_pairs that are on."""
        e, codecs = self.experiment, [codec(name) for name in self.messages.codecs["down"].values()]
        spec, up, down = event_rules.split(e.participation)
        clock = self.clock if e.deadline or e.asynchronous else None
        server = clock is not None and clock.server != Link()
        on = {
            ASYNC: e.asynchronous,
            DEADLINE: e.deadline,
            TREE: e.tree,
            EVENT: up is not None,
            QUIET: down is not None,
            LAST: any(c.last and not c.own for c in codecs),
            OWN: any(c.own for c in codecs),
            NOT_FULL: not has_all_clients(spec),
            SERVER_LINK: server,
            SHARED_LINK: server or (clock is not None and clock.has_shared_edges),
        }
        return frozenset(name for name, value in on.items() if value)

    @property
    def refers_to_last(self) -> bool:
        """True if broadcasts are encoded relative to the previous broadcast (+last)."""
        return LAST in self.features

    @cached_property
    def tree(self) -> Tree | None:
        """The edge servers, or None.

        Raises:
            FedsimError: If --tree or its file is wrong.
        """
        return tree(self.experiment.tree, self.experiment.clients)

    @cached_property
    def clock(self) -> Clock | None:
        """The virtual clock, or None. A centralised algorithm has none, because it uses no network links.

        Raises:
            FedsimError: If the options are wrong, even for a centralised algorithm.
        """
        e = self.experiment
        described = clock(e.link, e.compute, e.deadline, clients=e.clients, seed=e.seed, tree=self.tree)
        return None if self.algorithm.centralised else described

    def check(self) -> None:
        """Check the options of the clock, which are otherwise read when they are needed.

        Raises:
            FedsimError: If one of them is wrong.
        """
        self.exchange_clock()

    @cached_property
    def policy(self) -> RoundPolicy:
        """The object that decides which broadcast an upload answers, what it weighs and whether it counts.

        Raises:
            UsageError: If --async does not fit the algorithm or the other options.
        """
        if isinstance(self.algorithm, RoundPolicy):
            return self.algorithm
        if not self.experiment.asynchronous:
            return RoundPolicy()
        sizes = self.messages.sizes(1, 1)
        nbytes = sizes["down"].total, sizes["up"].total
        return asynchrony(self.experiment.asynchronous, self.algorithm, self.clock, self.sizes, nbytes)

    def schedule(self) -> Schedule:
        """Return the schedule of participation.

        Raises:
            UsageError: If it does not fit the clients.
            DataError: If its trace file is wrong.
        """
        e, steps, clients = self.experiment, self.policy.schedule, self.messages.dims["K"]
        decided = None if steps is None else (lambda round: steps.step(round).participants)
        return schedule(e.participation, clients=clients, seed=e.seed, sizes=self.sizes, decided=decided)

    def exchange_clock(self) -> ExchangeClock:
        """Return the clock of successive exchanges."""
        steps = self.policy.schedule
        decided = None if steps is None else (lambda round: steps.step(round).seconds)
        return ExchangeClock(self.clock, self.sizes, decided)

    def counted(self, asked: int) -> int:
        """Return |S| for a step rule: `asked`, or 0, which means all, in an asynchronous run."""
        return 0 if self.experiment.asynchronous else asked
