"""Schedules of participation: pure functions of (seed, round, client population).

A schedule is a base, which draws the participants, and modifiers, which affect some of them:

    BASE[+gone:P][+lost:P][+event:RULE][+quiet:RULE]
    such as 0.3, coin:0.3, markov:0.1,0.5+lost:0.05, trace:who.csv, full+event:kl:0.001

gone (dropout): a client gets the broadcast and sends nothing back. lost (upload loss): the client's upload
arrives and is not folded. gone and lost affect each participant with probability P, independently. Their
draws are separate from those of the base, so that a base gives the same participants with and without
modifiers. event and quiet decide from computed values whether a message is sent (fedsim.event_trigger).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim import event_rules, plugins, traces
from fedsim.errors import DataError, UsageError
from fedsim.seeds import RandomStream
from fedsim.specs import Form, parse, plain_share, probability, split_modifiers, whole
from fedsim.user_files import opened_text, other_separator

OPTION = "--participation"


@dataclass(frozen=True)
class Participation:
    """One round's schedule, ids ascending.

    Attributes:
        participants: The clients that get the broadcast.
        lost_uploads: The participants whose upload is lost before the fold.
        dropouts: The participants that send no upload.

    Examples:
        >>> import fedsim
        >>> fedsim.Participation((0, 2, 5), dropouts=frozenset({2})).participants
        (0, 2, 5)
    """

    participants: tuple[int, ...]
    lost_uploads: frozenset[int] = frozenset()
    dropouts: frozenset[int] = frozenset()


Schedule = Callable[[int], Participation]
"""Maps a round, counted from 1, to its participation."""

Participants = Callable[[int], Sequence[int] | Participation]
"""Maps a round to the ids of its participants, ascending."""


@dataclass(frozen=True)
class ClientPopulation:
    """All clients of a run: their number, N_k of each client (empty: unknown), and the seed of the draws.

    Examples:
        >>> import fedsim
        >>> population = fedsim.ClientPopulation(clients=6, seed=0)
        >>> first, again = (population.draws(round=1).random(6) for _ in range(2))
        >>> bool((first == again).all())
        True
    """

    clients: int
    seed: int
    sizes: tuple[int, ...] = ()

    def draws(self, round: int, purpose: str = "participation") -> np.random.Generator:
        return RandomStream(self.seed, purpose, round).numpy("uniform")


@dataclass(frozen=True)
class Base:
    """A kind of schedule (`fedsim list schedules`). make(arguments, population) returns its Participants."""

    form: Form
    description: str
    make: Callable[[tuple[str, ...], ClientPopulation], Participants]


def schedule(
    spec: str, *, clients: int, seed: int, sizes: tuple[int, ...] = (), decided: Participants | None = None
) -> Schedule:
    """Return the schedule of `--participation`; +event and +quiet have no effect on it.

    sizes: N_k of every client, if known. decided: the participants, if fedsim.asynchrony determines them.
    """
    population = ClientPopulation(clients, seed, sizes)
    spec, *_ = event_rules.split(spec)
    base, arguments, chances = _parse(spec)
    participants = decided or base.make(arguments, population)

    def participation(round: int) -> Participation:
        drawn = participants(round)
        if not isinstance(drawn, Participation):
            drawn = Participation(tuple(drawn))
        selected = drawn.participants
        dropouts = drawn.dropouts | _affected(selected, chances.get("gone", 0.0), population, round, "gone")
        lost = drawn.lost_uploads | _affected(selected, chances.get("lost", 0.0), population, round, "lost")
        return Participation(selected, lost - dropouts, dropouts)

    return participation


def has_all_clients(spec: str) -> bool:
    """Return whether all clients take part in every round. spec: a schedule without +event and +quiet."""
    return _parse(spec)[0] is BASES["full"]


def _affected(
    participants: tuple[int, ...], chance: float, population: ClientPopulation, round: int, what: str
) -> frozenset[int]:
    """Return the participants that a modifier affects. Every client has one draw, participant or not."""
    if not chance:
        return frozenset()
    drawn = population.draws(round, what).random(population.clients)
    return frozenset(k for k in participants if drawn[k] < chance)


# ---- bases


def _full(arguments: tuple[str, ...], population: ClientPopulation) -> Participants:
    everyone = tuple(range(population.clients))
    return lambda round: everyone


def _uniform(count: int, population: ClientPopulation) -> Participants:
    """Draw `count` clients without replacement, anew in every round."""
    if count == population.clients:
        return _full((), population)
    return lambda round: _ascending(population.draws(round).choice(population.clients, count, replace=False))


def _coin(arguments: tuple[str, ...], population: ClientPopulation) -> Participants:
    chance = probability(arguments[0], "--participation coin")
    return lambda round: _ascending(
        np.flatnonzero(population.draws(round).random(population.clients) < chance)
    )


def _robin(arguments: tuple[str, ...], population: ClientPopulation) -> Participants:
    count = _number_of_clients("robin", arguments[0], population)
    return lambda round: _ascending((np.arange(count) + (round - 1) * count) % population.clients)


def _by_size(arguments: tuple[str, ...], population: ClientPopulation) -> Participants:
    """Draw clients without replacement, with probabilities proportional to N_k at every draw."""
    count = _number_of_clients("size", arguments[0], population)
    if not population.sizes:
        raise UsageError("--participation size:N needs to know how much data every client has")
    weights = np.array(population.sizes, dtype=np.float64)
    chances = weights / weights.sum()
    return lambda round: _ascending(
        population.draws(round).choice(population.clients, count, replace=False, p=chances)
    )


def _markov(arguments: tuple[str, ...], population: ClientPopulation) -> Participants:
    """Switch each client off and on between rounds, with probabilities `leave` and `come`. Round 1 is drawn
    from the stationary distribution, in which a client is on with probability come / (come + leave)."""
    leave, come = (probability(text, "--participation markov") for text in arguments)
    if not leave + come:
        raise UsageError("--participation markov:0,0 would never change, and has no long run to start from")
    known: dict[int, npt.NDArray[np.bool_]] = {}

    def on(round: int) -> npt.NDArray[np.bool_]:
        """Compute the clients that are on, from the last known round or from round 1."""
        at = max((r for r in known if r <= round), default=0)
        state = known.get(at, np.zeros(population.clients, dtype=bool))
        for r in range(at + 1, round + 1):
            drawn = population.draws(r).random(population.clients)
            state = drawn < (come / (come + leave) if r == 1 else np.where(state, 1 - leave, come))
        known.clear()
        known[round] = state
        return state

    return lambda round: _ascending(np.flatnonzero(on(round)))


def _trace(arguments: tuple[str, ...], population: ClientPopulation) -> Participants:
    """Read a CSV file with the columns round and client; rounds that the file does not name are empty."""
    path = Path(arguments[0]).expanduser()
    rounds: dict[int, set[int]] = {}
    try:
        with opened_text(path) as file:
            rows = csv.DictReader(file)
            heads = rows.fieldnames or ()
            if not {"round", "client"} <= set(heads):
                wrong = other_separator(",".join(heads)) or f"here it is {','.join(heads)!r}"
                raise DataError(f"trace {path}: the first line names the columns round and client; {wrong}")
            for number, row in enumerate(rows, start=2):
                round, client = (whole((row[key] or "").strip()) for key in ("round", "client"))
                if round < 1 or not 0 <= client < population.clients:
                    raise DataError(
                        f"trace {path}, line {number}: rounds count from 1, clients from 0 to "
                        f"{population.clients - 1}; here they are {row['round']!r} and {row['client']!r}"
                    )
                rounds.setdefault(round, set()).add(client)
    except OSError as e:
        raise UsageError(f"--participation trace:{path}: {e.strerror or e}") from None
    except csv.Error as e:
        raise DataError(f"trace {path} is no CSV file: {e}") from None
    participations = {r: tuple(sorted(participants)) for r, participants in rounds.items()}
    return lambda round: participations.get(round, ())


def _ascending(ids: npt.NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(np.sort(ids).tolist())


BASES: Mapping[str, Base] = MappingProxyType(
    {
        base.form.name: base
        for base in (
            Base(Form("full"), "every client, every round", _full),
            Base(Form("0.3"), "that share of the clients, uniformly, fresh every round", _full),
            Base(Form("3"), "that many clients, uniformly, fresh every round", _full),
            Base(Form("coin", ("P",)), "each client with probability P; a round may be empty", _coin),
            Base(Form("robin", ("N",)), "N clients in turn: 0 to N-1, then N to 2N-1, ...", _robin),
            Base(Form("size", ("N",)), "N clients, in proportion to their number of examples", _by_size),
            Base(
                Form("markov", ("LEAVE", "COME")),
                "clients go off and come back with these chances from round to round",
                _markov,
            ),
            Base(Form("trace", ("FILE",)), "as a CSV file says, columns round and client", _trace),
        )
    }
)

_FORMS = {name: base.form for name, base in BASES.items()}
_WORDS = frozenset(name for name in BASES if name.isalpha())
"""The bases with a name; the other bases are a share or a number of clients."""

SPECS = {
    **{base.form.usage: base.description for base in BASES.values()},
    "...+gone:P": "behind any of them: with probability P a participant gets the broadcast and sends nothing",
    "...+lost:P": "behind any of them: with probability P an upload arrives and is not folded",
    "...+event:norm:C": "behind any of them: a participant uploads only a change of at least norm C",
    "...+event:norm:P%": "the same, with P % of the norm of the change that it sent last",
    "...+event:kl:C": "the same, with C nats a parameter of KL to what the server has of it",
    "...+event:budget:B": "the same, with a threshold for which an upload costs B bytes, or P%, on average",
    "...+quiet:C": "behind any of them: a broadcast goes to a client only if it has moved by norm C, or kl:C",
}


# ---- specs


def _parse(spec: str) -> tuple[Base, tuple[str, ...], Mapping[str, float]]:
    """Return the base of a schedule, its arguments, and the chances of gone and lost."""
    path, modifiers = traces.split(spec)
    if spec.startswith(traces.PREFIX):
        _, chances = split_modifiers(modifiers, OPTION, traces.CHANCES, others=event_rules.FORMS)
        head = f"{traces.PREFIX}{path}"
    elif plugins.is_spec(path):
        _, chances = split_modifiers(modifiers, OPTION, traces.CHANCES, others=event_rules.FORMS)
        return Base(Form(path), "", lambda _, population: users_schedule(path, population)), (), chances
    else:
        head, chances = split_modifiers(plain_share(spec), OPTION, traces.CHANCES, others=event_rules.FORMS)
        if ":" not in head and head not in _WORDS:
            return _counted(head), (), chances
    name, arguments = parse(head, "schedule", _FORMS)
    return BASES[name], arguments, chances


def _counted(text: str) -> Base:
    """Return the base for a share (with a decimal point; at least one client) or a number of clients."""

    def make(arguments: tuple[str, ...], population: ClientPopulation) -> Participants:
        try:
            if "." in text:
                share = float(text)
                if 0 < share <= 1:
                    return _uniform(max(1, round(share * population.clients)), population)
            elif 0 < int(text) <= population.clients:
                return _uniform(int(text), population)
        except ValueError:
            pass
        raise UsageError(
            f"--participation {text!r}: give 'full', a share such as 0.3 or 30%, a number of clients from 1 "
            f"to {population.clients}, or one of fedsim list schedules"
        )

    return Base(Form(text), "", make)


def _number_of_clients(name: str, text: str, population: ClientPopulation) -> int:
    """Parse a number of clients, from 1 to all."""
    count = whole(text)
    if not 0 < count <= population.clients:
        raise UsageError(
            f"--participation {name}:{text}: give a number of clients from 1 to {population.clients}"
        )
    return count


# ---- a user's own schedule, FILE.py:NAME

TRIED = 3
"""The number of rounds to draw in two orders before a run, to check that no round depends on others."""


def users_schedule(spec: str, population: ClientPopulation) -> Callable[[int], Participation]:
    """Load a user's schedule; raise a UsageError if it fails or is no pure function of the round."""
    make = plugins.load(spec, OPTION)
    if not callable(make):
        raise UsageError(f"{_owner(spec)} is a {type(make).__name__}; name a function (population)")
    draws: list[Callable[[int], Any]] = []
    for _ in range(2):
        with plugins.user_code_errors(spec, OPTION, f"calling it for {population.clients} clients"):
            draw = make(population)
        if not callable(draw):
            raise UsageError(
                f"{_owner(spec)} must return a function (round); it returns a {type(draw).__name__}"
            )
        draws.append(draw)

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


def _drawn(spec: str, draw: Callable[[int], Any], round: int, clients: int) -> Participation:
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
    """Convert a client's id to a Python number; NumPy integers are accepted, too."""
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
