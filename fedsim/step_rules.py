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
"""A damping or step size: a number or a rule. 1/K counts all clients, 1/|S| those that get the round's
broadcast, and N_k/N is the client's share of the examples; 20/K is 20 times 1/K. A:R:B is rule A in rounds 1
to R, and B after that: N_k/N:10:1/K is the schedule of Swaroop et al. 2025, App. E.6. Asynchronous rounds
refuse 1/|S|, because they have no set of clients that share a broadcast."""

OverK = (
    Annotated[float, Meta(gt=0)]
    | Annotated[str, Meta(pattern=rf"^{NUMBER}/K\Z", title="1/K, or a multiple such as 20/K")]
)
"""The same for values that are equal for all clients and rounds: a number, or A/K."""


@dataclass(frozen=True)
class At:
    """The place at which a formula is evaluated: client k of K in a round, on the client or on the server.

    sizes: N_k of all K clients; asked: |S|, the number of clients that get the round's broadcast, including
    those whose upload is lost later. Both sides know it before any upload. 0: all K, as in the set-up.
    weight: the weight of a dual step: in (0, 1] by the staleness of its upload; above 1 if the client sent
    nothing in rounds before (+event).
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
        """The value of a step, penalty or damping here."""
        return step_size(rule, self)


def step_size(rule: Step, at: At) -> float:
    """The value of a Step for one client in one round."""
    if not isinstance(rule, str):
        return float(rule)
    first, _, later = rule.partition(":")
    rounds, _, then = later.partition(":")
    now = then if then and at.round > int(rounds) else first
    if now == "N_k/N":
        return at.sizes[at.k] / sum(at.sizes)
    factor, _, count = now.partition("/")
    return float(factor) / (at.K if count == "K" else at.asked or at.K)
