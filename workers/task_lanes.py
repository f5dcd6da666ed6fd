"""Envelopes answered one by one, or several tasks at once in lanes (fedsim.learning.lanes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from fedsim.wire.envelope import Envelope

if TYPE_CHECKING:
    from fedsim.learning.lanes import Lanes

T = TypeVar("T")


class TaskLanes(Generic[T]):
    """A worker's computations. With lanes, tasks start while others are computed, and end in any order.

    An evaluation that comes meanwhile waits until all tasks have ended, and what comes behind it, too.
    """

    def __init__(self, lanes: Lanes | None, answer: Callable[[Envelope], T]) -> None:
        """answer: computes what an envelope asks for; of a task, in a lane."""
        self._lanes, self._answer = lanes, answer
        self._later: Envelope | None = None

    @property
    def computing(self) -> bool:
        """Whether `advance` has something to do."""
        return self._lanes is not None and self._lanes.busy

    @property
    def takes(self) -> bool:
        """Whether an envelope can be taken."""
        return self._lanes is None or (self._lanes.free and self._later is None)

    def take(self, envelope: Envelope) -> list[T]:
        """Take an envelope; return what there is to answer at once.

        Raises:
            BaseException: What answering raises.
        """
        kind = envelope.header.kind
        if self._lanes is not None and kind == "task":
            self._lanes.start(lambda: self._answer(envelope))
        elif self.computing and kind == "evaluate":
            self._later = envelope
        else:
            return [self._answer(envelope)]
        return []

    def advance(self) -> list[T]:
        """Compute on for a little, if `computing`; return the answers that there are.

        Raises:
            BaseException: What answering raises.
        """
        answers: list[T] = self._lanes.advance() if self._lanes is not None else []
        if self._later is not None and not self.computing:
            envelope, self._later = self._later, None
            answers.append(self._answer(envelope))
        return answers

    def close(self) -> None:
        """Give up what is being computed."""
        if self._lanes is not None:
            self._lanes.close()
