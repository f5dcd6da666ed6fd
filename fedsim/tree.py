"""Trees: clients upload to their edge server, and edge servers send one sum each to the root.

    edge e:  p_e = sum over the uploads of its clients                                   (Algorithm.add)
    root:    server <- step(server, ((sums of the server + p_1) + p_2) + ...)      (merged, from_sums)

The tree is part of the experiment, and a grouping of clients: the coordinator computes the sums of all edge
servers in the order of the tree. Sums are in float64, and no codec changes them. The messages between edge
servers and root are not sent either; their bytes are computed and booked. A single edge server forwards the
uploads, and results are bit for bit those without a tree. In the set-up, which happens once, all edge servers
forward the uploads.

Source: hierarchical aggregation, Bonawitz et al. 2019, Sec. 4, https://arxiv.org/abs/1902.01046.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedsim.algorithm import Algorithm, Exchange
from fedsim.errors import DataError, UsageError
from fedsim.specs import whole
from fedsim.user_files import read_toml
from fedsim.wire.schema import Dims, FieldKind, optional_group, summed_scalars

_EVEN = re.compile(r"([1-9][0-9]{0,17})x([1-9][0-9]{0,17})")
USAGE = "write 4x25, four edge servers of 25 clients each, or a file FILE.toml"


@dataclass(frozen=True, eq=False)
class Tree:
    """The edge servers of a run. names: their names, in the order in which their sums are added. owners: the
    number of each client's edge server, shape (K,)."""

    names: tuple[str, ...]
    owners: npt.NDArray[np.int32]

    @property
    def merges(self) -> bool:
        """True if edge servers send sums; a single edge server forwards the uploads."""
        return len(self.names) > 1

    def sums(self, round: int) -> bool:
        """Return whether edge servers send sums in a round; in the set-up, round 0, they forward uploads."""
        return self.merges and round > 0

    def edge_of(self, client: int) -> int:
        """Return the number of a client's edge server."""
        return int(self.owners[client])

    def ordered(self, clients: Iterable[int]) -> list[int]:
        """Sort clients into the order of the fold: by edge server, then by id."""
        return sorted(clients, key=lambda k: (self.owners[k], k))

    def active(self, clients: Iterable[int]) -> list[int]:
        """Return the edge servers of these clients, ascending."""
        ids = np.fromiter(clients, dtype=np.int64)
        return [int(e) for e in np.unique(self.owners[ids])]


def fold_order(tree: Tree | None) -> Callable[[Iterable[int]], list[int]]:
    """Return the function that sorts clients into the order of the fold; without a tree, by ascending ids."""
    return sorted if tree is None else tree.ordered


def is_file(text: str) -> bool:
    """Return whether --tree names a file."""
    return text.endswith(".toml")


def tree(text: str, clients: int) -> Tree | None:
    """Return the tree that --tree describes; None if there is none."""
    if not text:
        return None
    if is_file(text):
        return _of_file(Path(text), clients)
    even = _EVEN.fullmatch(text)
    if even is None:
        raise UsageError(f"--tree {text!r}: {USAGE}")
    edges, each = int(even[1]), int(even[2])
    if edges * each != clients:
        raise UsageError(
            f"--tree {text}: {edges} x {each} = {edges * each:,} clients; there are {clients:,} (--clients)"
        )
    return Tree(tuple(f"edge{e}" for e in range(edges)), np.repeat(np.arange(edges, dtype=np.int32), each))


def check_tree(tree: Tree, algorithm: Algorithm[Any, Any, Any, Any]) -> None:
    """Check that edge servers can be used between an algorithm's clients and its server.

    Raises:
        UsageError: If they cannot; the message says why.
    """
    name = algorithm.name
    if algorithm.centralised:
        raise UsageError(f"--tree: {name} is not federated: one client has the rows of all")
    exchanges = (*algorithm.setup, *algorithm.exchanges)
    if any(optional_group(message) for e in exchanges for message in (e.down, e.up)):
        raise UsageError(f"--tree: messages of {name} have a part that is one client's own")
    if tree.merges and any(e.sums is None for e in algorithm.exchanges):
        raise UsageError(
            f"--tree: the server of {name} needs every upload by itself, and an edge server sends a sum"
        )


def _of_file(path: Path, clients: int) -> Tree:
    """Read a TOML file with a table `edges`, in which a line is NAME = "0-24,30" or NAME = [0, 1, 30]."""
    try:
        edges = read_toml(path).get("edges")
    except OSError as e:
        raise UsageError(f"--tree {path}: {e.strerror}") from None
    except DataError as e:
        raise DataError(f"--tree {e}") from None
    if not isinstance(edges, Mapping) or not edges:
        raise DataError(f'{path} has no table [edges] with a line NAME = "0-24" for every edge server')
    owners = np.full(clients, -1, dtype=np.int32)
    for number, (name, value) in enumerate(edges.items()):
        if not name or len(name) > 32 or not name.isascii() or not name.isprintable() or "," in name:
            raise DataError(f"{path}: {name!r} is no name of an edge server: 1 to 32 letters, no comma")
        for k in _ids(value, f"{path}, edge {name}"):
            if not 0 <= k < clients:
                raise DataError(f"{path}, edge {name}: client {k}; clients count from 0 to {clients - 1}")
            if owners[k] >= 0:
                raise DataError(f"{path}: client {k} has two edge servers, {[*edges][owners[k]]} and {name}")
            owners[k] = number
    alone = np.flatnonzero(owners < 0)
    if len(alone):
        raise DataError(f"{path}: client {alone[0]} has no edge server")
    empty = set(range(len(edges))) - {int(e) for e in np.unique(owners)}
    if empty:
        raise DataError(f"{path}: edge {[*edges][min(empty)]} has no client")
    return Tree(tuple(edges), owners)


def _ids(value: object, where: str) -> Iterator[int]:
    """Parse client ids: "0-24,30" or [0, 1, 30]."""
    if isinstance(value, list) and all(type(k) is int for k in value):
        yield from value
        return
    for part in value.split(",") if isinstance(value, str) else ("",):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        low, high = whole(first), whole(last if dash else first)
        if low < 0 or high < low or high - low > 100_000_000:
            raise DataError(f'{where}: {value!r}; write "0-24,30" or [0, 1, 30]')
        yield from range(low, high + 1)


# ---- the message of an edge server, which is not sent: its class gives its size

Rows = Annotated[Tensor, FieldKind("info", ("U", "S"), dtype="f64", elastic=True)]
"""The S scalars (for metrics.jsonl) of each of U uploads, in ascending order of client id, shape (U, S)."""


@cache
def sums_message(exchange: Exchange) -> type:
    """Return the class of an edge server's message: the algorithm's sums, and the uploads' scalars if any."""
    assert exchange.sums is not None  # checked by check_tree
    sums = [*get_type_hints(exchange.sums, include_extras=True).items()]
    scalars = [("scalars", Rows)] if summed_scalars(exchange.up) else []
    return make_dataclass("EdgeSums", [*sums, *scalars], frozen=True)


def sums_dims(exchange: Exchange, dims: Dims, uploads: int) -> Dims:
    """Return the dimensions of the fields of an edge server's message that sums this many uploads."""
    return {**dims, "U": uploads, "S": len(summed_scalars(exchange.up))}
