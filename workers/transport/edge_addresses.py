"""The addresses of edge servers, and the workers of each.

A file each in the run folder says where, because a port is known only once it is open.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from fedsim.errors import TaskError
from workers.storage.atomic_files import write_atomically

FOLDER = "edges"
STEP = 0.02
"""Seconds between two looks."""


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """url: where it listens. token: what its workers' hello has to bring."""

    url: str
    token: str


def edge_of_worker(worker: int, workers: int, edges: int) -> int:
    """The edge server that a worker works behind: each has a block of them, so that their seats are one."""
    return worker * edges // workers


def workers_behind(edge: int, workers: int, edges: int) -> range:
    """The workers behind an edge server."""
    return range(-(-edge * workers // edges), -(-(edge + 1) * workers // edges))


def address_file(run_dir: Path, edge: int) -> Path:
    """The file in which edge server number `edge` of a run writes its address."""
    return run_dir / FOLDER / f"{edge:03d}.json"


def write_address(path: Path, address: Address) -> None:
    """Write it whole, for its owner alone: it has a token."""
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, [msgspec.json.encode(address)], mode=0o600)


def wait_for_address(path: Path, seconds: float) -> Address:
    """Read it as soon as it is there.

    Raises:
        TaskError: If it is not there in time.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Address)
        except FileNotFoundError:
            time.sleep(STEP)
    raise TaskError(f"no edge server has written {path} within {seconds:g} s")
