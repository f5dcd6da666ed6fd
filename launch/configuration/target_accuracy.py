"""The target accuracy of a run (--until): its syntax, and the round and the bytes that reached it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from fedsim.errors import UsageError
from fedsim.round_events import reaches
from launch.numbers import below_target, size, target

NONE = "none"


def parsed(text: str, option: str) -> float:
    """Parse an accuracy, such as 0.75 or 75%. The error names `option`."""
    try:
        number = Decimal(text.strip().removesuffix("%"))
        value = float(number / 100 if text.strip().endswith("%") else number)  # 76.4% is exactly 0.764
    except InvalidOperation:
        value = 0.0
    if not 0 < value <= 1:
        raise UsageError(f"{option} {text!r}: give an accuracy, such as 0.75 or 75%")
    return value


def parsed_until(text: str) -> float:
    """Parse --until: an accuracy, such as 0.78 or 78%, or none, which is 0."""
    return 0.0 if text == NONE else parsed(text, "--until")


@dataclass(frozen=True)
class TargetAccuracy:
    """The results of a run's evaluated rounds so far.

    Attributes:
        until: The accuracy at which the run ends; 0 for none.
        reached: The first evaluated round with at least this accuracy; None if there is none so far.
        best: The highest accuracy of a round; None if no round was evaluated.
        best_round: The first round with the highest accuracy.
    """

    until: float
    reached: int | None = None
    best: float | None = None
    best_round: int = 0

    def after(self, lines: Iterable[Mapping[str, Any]]) -> TargetAccuracy:
        """Return the results after these lines of metrics.jsonl."""
        result = self
        for line in lines:
            round, accuracy = line["round"], line.get("test_accuracy")
            if result.reached is None and reaches(round, accuracy, self.until):
                result = replace(result, reached=round)
            if round and accuracy is not None and (result.best is None or accuracy > result.best):
                result = replace(result, best=accuracy, best_round=round)
        return result

    def outcome(self, spent: int | None) -> str:
        """Return the last line of the output. `spent` is the algorithm's bytes up to the target."""
        if self.reached is not None and spent is not None:
            return f"reached {target(self.until)} after round {self.reached} with {size(spent)}"
        if self.best is None:
            return f"{target(self.until)} was not reached; no round was evaluated"
        return (
            f"{target(self.until)} was not reached; the best was {below_target(self.best)} "
            f"(round {self.best_round})"
        )
