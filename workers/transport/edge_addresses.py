"""The addresses of edge servers, and the workers behind each of them.

Each edge server writes its address to a file in the run folder, because its port is unknown until it is open.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from fedsim.errors import TaskError
from workers.storage.atomic_files import write_atomically

FOLDER = "edges"
STEP = 0.02
"""Seconds between two attempts to read the file."""


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An edge server's address. url: where it listens. token: the secret in its workers' hello."""

    url: str
    token: str


def edge_of_worker(worker: int, workers: int, edges: int) -> int:
    """Return the edge server of a worker. The workers of an edge server have consecutive numbers."""
    return worker * edges // workers


def workers_behind(edge: int, workers: int, edges: int) -> range:
    """Return the numbers of the workers behind an edge server."""
    return range(-(-edge * workers // edges), -(-(edge + 1) * workers // edges))


def address_file(run_dir: Path, edge: int) -> Path:
    """Return the file to which edge server number `edge` of a run writes its address."""
    return run_dir / FOLDER / f"{edge:03d}.json"


def write_address(path: Path, address: Address) -> None:
    """Write the address atomically. Only the file's owner may read it, because it contains a token."""
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, [msgspec.json.encode(address)], mode=0o600)


def wait_for_address(path: Path, seconds: float) -> Address:
    """Wait for the file and return the address in it.

    Raises:
        TaskError: If the file does not appear within `seconds`.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Address)
        except FileNotFoundError:
            time.sleep(STEP)
    raise TaskError(f"no edge server has written {path} within {seconds:g} s")
