"""fedsim verify: compute tasks of a run again, and compare their digests with those of the run.

Each round starts from the checkpoint of the previous round, so a difference does not affect later rounds. The
run has checkpoints of its last rounds only, which limits the rounds to verify. The first round needs none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedsim import plugins
from fedsim.errors import DataError, DiskError, FedsimError, UsageError, WireError
from launch import terminal
from launch.runs.folder import RunFolder
from launch.runs.restored import RestoredRun
from launch.runs.summary import stored_model_digest
from launch.terminal import print_json
from workers.scratch import Scratch
from workers.storage.atomic_files import at_rest
from workers.storage.checkpoints import Checkpoint
from workers.storage.client_states import clients_digest
from workers.storage.growing_file import LEDGER
from workers.storage.recovery import checkpoint_path
from workers.verification.round_repeater import RoundRepeater
from workers.verification.task_verifier import Difference, Digests, TaskVerifier, digests

SHOWN = 5
"""The maximum number of differences of a round that are printed."""


@dataclass(frozen=True)
class Verdict:
    """The result of one round. faults: all other errors. server: the server's state was found identical."""

    round: int
    compared: int
    left_out: int
    differences: Sequence[Difference] = ()
    faults: Sequence[str] = ()
    server: bool = False


def verify(
    folder: Path,
    rounds: int | None,
    clients: str | None,
    *,
    twice: bool,
    data_dir: Path | None,
    as_json: bool = False,
) -> None:
    """Print the comparison; raise FedsimError with the first difference and its likely cause. rounds: the
    number of last rounds to compare, None for all. clients: ids, separated by commas."""
    run = RestoredRun.open(folder, data_dir)
    only = _ids(clients, len(run.problem.clients))
    console = terminal.console(quiet=as_json)
    with at_rest(folder):
        selected = computable(run)
        selected = selected[-rounds:] if rounds else selected
        recorded = digests([r for r in run.journal() if r.get("round") in selected])
        verdicts = []
        for number in selected:
            verdicts.append(_verified(run, number, recorded, only, twice))
            _print(console, verdicts[-1], len(str(run.round)))
        faults = [fault for v in verdicts for fault in v.faults]
        files = [*_files(run), *_growing_files(run)]
        computed = bool(faults)
        for output, fault in files:
            console.print(output, soft_wrap=True)
            faults += [fault] if fault else []
    different = [d for v in verdicts for d in v.differences]
    if different:
        first, compared = different[0], sum(v.compared for v in verdicts)
        many = f"{len(different)} of {compared} tasks of {folder} give something else when computed again"
        faults.insert(0, f"{many}. The first: {_named(first)}. {meaning(run, first.repeatable)}")
    if as_json:
        print_json(to_json(folder, verdicts, [output for output, _ in files], faults))
    if faults:  # a changed file has the exit code that it has everywhere
        raise (FedsimError if computed or different else DataError)("\n".join(faults))


def to_json(
    folder: Path, verdicts: Sequence[Verdict], files: Sequence[str], faults: Sequence[str]
) -> dict[str, Any]:
    """Return the comparison for --json; `faults` is empty if everything is identical."""
    rounds = [
        {
            "round": v.round,
            "compared": v.compared,
            "identical": v.compared - len(v.differences),
            "left_out": v.left_out,
            "server_identical": v.server,
            "differences": v.differences,
            "faults": v.faults,
        }
        for v in verdicts
    ]
    return {"run": folder, "identical": not faults, "rounds": rounds, "files": files, "faults": faults}


def computable(run: RestoredRun) -> list[int]:
    """Return the committed rounds that can be computed again: the first, and those with their checkpoints."""

    def there(round: int) -> bool:
        needed = (round - 1, *_origins(run, round))
        return all(checkpoint_path(run.folder, r).exists() for r in needed)

    rounds = range(run.first_round, run.round + 1)
    return [r for r in rounds if r == run.first_round or there(r)]


def _origins(run: RestoredRun, round: int) -> list[int]:
    """Return the rounds whose server states an asynchronous round needs, besides the newest state."""
    return [r for r in run.problem.rounds.policy.origins(round) if r >= run.first_round] if round else []


def meaning(run: RestoredRun, repeatable: bool) -> str:
    """Explain why a result may differ from the recorded one. repeatable: two results here are equal."""
    algo = plugins.short(run.problem.experiment.algo)
    if not repeatable:
        return (
            f"Computed twice here, it differs from itself: the client code of {algo} is not deterministic. "
            "It may read a clock, draw from something else than task.rng, change its arguments, or keep "
            "something from task to task"
        )
    drift = run.drift()
    if drift:
        return f"Here it is the same each time, but what computes has changed: {'; '.join(drift)}"
    return (
        f"Here it is the same each time, with the run's versions and kind of machine: the client code of "
        f"{algo} depends on the process that it is in (what it did before, its environment), or the run's "
        "files were changed"
    )


def _verified(
    run: RestoredRun, round: int, recorded: Digests, only: Collection[int] | None, twice: bool
) -> Verdict:
    try:
        before = run.committed(round - 1) if round > run.first_round else None
        origins = {r: run.committed(r) for r in _origins(run, round)}
        earlier = {r: checkpoint for r, checkpoint in origins.items() if checkpoint is not None}
    except DataError as e:
        return Verdict(round, 0, 0, faults=[str(e)])
    with Scratch("fedsim-verify-") as scratch:
        verifier = TaskVerifier(run.problem, run.folder, run.name, scratch, recorded, only, twice)
        after = RoundRepeater(run.problem, run.name, verifier, scratch).repeat(round, before, earlier)
    verdict = Verdict(round, verifier.compared, verifier.left_out, verifier.differences)
    if verdict.differences or verdict.left_out:
        return verdict
    return _with_server(run, verdict, after)


def _with_server(run: RestoredRun, verdict: Verdict, after: Checkpoint[Any]) -> Verdict:
    """Compare the server's state, which must be identical because all uploads are."""
    try:
        what = run.unlike(after)
    except DataError as e:
        return replace(verdict, faults=[str(e)])
    if not what:
        return replace(verdict, server=what == "")
    algo, why = plugins.short(run.problem.experiment.algo), "; ".join(run.drift())
    why = why or f"the server's code of {algo} is not deterministic"
    return replace(
        verdict, faults=[f"round {verdict.round}: {what}, although all uploads are the same: {why}"]
    )


def _files(run: RestoredRun) -> Iterator[tuple[str, str]]:
    """Compare model and client states with summary.json; yield a text and an error message or '' for each."""
    summary, layout = run.run.summary, run.problem.net.layout
    if not summary.get("model_sha256"):
        status = summary.get("status", "was killed")
        yield f"summary.json has no digests of model and clients: the run {status}", ""
        return

    def model() -> str:
        running = run.problem.net.running
        return stored_model_digest(run.folder / "model.safetensors", layout, running)

    def clients() -> str:
        if run.round != summary["rounds"]:
            raise DataError(f"the checkpoint of round {summary['rounds']} cannot be read")
        return clients_digest(run.problem, run.states(), tuple(run.checkpoint.versions.tolist()))

    for name, where, created in (
        ("model_sha256", "model.safetensors", model),
        ("clients_sha256", "state/", clients),
    ):
        try:
            result = created()
        except (DataError, DiskError, WireError) as e:
            yield f"{where}: {name} cannot be compared", str(e)
            continue
        if result == summary[name]:
            yield f"{where}: {name} is identical", ""
        else:
            fault = f"{run.folder / where}: {name} is {result}; summary.json says {summary[name]}"
            yield f"{where}: {name} differs", fault


def _growing_files(run: RestoredRun) -> Iterator[tuple[str, str]]:
    """Compare ledger, metrics, timeline and journal with their digests; yield pairs as `_files` does."""
    try:
        stored = RunFolder.open(run.folder)
        known = stored.known
    except DataError as e:
        yield "the run's other files cannot be compared", str(e)
        return
    if not known.files:
        yield "the run's other files cannot be compared", f"{known.source} has no digests of them"
    if known.ended:
        try:
            stored.check_numbers()
            yield "summary.json: its scores and bytes are those of the other files", ""
        except (DataError, UsageError) as e:
            yield "summary.json: differs", str(e)
    until = "" if known.ended else f" up to {known.source}"
    for name in known.files or (LEDGER,):
        try:
            stored.checked_bytes(name)
            sums = name == LEDGER and len(stored.ledger)  # this compares sums with the summary
        except (DataError, UsageError) as e:
            yield f"{name}: differs", str(e)
            continue
        if name in known.files:
            yield f"{name}: sha256 is identical{until}{', sums too' if sums and known.ended else ''}", ""


def _ids(text: str | None, clients: int) -> frozenset[int] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not name.isdecimal() or int(name) >= clients:
            raise UsageError(f"--clients {text}: {name!r} is no client; they are 0 to {clients - 1}")
    return frozenset(map(int, names))


def _named(d: Difference) -> str:
    return f"client {d.client}, round {d.round}, exchange {d.exchange}: {d.what}"


def _print(console: Console, v: Verdict, width: int) -> None:
    different = len(v.differences)
    output = f"round {v.round:>{width}}  {v.compared} tasks compared, {v.compared - different} identical"
    output += f", {different} different" if different else ""
    output += f", {v.left_out} left out" if v.left_out else ""
    output += "; the server's state is identical" if v.server else ""
    console.print(output, soft_wrap=True)
    for d in v.differences[:SHOWN]:
        console.print(f"    {_named(d)}", soft_wrap=True)
    if different > SHOWN:
        console.print(f"    ... and {different - SHOWN} more")
    for fault in v.faults:
        console.print(f"    {fault}", soft_wrap=True)
