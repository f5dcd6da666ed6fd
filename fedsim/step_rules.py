"""Step sizes, penalties and dampings that depend on client and round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

NUMBER = r"(?!0(\.0*)?/)[0-9]{1,9}(\.[0-9]{1,9})?"
RULE = rf"({NUMBER}/K|N_k/N|{NUMBER}/\|S\|)"
Step = (
    Annotated[float, Meta(gt=0)]
    | Annotated[
        str,
        Meta(
            pattern=rf"^{RULE}(:[1-9][0-9]*:{RULE})?\Z",
            title="1/K, N_k/N, 1/|S|, or a multiple such as 20/K, or RULE:ROUNDS:RULE such as N_k/N:10:1/K",
        ),
    ]
)
"""A damping or step size: a number or a rule. K is the number of all clients, |S| the number of clients that
get the round's broadcast, and N_k/N the client's share of the examples; 20/K is 20 times 1/K. A:R:B is rule A
in rounds 1 to R and rule B after them: N_k/N:10:1/K is the schedule of Swaroop et al. 2025, App. E.6.
In asynchronous runs, where no clients share a broadcast, |S| is K."""

OverK = (
    Annotated[float, Meta(gt=0)]
    | Annotated[str, Meta(pattern=rf"^{NUMBER}/K\Z", title="1/K, or a multiple such as 20/K")]
)
"""A damping or step size that is equal for all clients and rounds: a number, or A/K."""


@dataclass(frozen=True)
class At:
    """The values with which a rule is evaluated for client k in a round, on the client or on the server.

    sizes: N_k of all K clients. asked: |S|, the number of clients that get the round's broadcast, including
    those whose upload is lost later; 0 means all K, as in the set-up. Both sides know |S| before any upload.
    weight: the weight of a dual step. It is in (0, 1] for a stale upload (--async), and above 1 if the client
    sent nothing in the rounds before (+event).

    Examples:
        >>> import fedsim
        >>> at = fedsim.At(sizes=(10, 20, 30), k=2, round=1, asked=2)
        >>> at.K, at.value("1/|S|"), at.value("N_k/N")
        (3, 0.5, 0.5)
    """

    sizes: tuple[int, ...]
    k: int = 0
    round: int = 0
    asked: int = 0
    weight: float = 1.0

    @property
    def K(self) -> int:
        return len(self.sizes)

    def value(self, rule: Step) -> float:
        """Return the value of a step size, penalty or damping for this client and round."""
        return step_size(rule, self)


def step_size(rule: Step, at: At) -> float:
    """Return the value of a Step for one client in one round.

    Examples:
        >>> import fedsim
        >>> at = fedsim.At(sizes=(10, 30), round=11)
        >>> fedsim.step_size(0.1, at), fedsim.step_size("20/K", at), fedsim.step_size("N_k/N:10:1/K", at)
        (0.1, 10.0, 0.5)
    """
    if not isinstance(rule, str):
        return float(rule)
    first, _, later = rule.partition(":")
    rounds, _, then = later.partition(":")
    now = then if then and at.round > int(rounds) else first
    if now == "N_k/N":
        return at.sizes[at.k] / sum(at.sizes)
    factor, _, count = now.partition("/")
    return float(factor) / (at.K if count == "K" else at.asked or at.K)
