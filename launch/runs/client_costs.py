"""An algorithm's bytes per client and round, and its one-time bytes per client
(docs/decisions/005-units-of-p.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from fedsim.algorithm import Algorithm
    from fedsim.wire.ledger_rows import Entry

SIDES = ("down", "up")
Sent = tuple[int, str, str]
"""The number of the exchange (1 or 2), the direction, and the name of a message field."""


def sent_once(algorithm: Algorithm[Any, Any, Any, Any]) -> frozenset[Sent]:
    """Return the fields that each client receives or sends once: those in optional groups."""
    from fedsim.wire.schema import optional_group, schema  # imports torch

    return frozenset(
        (number, side, f.name)
        for number, exchange in enumerate(algorithm.exchanges, 1)
        for side in SIDES
        if (group := optional_group(getattr(exchange, side)))
        for f in schema(group.message)
    )


@dataclass
class ClientCosts:
    """The algorithm's bytes by direction, including headers and framing.
    `optional` has the fields that are sent once (sent_once). `once` counts the bytes of these fields and of
    the set-up (round 0), and `rounds` counts all other bytes."""

    optional: frozenset[Sent] = frozenset()
    rounds: Counter[str] = field(default_factory=Counter)
    once: Counter[str] = field(default_factory=Counter)

    def counted(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the rows, and add up their bytes."""
        for e in entries:
            if e.kind == "algorithm":
                alone = not e.round or (e.exchange, e.direction, e.field) in self.optional
                (self.once if alone else self.rounds)[e.direction] += e.bytes
            yield e

    @property
    def total(self) -> int:
        """All bytes, in both directions."""
        return self.rounds.total() + self.once.total()

    def units(self, *, params: int, participations: int, clients: int) -> dict[str, float]:
        """Return the costs in units of P (4 * params bytes), as in summary.json.
        units_of_p_SIDE is per client and round, units_of_p_once_SIDE per client. participations: the number
        of pairs of a client and a round, from round 1, in which the client received the broadcast."""
        round, client = 4 * params * participations, 4 * params * clients
        return {f"units_of_p_{side}": self.rounds[side] / round if round else 0.0 for side in SIDES} | {
            f"units_of_p_once_{side}": self.once[side] / client if client else 0.0 for side in SIDES
        }


def of_ledger(
    rows: pandas.DataFrame, optional: frozenset[Sent], *, params: int, clients: int
) -> dict[str, float]:
    """Compute ClientCosts.units from ledger.csv, for runs whose summary.json lacks them."""
    own = rows[rows.kind == "algorithm"]
    alone = own["round"] == 0
    for number, side, name in optional:
        alone |= (own.exchange == number) & (own.direction == side) & (own.field == name)
    costs = ClientCosts(optional)
    for counter, part in ((costs.once, own[alone]), (costs.rounds, own[~alone])):
        counter.update({side: int(part.bytes[part.direction == side].sum()) for side in SIDES})
    sent = own[(own["round"] > 0) & (own.direction == "down")]
    participations = len(sent[["round", "client"]].drop_duplicates())
    return costs.units(params=params, participations=participations, clients=clients)
