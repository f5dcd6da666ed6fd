"""The virtual clock of a plan: simulated seconds and energy, of all clients without a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsim.client_devices import Floats
from fedsim.edge_links import Hops, Ints
from fedsim.virtual_clock import Clock, indices

DRAWN = 300_000
"""Tasks whose noise and jitter are drawn at least; the durations of rounds after them are an estimate."""


class DevicePlan:
    """Counts who takes part, and adds up the durations of rounds.

    estimated: whether the durations of some rounds are the mean of those before; the seconds in which clients
    are busy are an expectation then, too.
    """

    def __init__(
        self,
        clock: Clock,
        sizes: tuple[int, ...],
        exchanges: Mapping[int, tuple[int, int]],
        hops: Callable[[int, int, Ints, Ints], Hops] | None = None,
    ) -> None:
        """sizes: N_k of all clients. exchanges: stream bytes of a broadcast and an upload of a round. hops:
        with a tree, the bytes of edge servers: of a round, an exchange, the clients that get the broadcast,
        and those whose uploads are folded."""
        self._clock, self._sizes, self._exchanges = clock, indices(sizes), exchanges
        self._hops = hops
        everyone = np.arange(len(sizes))
        self._draws = clock.has_draws(everyone)
        self._gone, self._took_part = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
        self._drawn = np.zeros(len(sizes), np.int64)
        """The number of rounds, by client, that it answered and whose seconds were drawn."""
        self._seconds, self._joules = np.zeros(len(sizes)), np.zeros(len(sizes))
        self._durations: list[float] = []
        self._last: tuple[Ints, float] = (indices(()), 0.0)
        self._tasks = 0
        self.setup_seconds = 0.0
        self.estimated = False

    def set_up(self, exchange: int, bytes_down: int, bytes_up: int) -> None:
        """Add an exchange of the set-up, in which all clients take part."""
        everyone, once = np.arange(len(self._sizes)), np.ones(len(self._sizes), np.int64)
        self._add(bytes_down, bytes_up, once, np.zeros_like(once), once if self._draws else 0 * once)
        of_everyone = everyone, np.ones(len(everyone), dtype=np.bool_), everyone
        self.setup_seconds += self._duration(0, exchange, *of_everyone, bytes_down, bytes_up)

    def add(
        self,
        round: int,
        clients: Ints,
        dropouts: Collection[int],
        step: tuple[float, Floats] | None = None,
        lost: Collection[int] = (),
    ) -> None:
        """Add a round.

        Args:
            round: Its number.
            clients: Those that get the broadcast; the same array if they are those of the round before.
            dropouts: Those of them that send nothing.
            step: The round's duration and the seconds of each of the clients, if an asynchronous schedule has
                decided them.
            lost: Those whose uploads do not arrive.
        """
        self._took_part[clients] += 1
        gone = indices(sorted(dropouts))
        self._gone[gone] += 1
        if step is not None:
            lasts, took = step
            answered = ~np.isin(clients, gone)
            self._durations.append(lasts)
            self._seconds[clients[answered]] += took[answered]
            self._drawn[clients[answered]] += 1
        elif not self._draws and not dropouts and not lost and clients is self._last[0]:
            self._durations.append(self._last[1])
        elif self._draws and self._tasks >= DRAWN:
            self.estimated = True
        else:
            answering = np.setdiff1d(clients, gone, assume_unique=True) if dropouts else clients
            folded = answering[~np.isin(answering, indices(sorted(lost)))] if lost else answering
            answers = ~np.isin(clients, gone) if dropouts else np.ones(len(clients), dtype=np.bool_)
            lasts = sum(
                self._duration(round, e, asked, there, folded, down, up)
                for e, (down, up) in self._exchanges.items()
                for asked, there in [(clients, answers) if e == 1 else (answering, answers[answers])]
            )
            self._durations.append(lasts)
            if not dropouts and not lost:
                self._last = clients, lasts
            if self._draws:
                self._drawn[answering] += 1
            self._tasks += len(clients)

    def totals(self, rounds: int) -> dict[str, Any]:
        """Return the key `devices` of a plan of this many rounds."""
        answered = self._took_part - self._gone
        for e, (down, up) in self._exchanges.items():
            self._add(down, up, answered, self._gone if e == 1 else np.zeros_like(answered), self._drawn)
        mean = math.fsum(self._durations) / max(len(self._durations), 1)
        left = rounds - len(self._durations)
        energy = {**_spread("client_joules", self._joules)} if self._clock.devices.has_energy else {}
        return {
            "simulated_seconds": self.setup_seconds + math.fsum(self._durations) + left * mean,
            "estimated": self.estimated,
            **_spread("client_seconds", self._seconds),
            **energy,
        }

    def _add(self, down: int, up: int, answered: Ints, gone: Ints, drawn: Ints) -> None:
        """Add an exchange; answered, gone: each client's counts of answers and of missing answers; drawn: its
        count of exchanges whose seconds are included already."""
        everyone, clock = np.arange(len(self._sizes)), self._clock
        self._seconds += (answered - drawn) * clock.mean_seconds_of(everyone, self._sizes, down, up)
        self._seconds += gone * clock.download_of(everyone, down)
        self._joules += answered * clock.joules_of(everyone, self._sizes, down, up)
        self._joules += gone * clock.joules_of(everyone, np.zeros_like(self._sizes), down, 0)

    def _duration(
        self,
        round: int,
        exchange: int,
        asked: Ints,
        answered: npt.NDArray[np.bool_],
        folded: Ints,
        down: int,
        up: int,
    ) -> float:
        took, there = np.zeros(len(asked)), asked[answered]
        took[answered] = self._clock.seconds_of(round, there, self._sizes[there], down, up, exchange)
        if self._draws:
            self._seconds[there] += took[answered]
        sent = np.full(len(asked), down), answered * up
        if self._clock.deadline < math.inf:
            folded = folded[np.isin(folded, asked[answered & (took <= self._clock.deadline)])]
        hops = self._hops(round, exchange, asked, folded) if self._hops else None
        return self._clock.duration(asked, (took, answered), sent, hops)


def _spread(name: str, values: Floats) -> dict[str, Any]:
    """The smallest, largest and mean of clients, and the sum."""
    spread = {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean())}
    return {name: spread, f"{name}_total": math.fsum(values.tolist())}


def sentence(devices: Mapping[str, Any]) -> str:
    """Describe the plan's seconds and energy."""
    prefix = "about " if devices["estimated"] else ""
    text = f"virtual clock: {prefix}{devices['simulated_seconds']:,.1f} s; a client is busy for "
    text += _range(devices["client_seconds"], "s", devices["client_seconds_total"])
    if "client_joules" in devices:
        text += "; it spends " + _range(devices["client_joules"], "J", devices["client_joules_total"])
    return text


def _range(spread: Mapping[str, float], unit: str, total: float) -> str:
    return (
        f"{spread['min']:,.4g} to {spread['max']:,.4g} {unit}, {spread['mean']:,.4g} on average, "
        f"{total:,.4g} {unit} in all"
    )
