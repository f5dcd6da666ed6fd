"""Asynchronous rounds, in which the virtual clock decides which uploads the server folds in which step.

    client:  computes from its last broadcast, uploads, and waits until the upload is folded
    server:  folds B uploads as soon as they have arrived, and sends a new broadcast to these B clients

A round is one step of the server. An upload that is folded in round r answers (was computed from) the
broadcast of a round a <= r. Its staleness is r - a, the number of server steps since then. Simultaneous
uploads are ordered by broadcast, then by id. With B = K and equal clients, the run is therefore synchronous.

The steps depend only on the configuration: links, computers, numbers of examples, and the message sizes that
`fedsim plan` reports. No measured time is used. Workers may therefore compute a task long after its virtual
time, and a run that is killed and resumed gives the same results bit for bit.

Source: FedBuff, Nguyen et al. 2022, Algorithm 1, https://arxiv.org/abs/2106.06639; for sites, asynchronous
PVI, Ashman et al. 2022, Sec. 3, https://arxiv.org/abs/2202.12275. Differs: a client waits while its upload
is in the buffer, so its state is at most one version ahead of the server. If the size of an encoded message
depends on the values, the clock uses the upper bound of the size.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fedsim.algorithm import Algorithm
from fedsim.errors import UsageError
from fedsim.round_policy import RoundPolicy
from fedsim.specs import Form, exponent, parse, split_modifiers, whole
from fedsim.virtual_clock import Clock, indices

FORM = Form("fedbuff", ("B",), help="the uploads of one step of the server, 1 to K, such as fedbuff:3")
DAMPING = 0.5
"""FedBuff's exponent: an upload of staleness s has the weight (1 + s)^-DAMPING."""


@dataclass(frozen=True)
class AsyncRule:
    """The rule fedbuff:B[+damp:P]. buffer: B. damping: P, or None for the algorithm's default."""

    buffer: int
    damping: float | None = None


def async_rule(text: str, clients: int) -> AsyncRule:
    """Parse the rule of --async."""
    head, modifiers = split_modifiers(text, "--async", ("damp",), exponent)
    _, arguments = parse(head, "rule of --async", {FORM.name: FORM})
    buffer = whole(arguments[0])
    if not 1 <= buffer <= clients:
        raise UsageError(f"--async {text}: a buffer of 1 to {clients} uploads, as many as there are clients")
    return AsyncRule(buffer, modifiers.get("damp"))


@dataclass(frozen=True)
class ServerStep:
    """One step of the server, which is one round.

    participants: the clients whose uploads are folded, ids ascending. answered: the round of the broadcast
    that each participant's upload answers. seconds: virtual time since the previous step. in_use: the rounds
    of all broadcasts from which any client computes when the step begins. waits: the seconds that each
    participant's upload waited in the buffer.
    """

    participants: tuple[int, ...]
    answered: tuple[int, ...]
    seconds: float
    in_use: frozenset[int]
    waits: tuple[float, ...]

    def broadcast(self, client: int) -> int:
        """Return the round of the broadcast that a participant's upload answers."""
        return self.answered[self.participants.index(client)]


_Arrival = tuple[float, int, int, float]
"""The arrival time of an upload, the round of its broadcast, the client, and seconds since the broadcast."""


class AsyncSchedule:
    """The server steps of a run: a pure function of the arguments, computed in order and once."""

    def __init__(
        self, rule: AsyncRule, clock: Clock, sizes: tuple[int, ...], bytes_down: int, bytes_up: int
    ) -> None:
        """Create the schedule. sizes: N_k of all clients. bytes_down, bytes_up: stream bytes of a message."""
        self.rule = rule
        self._clock, self._sizes, self._bytes = clock, indices(sizes), (bytes_down, bytes_up)
        self._steps: list[ServerStep] = []
        self._now = 0.0
        self._computing: list[_Arrival] = []
        """A heap, filled when the first step is computed."""
        self._users = {1: len(sizes)}
        """The number of clients that compute from each broadcast."""

    def step(self, round: int) -> ServerStep:
        """Return the step of a round, counted from 1."""
        while len(self._steps) < round:
            self._steps.append(self._next(len(self._steps) + 1))
        return self._steps[round - 1]

    def staleness(self, rounds: int) -> list[int]:
        """Count the uploads of staleness 0, 1, ... in the first `rounds` rounds, including lost ones."""
        counts = Counter(r - a for r in range(1, rounds + 1) for a in self.step(r).answered)
        return [counts[s] for s in range(max(counts, default=-1) + 1)]

    def seconds(self, rounds: int) -> float:
        """Return the duration of the first `rounds` rounds on the virtual clock, in seconds."""
        return sum(self.step(r).seconds for r in range(1, rounds + 1))

    def weight(self, staleness: int, default: float) -> float:
        """Return the weight of an upload, (1 + staleness)^-P. default: the P of a rule without +damp."""
        damping = default if self.rule.damping is None else self.rule.damping
        return float((1 + staleness) ** -damping)

    def seconds_of(self, round: int, clients: tuple[int, ...]) -> list[float]:
        """Return each participant's seconds from the broadcast to the arrival of its upload."""
        step, sizes = self.step(round), self._sizes
        answered = dict(zip(step.participants, step.answered, strict=True))
        return [self._clock.seconds(answered[k], k, int(sizes[k]), *self._bytes) for k in clients]

    def _start(self, round: int, clients: list[int]) -> list[_Arrival]:
        ids = indices(clients)
        seconds = self._clock.seconds_of(round, ids, self._sizes[ids], *self._bytes).tolist()
        return [(self._now + s, round, client, s) for client, s in zip(clients, seconds, strict=True)]

    def _next(self, round: int) -> ServerStep:
        if not self._computing:
            self._computing = self._start(1, list(range(len(self._sizes))))
            heapq.heapify(self._computing)
        in_use = frozenset(self._users)
        arrived = [heapq.heappop(self._computing) for _ in range(self.rule.buffer)]
        before, (self._now, *_, longest) = self._now, arrived[-1]
        fresh = all(answered == round for _, answered, _, _ in arrived)
        for _, answered, _, _ in arrived:
            self._users[answered] -= 1
            if not self._users[answered]:
                del self._users[answered]
        for started in self._start(round + 1, [client for _, _, client, _ in arrived]):
            heapq.heappush(self._computing, started)
        self._users[round + 1] = len(arrived)
        by_id = sorted((client, answered, self._now - instant) for instant, answered, client, _ in arrived)
        clients, rounds, waits = zip(*by_id, strict=True)
        # without stale uploads, the duration is bit for bit that of a synchronous round
        seconds = longest if fresh else self._now - before
        return ServerStep(clients, rounds, seconds, in_use, waits)


@dataclass(frozen=True)
class Asynchrony(RoundPolicy):
    """The broadcast that each upload answers, and the weight of each upload.

    schedule: the server steps. damping: the P of a rule without +damp. Round 0, the set-up, is synchronous.
    """

    schedule: AsyncSchedule
    damping: float = 0.0

    def answered(self, round: int, client: int) -> int:
        return self.schedule.step(round).broadcast(client) if round else round

    def staleness(self, round: int) -> tuple[int, ...]:
        return tuple(round - answered for answered in self.schedule.step(round).answered) if round else ()

    def weight(self, round: int, client: int) -> float:
        """Return the weight of a client's upload in this round, in (0, 1]; it depends on the staleness."""
        return self.schedule.weight(round - self.answered(round, client), self.damping)

    def in_use(self, round: int) -> frozenset[int]:
        return self.schedule.step(round).in_use if round else frozenset()

    def origins(self, round: int) -> tuple[int, ...]:
        return tuple(r - 1 for r in sorted(self.in_use(round)) if r < round)


def asynchrony(
    rule: str,
    algorithm: Algorithm[Any, Any, Any, Any],
    clock: Clock | None,
    sizes: tuple[int, ...],
    message_bytes: tuple[int, int],
) -> Asynchrony:
    """Make the schedule of --async. message_bytes: the stream bytes of a broadcast and of an upload."""
    parsed = async_rule(rule, len(sizes))
    if clock is None:
        raise UsageError(
            "--async needs the virtual clock, which says whose upload is first: --compute 1ms or --link"
        )
    if len(algorithm.exchanges) > 1:
        raise UsageError(f"--async: a round of {algorithm.name} has several exchanges; it needs one")
    algorithm.check_stale(damped=bool(parsed.damping))
    return Asynchrony(AsyncSchedule(parsed, clock, sizes, *message_bytes), algorithm.stale_damping)
