"""The join file of an edge server on another machine, RUN/edges/join-000.json.

The file contains the edge server's own keys, the keys of its workers, and the keys of the port to which these
workers connect. The edge server opens connections to the root on behalf of its workers, with their keys. The
file is secret, like join.json, and its mode is 0600. Once the edge server knows its address, it writes the
join file of its workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from workers.transport.edge_addresses import FOLDER, workers_behind
from workers.transport.join_credentials import FORMAT, JoinCredentials, Key, KeyFile, KeyPair, read_keys
from workers.transport.run_keys import RunKeys

EDGE_FORMAT = 1


class EdgeCredentials(KeyFile, frozen=True, forbid_unknown_fields=True):
    """The content of the file. edge: the edge server's number in the tree. seat: its number at the root. own:
    its keys for the root. port: the keys of its port. workers: the keys of the workers `first`, `first` + 1,
    ... max_frame: the largest frame that a peer sends, in bytes."""

    run: str
    url: str
    server_key: Key
    max_frame: Annotated[int, Meta(ge=1, le=2**48)]
    edge: Annotated[int, Meta(ge=0)]
    seat: Annotated[int, Meta(ge=0)]
    own: KeyPair
    port: KeyPair
    workers: Annotated[tuple[KeyPair, ...], Meta(min_length=1, max_length=4096)]
    first: Annotated[int, Meta(ge=0)]
    numerics: str = "native"

    def of_workers(self, url: str) -> JoinCredentials:
        """Return the join credentials of the workers behind this edge server. url: its address.

        They are `lasting`: an edge server that has ended may return with the same file.
        """
        public, keys = self.port.public, self.workers
        return JoinCredentials(
            *(FORMAT, self.run, url, public, self.max_frame, keys, self.numerics), self.first, lasting=True
        )

    @staticmethod
    def read(path: Path) -> EdgeCredentials:
        """Read the file; raise the errors of read_keys."""
        return read_keys(path, EdgeCredentials, EDGE_FORMAT, "an edge server's join file")


def edge_join_file(run_dir: Path, edge: int) -> Path:
    """Return the path of the join file of edge server number `edge`, which the root writes."""
    return run_dir / FOLDER / f"join-{edge:03d}.json"


def of_edge(
    keys: RunKeys, edge: int, edges: int, *, run: str, url: str, max_frame: int, numerics: str
) -> EdgeCredentials:
    """Return the credentials of edge server number `edge` of `edges`.

    keys: the keys of all workers, then of all edge servers. run, url, max_frame, numerics: as in the file.
    """
    workers = len(keys.workers) - edges
    behind, seat = workers_behind(edge, workers, edges), workers + edge
    pairs = keys.workers[behind.start : behind.stop]
    own, public = keys.workers[seat], keys.server.public
    return EdgeCredentials(
        *(EDGE_FORMAT, run, url, public, max_frame, edge, seat, own, KeyPair.new(), pairs, behind.start),
        numerics,
    )
