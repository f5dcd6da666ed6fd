"""A user's own schedule, FILE.py:NAME: a function (population) that returns a function (round).

The inner function gives a Participation, or only the ids of the clients that take part, ascending. Both are
pure: the bits of a run depend on them, and a resumed run asks for the same rounds again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fedsim import plugins
from fedsim.errors import UsageError

if TYPE_CHECKING:
    from fedsim.participation import ClientPopulation, Participation

OPTION = "--participation"
TRIED = 3
"""Rounds that are drawn in two orders before the run, to see that a round does not depend on the last."""


def users_schedule(spec: str, population: ClientPopulation) -> Callable[[int], Participation]:
    """The schedule of a user's file, checked in every round.

    Raises:
        UsageError: if it is no function, if it fails, or if it is not pure.
    """
    make = plugins.load(spec, OPTION)
    if not callable(make):
        raise UsageError(f"{_owner(spec)} is a {type(make).__name__}; name a function (population)")
    draws = [_created(spec, make, population) for _ in range(2)]

    def participation(round: int) -> Participation:
        first, second = (_drawn(spec, draw, round, population.clients) for draw in draws)
        _same(spec, round, first, second)
        return first

    rounds = range(1, TRIED + 1)
    forwards = {round: _drawn(spec, draws[0], round, population.clients) for round in rounds}
    for round in reversed(rounds):
        _same(spec, round, forwards[round], _drawn(spec, draws[1], round, population.clients))
    return participation


def _owner(spec: str) -> str:
    return f"{OPTION} {plugins.short(spec)}"


def _created(
    spec: str, make: Callable[[ClientPopulation], Any], population: ClientPopulation
) -> Callable[[int], Any]:
    with plugins.user_code_errors(spec, OPTION, f"calling it for {population.clients} clients"):
        draw = make(population)
    if not callable(draw):
        raise UsageError(f"{_owner(spec)} must return a function (round); it returns a {type(draw).__name__}")
    created: Callable[[int], Any] = draw
    return created


def _drawn(spec: str, draw: Callable[[int], Any], round: int, clients: int) -> Participation:
    from fedsim.participation import Participation

    with plugins.user_code_errors(spec, OPTION, f"drawing round {round}"):
        supplied = draw(round)
        if not isinstance(supplied, Participation):
            supplied = Participation(tuple(supplied))
        ids = [_id(spec, round, k, clients) for k in supplied.participants]
        lost = frozenset(_id(spec, round, k, clients) for k in supplied.lost_uploads)
        dropouts = frozenset(_id(spec, round, k, clients) for k in supplied.dropouts)
    if any(a >= b for a, b in pairwise(ids)):
        raise UsageError(
            f"{_owner(spec)}, round {round}: the ids must ascend, each once; they are {ids[:20]}"
        )
    if others := sorted((lost | dropouts) - set(ids)):
        raise UsageError(
            f"{_owner(spec)}, round {round}: client {others[0]} loses its upload or drops out, but "
            "does not take part"
        )
    return Participation(tuple(ids), lost - dropouts, dropouts)


def _id(spec: str, round: int, value: object, clients: int) -> int:
    """A client's id as a Python number; numpy's whole numbers are taken, too."""
    try:
        k = value.__index__() if not isinstance(value, bool) else None  # type: ignore[attr-defined]
    except AttributeError:
        k = None
    if k is None or not 0 <= k < clients:
        raise UsageError(
            f"{_owner(spec)}, round {round}: a client's id is a whole number from 0 to {clients - 1}, not "
            f"{value!r}"
        )
    return int(k)


def _same(spec: str, round: int, first: Participation, second: Participation) -> None:
    if first != second:
        raise UsageError(
            f"{_owner(spec)}: round {round} differs when it is drawn again. A schedule depends on nothing "
            "but the population and the round: draw from population.draws(round)"
        )


def participants(ids: Iterable[int] | Participation) -> Participation:
    """What a schedule draws, of the built-in bases and of users' alike."""
    from fedsim.participation import Participation

    return ids if isinstance(ids, Participation) else Participation(tuple(ids))
