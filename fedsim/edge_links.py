"""The links of edge servers: to the root, and the one that its clients share.

    T_e = the time of the slowest upload of edge server e's clients, and at least the time of all their
          bytes on clients_down and clients_up
    E_e = rtt + 8 hop_down / down + T_e + 8 hop_up / up

hop_down is the broadcast that the edge server gets once, hop_up the sums that it sends. An exchange lasts as
long as the slowest E_e, and at least the time of all hops' bytes on the root's own link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from fedsim.client_devices import Floats
from fedsim.tree import Tree

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EdgeLinks:
    """Columns (E,): bits per second of the hop in both directions, the seconds of its round trip, and bits
    per second of the link that the clients share."""

    up: Floats
    down: Floats
    rtt: Floats
    clients_up: Floats
    clients_down: Floats

    @staticmethod
    def of(values: Mapping[str, Mapping[str, float]], names: tuple[str, ...]) -> EdgeLinks:
        """values: the columns that differ from the default, by edge server, with '' for all others."""
        every = values.get("", {})
        columns = {
            f.name: np.array([{**every, **values.get(e, {})}.get(f.name, _DEFAULT[f.name]) for e in names])
            for f in fields(EdgeLinks)
        }
        return EdgeLinks(**columns)

    @property
    def shared(self) -> bool:
        """True if clients of an edge server share a link."""
        return bool(np.isfinite(self.clients_up).any() or np.isfinite(self.clients_down).any())


_DEFAULT = {"rtt": 0.0, **dict.fromkeys(("up", "down", "clients_up", "clients_down"), math.inf)}
COLUMNS = tuple(_DEFAULT)


@dataclass(frozen=True, eq=False)
class Hops:
    """Stream bytes between each edge server and the root in one exchange, (E,) each; 0 for those without a
    client in it."""

    down: Ints
    up: Ints


def tree_seconds(
    tree: Tree,
    links: EdgeLinks,
    deadline: float,
    clients: Ints,
    answers: tuple[Floats, npt.NDArray[np.bool_]],
    sent: tuple[Ints, Ints],
    hops: Hops,
) -> float:
    """The seconds until the last sums have arrived at the root.

    deadline: of an edge server's clients, in seconds; inf without one. clients: those that got the broadcast,
    (n,). answers: their own seconds (n,), and whether they sent an upload (n,). sent: their bytes down and
    up, (n,) each.
    """
    owners, count = tree.owners[clients], len(tree.names)
    seconds, answered = answers
    slowest = np.zeros(count)
    np.maximum.at(slowest, owners[answered], seconds[answered])
    down, up = (np.bincount(owners, weights=w, minlength=count) for w in sent)
    inside = np.maximum(slowest, np.maximum(8 * down / links.clients_down, 8 * up / links.clients_up))
    if deadline < math.inf:
        silent = np.bincount(owners[~answered], minlength=count) > 0
        inside = np.where(silent, deadline, np.minimum(inside, deadline))
    lasts = links.rtt + 8 * hops.down / links.down + inside + 8 * hops.up / links.up
    return float(lasts[np.unique(owners)].max(initial=0.0))
