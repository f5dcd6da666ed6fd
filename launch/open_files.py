"""How many files a run may have open at once."""

from __future__ import annotations

import resource

from fedsim.errors import UsageError

SPARE, PER_WORKER = 128, 4
"""Libraries, data and the run's files; a worker's connection, its process and what replaces it."""


def allow_open_files(workers: int) -> None:
    """Raise this process's limit as far as the run needs. libzmq ends a process that has none left, so this
    is seen to first.

    Raises:
        UsageError: if the limit cannot be raised so far.
    """
    needed = SPARE + PER_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{workers} workers need {needed} open files, and this shell allows {hard} (ulimit -Hn): "
            "have the limit raised, or take fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
