"""Record the events of a run in its folder, on the terminal, and in counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fedsim.errors import FedsimError, Interrupted
from fedsim.printable import one_line
from fedsim.problem import Problem
from fedsim.round_events import Commit
from fedsim.wire.ledger import Ledger
from fedsim.wire.ledger_rows import Entry
from launch.configuration.target_accuracy import TargetAccuracy
from launch.processes.supervisor import Supervisor
from launch.runs import manifest
from launch.runs.client_costs import ClientCosts, sent_once
from launch.runs.device_costs import device_costs
from launch.runs.documents import Manifest
from launch.runs.folder import document, document_or_empty
from launch.runs.summary import Start, summarise
from launch.runs.writer import RunDir
from launch.session.display import Display
from launch.tracking import Tracking
from workers.coordinator.loop import Outcome
from workers.coordinator.task_timeline import Span
from workers.numerics import DRIFT, Facts
from workers.place import Place
from workers.storage.client_states import ClientStates
from workers.storage.growing_file import FileDigest
from workers.storage.journal import Journal
from workers.storage.recovery import Recovery
from workers.transport.handshake import Hello


class NotCompared(FedsimError):
    """The run is done, but its ledger cannot be compared, because the kernel's counts are missing."""


@dataclass
class Recorder:
    """The callbacks of a coordinator: every event goes to the run folder and to the display.

    `remote` is True if workers are on other machines. For each client, `took_part` counts the rounds in which
    it took part, and `folded` those in which its upload was aggregated. `costs` covers the committed rounds,
    and `target` has the best results of the evaluated rounds.
    """

    problem: Problem
    rundir: RunDir
    display: Display
    supervisor: Supervisor
    remote: bool
    ledger: Ledger = field(init=False)
    last_round: int = 0
    last_metrics: Mapping[str, Any] | None = None
    took_part: Counter[int] = field(default_factory=Counter)
    folded: Counter[int] = field(default_factory=Counter)
    costs: ClientCosts = field(default_factory=ClientCosts)
    target: TargetAccuracy = field(init=False)
    tracking: Tracking | None = None
    """The trackers of --track, which read the files that the recorder writes."""
    experiment_sha256: str = ""
    """The digest of the manifest's experiment."""
    journal: FileDigest | None = None
    """The journal's size and digest when it was closed."""
    _facts: Facts | None = None
    """The facts about the workers in the manifest."""
    _bytes_of_rounds: dict[int, int] = field(default_factory=dict)
    """The algorithm's bytes up to each committed round that is not evaluated yet."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(centralised=self.problem.algorithm.centralised)
        self.costs.optional = sent_once(self.problem.algorithm)
        self.target = TargetAccuracy(self.problem.experiment.until)

    def restore(self, recovery: Recovery) -> None:
        """Restore the records of earlier starts of the run."""
        self.rundir.cut(recovery)
        self.ledger.restore(self._recorded_rows())
        for record in recovery.commits.values():
            commit = record["about"]
            self._count(commit["number"], commit["participants"], commit["folded"])
        lines = self.rundir.metrics()
        self.target, self.last_metrics = self.target.after(lines), lines[-1] if lines else None

    def _recorded_rows(self) -> Iterator[Entry]:
        """Yield the ledger's rows, and add their bytes to the totals of the rounds."""
        last = 0
        for entry in self.costs.counted(self.rundir.ledger_rows()):
            last = max(last, entry.round)
            self._bytes_of_rounds[last] = self.costs.total
            yield entry

    def close_ledger(self, whole: bool = True) -> None:
        """Write the remaining rows, such as those for the end of the connections, which belong to no round.

        `whole` is False if the run ended early. The rows of an unfinished round are then dropped, because a
        resumed run writes them again.
        """
        if not whole:
            self.ledger.forget(self.last_round)
        self.rundir.append_ledger(self.ledger.close(self.problem.experiment.rounds))

    def close_journal(self, journal: Journal) -> None:
        """Close the journal, and remember its size and digest."""
        self.journal = journal.digest
        journal.close()

    def spans(self, spans: list[Span]) -> None:
        self.rundir.append_timeline(spans)

    def joined(self, worker: int, hello: Hello) -> None:
        if self.remote:
            self._show([f"worker {worker} comes from {hello.host}, process {hello.pid}"])
            self.supervisor.note_remote(worker, hello.pid, hello.host)

    def admitted(self, worker: int, facts: Facts, drift: str, place: Place) -> None:
        """Record a worker's place, new facts about the workers, and a warning if results may differ.

        `facts` are the known properties of the workers on which the run's results depend. `drift` tells why
        this worker's results may differ; '' if they do not.
        """
        self.supervisor.note_place(worker, place)
        if facts == self._facts and not drift:
            return  # the manifest has the facts of the previous worker
        self._facts = facts
        path = self.rundir.path / manifest.MANIFEST
        before = document(path, Manifest)
        after = manifest.with_workers(before, facts, [f"worker {worker}: {drift}"] if drift else [])
        if after != before:
            self.rundir.write_json(manifest.MANIFEST, after)
        if drift:
            self._show([f"worker {worker} may compute other bits ({drift}): {DRIFT}"])

    def left(self, worker: int, why: str) -> None:
        self._show([f"worker {worker} is gone: {why}"])
        self.supervisor.note_left(worker)

    def waits(self, why: str) -> None:
        """Show the reason why a run has not begun yet."""
        self._show([why])

    def committed(self, commit: Commit, entries: list[Entry]) -> tuple[FileDigest, ...]:
        """Record a committed round; return the digests of the run's files after it."""
        self.rundir.append_ledger(list(self.costs.counted(entries)))
        self._count(commit.round, commit.participants, commit.folded)
        self._bytes_of_rounds[commit.round] = self.costs.total
        self.display.committed(commit.round)
        return self.rundir.digests

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        # null replaces NaN, which JSON lacks (a diverged model)
        self.last_metrics = {k: None if v != v else v for k, v in metrics.items()}
        self.rundir.append_metrics(self.last_metrics)
        self.target = self.target.after([self.last_metrics])
        self.display.evaluated(metrics, self._bytes_until(metrics["round"]))
        self._show(self.tracking.notes() if self.tracking else ())

    def finish_tracking(self) -> None:
        """Wait until the trackers have read all rounds, and report trackers that have failed.
        A signal now ends only this wait, and the trackers continue by themselves."""
        if self.tracking is not None:
            self.display.status("waiting for the trackers")
            with suppress(Interrupted, KeyboardInterrupt):
                self._show(self.tracking.finish())
            self.display.status("")

    def _show(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.display.note(one_line(note))

    def _bytes_until(self, round: int) -> int:
        """Return the algorithm's bytes up to the round that has just been evaluated."""
        so_far = self._bytes_of_rounds.get(round, self.costs.total if round else 0)
        self._bytes_of_rounds = {r: n for r, n in self._bytes_of_rounds.items() if r > round}
        return so_far

    def verify_bytes(self, outcome: Outcome) -> None:
        """Compare the kernel's count of the streams with the ledger.

        Raises:
            FedsimError: If the counts differ.
            NotCompared: If there is no count, because a connection was lost.
        """
        residual = outcome.kernel_residual
        if residual is None:
            raise NotCompared(
                "--verify-bytes: the run is done, but its ledger is not compared: a connection was lost, "
                "and with it the kernel's count of its bytes"
            )
        if any(residual.values()):
            down, up = (f"{residual[side]:+,}" for side in ("down", "up"))
            raise FedsimError(
                f"--verify-bytes: kernel minus ledger is {down} bytes down and {up} up; "
                "some bytes are unexplained"
            )
        streams = {d: f"{self.ledger.booked(d):,}" for d in ("down", "up")}
        self.display.note(
            f"kernel and ledger agree: {streams['down']} bytes down and {streams['up']} up, residual 0"
        )

    def write_summary(
        self,
        status: str,
        start: Start,
        states: ClientStates | None = None,
        outcome: Outcome | None = None,
        error: str | None = None,
    ) -> dict[str, Any]:
        """Write summary.json, and return its content. `states` and `outcome` are None unless the run is
        done."""
        clients = range(len(self.problem.clients))
        summary = summarise(
            self.problem,
            self.ledger,
            status=status,
            error=error,
            rounds=self.last_round,
            metrics=self.last_metrics,
            target=self.target,
            bytes_to_until=self._bytes_to_until(),
            took_part=[self.took_part[k] for k in clients],
            folded=[self.folded[k] for k in clients],
            costs=self.costs,
            outcome=outcome,
            states=states,
            start=start,
        )
        digests = [*self.rundir.digests, *([self.journal] if self.journal else [])]
        summary |= {
            "files": {d.name: {"rows": d.rows, "bytes": d.bytes, "sha256": d.sha256} for d in digests},
            "experiment_sha256": self.experiment_sha256,
        }
        if self.problem.rounds.clock is not None:
            costs = device_costs(self.problem, self.rundir.ledger_rows(), self.last_round)
            summary["devices"] = costs
        if drift := document_or_empty(self.rundir.path / manifest.MANIFEST).get("drift"):
            summary["drift"] = drift
        self.rundir.write_json("summary.json", summary)
        return summary

    def _bytes_to_until(self) -> dict[str, int] | None:
        """Return the algorithm's bytes by direction until the target accuracy; None if it was not reached."""
        reached, sides = self.target.reached, ("down", "up")
        if reached is None:
            return None
        if reached == self.last_round:
            return {side: self.ledger.bytes_of("algorithm", side) for side in sides}
        sums = dict.fromkeys(sides, 0)  # the target was set after the run had passed it
        for row in self.rundir.ledger_rows():
            if row.kind == "algorithm" and row.round <= reached:
                sums[row.direction] += row.bytes
        return sums

    def _count(self, round: int, participants: Sequence[int], folded: Sequence[int]) -> None:
        self.last_round = round
        if round:
            self.took_part.update(participants)
            self.folded.update(folded)
