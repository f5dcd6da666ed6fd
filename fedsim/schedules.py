"""Who takes part: pure functions of (seed, round, roster)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedsim.errors import UsageError
from fedsim.seeds import Stream


@dataclass(frozen=True)
class Turnout:
    """One round's schedule: who takes part, and whose upload is lost before the fold."""

    participants: tuple[int, ...]
    lost: frozenset[int] = frozenset()


Schedule = Callable[[int], Turnout]
"""From the round (counted from 1) to its turnout."""

SPECS = {
    "full": "every client, every round",
    "0.3": "a share of the clients (a number with a point, at most 1), uniformly, fresh every round",
    "3": "that many clients (a whole number), uniformly, fresh every round",
}


def schedule(spec: str, *, clients: int, seed: int) -> Schedule:
    """The schedule that `--participation` names. Errors: UsageError if it names none."""
    count = _count(spec, clients)
    if count == clients:
        everyone = Turnout(tuple(range(clients)))
        return lambda round: everyone

    def uniform(round: int) -> Turnout:
        drawn = Stream(seed, "participation", round).numpy("uniform").choice(clients, count, replace=False)
        return Turnout(tuple(sorted(int(k) for k in drawn)))

    return uniform


def _count(spec: str, clients: int) -> int:
    """How many clients take part per round; a share is rounded, and is at least one client."""
    if spec == "full":
        return clients
    try:
        if "." in spec:
            share = float(spec)
            if 0 < share <= 1:
                return max(1, round(share * clients))
        else:
            count = int(spec)
            if 0 < count <= clients:
                return count
    except ValueError:
        pass
    raise UsageError(
        f"--participation {spec!r}: give 'full', a share such as 0.3, "
        f"or a number of clients from 1 to {clients}"
    )
