"""Choose a process's worker number (seat): its rank under the engine that started it, or a free seat.

The join file has a key for each seat. `srun`, `mpirun`, `torchrun` and an Indexed Job of Kubernetes give each
process a rank, so all workers can have the same command line. Without ranks, each process locks one byte of
the join file for its seat; the kernel releases the lock when the process ends.

References:
    https://slurm.schedmd.com/srun.html (SLURM_PROCID)
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode (JOB_COMPLETION_INDEX)
    https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html (OMPI_COMM_WORLD_RANK)
    https://docs.pytorch.org/docs/stable/elastic/run.html (RANK)
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fedsim.errors import UsageError

RANKS = ("JOB_COMPLETION_INDEX", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
"""Environment variables with a process's rank, the innermost launcher first: under mpirun in a Slurm
allocation, SLURM_PROCID is the rank of the batch script."""


def rank(environment: Mapping[str, str]) -> int:
    """Return the rank that the engine has given this process.

    Raises:
        UsageError: if there is no rank, or it is not a number.
    """
    name = next((name for name in RANKS if environment.get(name)), "")
    if not name:
        raise UsageError(
            f"--seat auto: no engine has given this process a rank ({', '.join(RANKS)}); give --seat I, or "
            "leave it out: the first free one is taken"
        )
    if not environment[name].isdecimal():
        raise UsageError(f"--seat auto: {name} is {environment[name]!r}, which is no rank")
    return int(environment[name])


class SeatLocks:
    """Locks on the seats of one join file, for processes that share the file.

    If the file system has no locks, or the file was copied, two processes may take the same seat. The
    coordinator refuses the second one, which then tries the next seat.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file, if any, and keep it open, because closing it would release the locks."""
        self._file: BinaryIO | None = None
        if path is not None:
            with suppress(OSError):
                self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 (close() closes it)

    def free(self, seats: Iterable[int]) -> Iterator[int]:
        """Yield the seats that no other process has locked; this process locks each one while it tries it."""
        for seat in seats:
            if self._lock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB):
                yield seat
                self._lock(seat, fcntl.LOCK_UN)  # not reached once this process has taken the seat

    def _lock(self, seat: int, how: int) -> bool:
        if self._file is None:
            return True
        try:
            fcntl.lockf(self._file, how, 1, seat, os.SEEK_SET)
        except OSError as e:  # any other error: no locks on this file system
            return not isinstance(e, BlockingIOError)
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
