"""Execute the round machine's commands, in a run or a repetition of one round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedsim.learning.gaussian import Model
from fedsim.round_events import Close, Command, Commit, Drop, Finish, Give, Open, Release, ScoreChunk
from fedsim.virtual_clock import ExchangeCost
from workers.coordinator.aggregation import AggregationThread, Fold
from workers.coordinator.broadcasts import Dispatch
from workers.storage.upload_spool import Spool


class RoundRecords:
    """The interface for recording executed commands. This class records nothing.

    spent: the virtual clock's cost of the round's previous exchange (in `opened`) or last exchange (in
    `committed`); None without a clock.
    """

    def opened(self, command: Open, spent: ExchangeCost | None) -> None:
        """Record that an exchange is opened."""

    def dropped(self, round: int, client: int) -> None:
        """Record that an upload is not folded."""

    def committed(self, command: Commit, server: Any, spent: ExchangeCost | None) -> None:
        """Record that a round is folded, before the next round is opened."""

    def written(self, commit: Commit, server: Any, broadcast: tuple[Any, int]) -> None:
        """Write the round's files after the next round is opened. broadcast: see Dispatch.to_keep."""

    def model(self, round: int) -> Model | None:
        """Return the model to evaluate after a round."""
        return None


class CommandExecutor:
    """The executor of commands, which holds the server's state.

    server: the state after the last fold. finished: True after the machine's Finish command.
    """

    def __init__(
        self,
        server: Any,
        dispatch: Dispatch,
        spool: Spool,
        aggregation: AggregationThread,
        records: RoundRecords,
    ) -> None:
        self.server, self.finished = server, False
        self.dispatch, self.spool, self.aggregation, self.records = dispatch, spool, aggregation, records
        self._round = 0

    def carry_out(self, commands: Iterable[Command]) -> None:
        """Execute commands in order, but write a commit's files after all other commands.

        The tasks of the next round are thus sent before the coordinator waits for the disk.

        Raises:
            WireError: If the algorithm's broadcast has invalid values.
            DiskError: If the disk cannot be read or written.
        """
        committed: list[tuple[Commit, Any, tuple[Any, int]]] = []
        for command in commands:
            match command:
                case Open():
                    self._open(command)
                case Give():
                    self.dispatch.give(self.server, command)
                case ScoreChunk():
                    self.dispatch.give_score(command, self.records.model(command.chunk.round))
                case Release(client):
                    self.aggregation.release(client)
                case Drop(client):
                    self.records.dropped(self._round, client)
                    self.spool.discard(client)
                case Close():
                    self.aggregation.close()
                case Commit():
                    spent = self.dispatch.exchange_clock.close(command.round)
                    self.records.committed(command, self.server, spent)
                    committed.append((command, self.server, self.dispatch.to_keep))
                case Finish():
                    self.finished = True
        for commit, server, broadcast in committed:
            self.records.written(commit, server, broadcast)

    def take_fold(self) -> Fold:
        """Return the fold that has just ended, after storing its server state."""
        fold = self.aggregation.result()
        self.server = fold.server
        for edge, envelope in fold.edges:
            self.dispatch.book_hop(edge, envelope, "up")
        return fold

    def _open(self, command: Open) -> None:
        """Open an exchange. The fold uses the decoded broadcasts, as the clients do."""
        self._round = command.round
        spent = self.dispatch.exchange_clock.close(command.round) if command.exchange > 1 else None
        self.records.opened(command, spent)
        current = self.dispatch.encode_broadcast(self.server, command)
        if command.folds:
            broadcasts = self.dispatch.broadcasts
            answered = {k: broadcasts.answered(command.round, k).decoded for k in command.participants}
            self.aggregation.start(self.server, current, answered)
