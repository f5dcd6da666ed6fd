"""What of metrics.jsonl must be the same bits in every way to carry out a run, and how a process is started
that has imported only."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def without_seconds(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All keys but those of measured time."""
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


def fresh_processes(test: str, deadline: float) -> Callable[..., int]:
    """Runs a function of the module `test` in a process forked from one that has imported only; returns its
    exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["launch.session.session", "torch.optim", test])

    def run(what: Callable[..., None], *supplied: Any) -> int:
        process = context.Process(target=what, args=supplied)
        process.start()
        process.join(deadline)
        assert process.exitcode is not None, "it hangs"
        code = process.exitcode
        process.close()
        return code

    return run
