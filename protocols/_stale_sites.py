"""Uploads that answer older broadcasts, where the server keeps a sum of what every client has changed.

A site's change is computed from the upload and the broadcast that it answers, on the client and on the server
alike, and the changes add up in any order. So the server's sum stays the sum of the clients' sites, whatever
the staleness. A weight below 1 (--async fedbuff:B+damp:P) damps the change on both sides alike; without
damp:P there is none. Source: asynchronous PVI, Ashman et al. 2022, Sec. 3, https://arxiv.org/abs/2202.12275.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from fedsim.algorithm import Algorithm, Arrival, Context

Server = TypeVar("Server")


def one_by_one(
    algorithm: Algorithm[Server, Any, Any, Any], server: Server, arrivals: Iterable[Arrival], ctx: Context
) -> Server:
    """The server's state after every upload was folded with the broadcast that it answers."""
    for a in arrivals:
        server = algorithm.server_update(server, a.down, [(a.client, a.up)], replace(ctx, weight=a.weight))
    return server
