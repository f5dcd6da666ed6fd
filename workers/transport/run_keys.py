"""A run's keys: the coordinator's pair, and one pair for each of its workers.

The coordinator generates the keys when it starts. If workers need keys earlier, as in a Kubernetes manifest,
the keys are generated first and passed to the coordinator with `--keys FILE`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from fedsim.errors import UsageError
from workers.transport.join_credentials import FORMAT, JoinCredentials, KeyFile, KeyPair, read_keys

KEYS_FORMAT = 1
LONGEST_FRAME = 2**40
"""The largest frame, in bytes, from a coordinator whose model is unknown when the keys are generated. Workers
trust it, because they have its public key."""


class RunKeys(KeyFile, frozen=True, forbid_unknown_fields=True):
    """A run's keys. url: the coordinator's address at every start; '' if there is only one start."""

    url: str
    server: KeyPair
    workers: Annotated[tuple[KeyPair, ...], Meta(min_length=1, max_length=4096)]

    @staticmethod
    def new(workers: int, url: str = "") -> RunKeys:
        """Generate keys for this many workers."""
        return RunKeys(KEYS_FORMAT, url, KeyPair.new(), tuple(KeyPair.new() for _ in range(workers)))

    @staticmethod
    def read(path: Path, workers: int) -> RunKeys:
        """Read a file of keys for this many workers.

        Raises:
            UsageError: if the file cannot be read, is open to others, or has another number of workers.
            DataError: if the file is damaged.
        """
        result = read_keys(path, RunKeys, KEYS_FORMAT, "a file of keys")
        if len(result.workers) != workers:
            raise UsageError(
                f"--keys {path} has keys for {len(result.workers)} workers, this run has {workers}"
            )
        return result

    def join(self, run: str, numerics: str, url: str = "", max_frame: int = LONGEST_FRAME) -> JoinCredentials:
        """Return the join credentials of a run's workers.

        url: the coordinator's address, if the keys do not name it. max_frame: the longest frame that the
        coordinator sends, in bytes.
        """
        public, lasting = self.server.public, bool(self.url)
        return JoinCredentials(
            *(FORMAT, run, self.url or url, public, max_frame, self.workers, numerics), lasting=lasting
        )
