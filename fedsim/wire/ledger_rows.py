"""The rows of ledger.csv. This module does not import torch, so that runs can be read without it."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One row of ledger.csv."""

    kind: str
    round: int
    exchange: int
    client: int
    worker: int
    direction: str
    message: str
    field: str
    layer: str
    codec: str
    dense_bytes: int
    bytes: int
    hop: str = ""
    """The edge server whose connection to the root carried the envelope; empty for a client's connection."""


TREE_COLUMNS = Entry._fields
"""The columns of a run with edge servers."""
COLUMNS = TREE_COLUMNS[:-1]
"""The columns of any other run."""
