"""Pairs of features that cannot be used together, and why: one table for all options and docs/limits.md."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from fedsim.errors import UsageError

ASYNC, DEADLINE, TREE = "--async", "--deadline", "--tree"
EVENT, QUIET, LAST, OWN = "--participation +event", "--participation +quiet", "--codec +last", "--codec +own"
NOT_FULL = "a --participation that chooses clients"
SERVER_LINK = "a --link of the server (server_up, server_down)"
SHARED_LINK = "a --link that clients share (server_up, edge_clients_up, and the like)"


class Pair(NamedTuple):
    """Two features, and the reason why a run cannot have both."""

    one: str
    other: str
    reason: str


_SIZES = "the schedule is known before the run, and follows from message sizes that are then not known"
_DIFFERENT = "clients have different broadcasts, so there is no earlier one that all of them have"
_ONE = "an edge server passes one broadcast on to all its clients, and some may lack an earlier one"
PAIRS = (
    Pair(ASYNC, DEADLINE, "the server waits for no client"),
    Pair(ASYNC, SERVER_LINK, "there is no exchange in which clients share it"),
    Pair(ASYNC, NOT_FULL, "the virtual clock decides who is folded when; +gone and +lost are allowed"),
    Pair(ASYNC, EVENT, _SIZES),
    Pair(ASYNC, QUIET, _SIZES),
    Pair(ASYNC, LAST, _DIFFERENT),
    Pair(ASYNC, OWN, "the server keeps the broadcasts that are in use, and not one for each client"),
    Pair(TREE, ASYNC, "an edge server waits for all its clients of a round"),
    Pair(TREE, QUIET, "an edge server has one broadcast for all its clients"),
    Pair(TREE, LAST, _ONE),
    Pair(TREE, OWN, _ONE),
    Pair(LAST, OWN, "a run has one reference for its broadcasts"),
    Pair(LAST, QUIET, _DIFFERENT),
    Pair(OWN, EVENT, "each keeps the broadcasts of clients in its own way"),
    Pair(OWN, QUIET, "each keeps the broadcasts of clients in its own way"),
    Pair(DEADLINE, SHARED_LINK, "who is late on a shared link depends on all uploads"),
)


def check_pairs(features: Collection[str]) -> None:
    """Check that no two of these features exclude each other.

    Raises:
        UsageError: If two do; the message says which, and why.
    """
    for one, other, reason in PAIRS:
        if one in features and other in features:
            raise UsageError(f"{one} does not go with {other}: {reason}. Leave one of them out")
