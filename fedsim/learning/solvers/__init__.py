"""Local solvers (first-order, IVON, VON, sampling) and server optimisers, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from fedsim.learning.gaussian import Gaussian

Solution = TypeVar("Solution")
Carried = TypeVar("Carried")


@dataclass(frozen=True)
class LocalFit(Generic[Solution, Carried]):
    """The result of a client's local solver.

    solution: weights (P,), a Gaussian, or the type that the solver's docstring names. loss: the mean training
    loss in nats per example, without penalties. carried: the solver's state for the client's next task.
    info: further scalars by name.
    """

    solution: Solution
    loss: float
    carried: Carried | None = None
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self: LocalFit[Tensor, Carried]) -> Tensor:
        """The solution of a solver that returns weights (P,)."""
        return self.solution

    @property
    def q(self: LocalFit[Gaussian, Carried]) -> Gaussian:
        """The solution of a solver that returns the client's distribution."""
        return self.solution
