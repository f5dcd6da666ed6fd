"""Which broadcast an upload answers, what it weighs, and whether it counts: one object of a run decides.

    RoundPolicy         every upload answers this round's broadcast, weighs 1 and counts
    Asynchrony          uploads answer earlier rounds' broadcasts and have weights      (--async)
    OwnReferences       every client has a broadcast of its own                         (+own)
    EventTriggered      uploads may be substituted, and broadcasts may be earlier ones  (+event, +quiet)

Coordinator and workers ask the object, and none of them asks whether a feature is on. fedsim.feature_pairs
says which features cannot be combined, so one object is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fedsim.algorithm import Algorithm, Context, Task
    from fedsim.asynchrony import AsyncSchedule
    from fedsim.wire.header import Header


class RoundPolicy:
    """The policy of a synchronous run in which every participant gets the broadcast and its upload counts."""

    schedule: AsyncSchedule | None = None
    """The server steps of an asynchronous run, else None."""
    sizes_are_fixed: ClassVar[bool] = True
    """True if it is known before the run which messages are sent."""

    # ---- the broadcast that an upload answers

    def references(self, server: Any, new: Context, participants: Collection[int]) -> Mapping[int, Any]:
        """Return, by client, the earlier broadcast to which a client's own broadcast refers (+own).

        It is empty if all clients get the same broadcast. new: the context of round 0.
        """
        return {}

    def has_own_broadcast(self) -> bool:
        """Return whether every client's broadcast is encoded for this client alone (+own)."""
        return False

    def reference(self, got: Any, new: Context) -> Any:
        """Return the reference of a client's own broadcast. got: the client's last one; None for none."""
        return got

    def older(self, server: Any, down: Any, clients: Collection[int]) -> Mapping[int, Any]:
        """Return, by client, the decoded broadcast that a client keeps instead of `down` (+quiet)."""
        return {}

    def keeps_older(self, task: Header) -> bool:
        """Return whether a task's header says that the client computes from its last broadcast (+quiet)."""
        return False

    def answered(self, round: int, client: int) -> int:
        """Return the round in which the broadcast was made that a client's task of this round answers.

        Under +quiet a client may have an older one of its own (`older`)."""
        return round

    def in_use(self, round: int) -> frozenset[int]:
        """Return the earlier rounds whose broadcasts later uploads may answer."""
        return frozenset()

    def origins(self, round: int) -> tuple[int, ...]:
        """Return the rounds, ascending, after which the server sent a broadcast that is still in use.

        The previous round is left out. Round 0 is the start. The result is empty in a synchronous run."""
        return ()

    # ---- the weight of an upload

    def weight(self, round: int, client: int) -> float:
        """Return the weight of a client's upload in this round."""
        return 1.0

    def staleness(self, round: int) -> tuple[int, ...]:
        """Return the staleness of every participant of a round; empty if the round is synchronous."""
        return ()

    # ---- whether an upload counts

    def decide(
        self,
        algorithm: Algorithm[Any, Any, Any, Any],
        draft: Any,
        down: Any,
        up: Any,
        task: Task,
        *,
        size: int,
        fresh: bool,
    ) -> tuple[Any, bool]:
        """Return the client's next state, made from its draft, and whether `up` is sent.

        down, up: decoded messages. size: bytes of the encoded upload. fresh: True for this round's broadcast.
        """
        return algorithm.client_commit(draft, down, up, task), True

    def withheld(self, upload: Header) -> bool:
        """Return whether an upload has no fields because the client's rule withheld them (+event)."""
        return False

    def check_edges(self, sizes: tuple[int, ...], merges: bool) -> None:
        """Check that edge servers can be used. sizes: N_k. merges: True if they send sums instead of uploads.

        Raises:
            UsageError: If they cannot; the message says why.
        """
