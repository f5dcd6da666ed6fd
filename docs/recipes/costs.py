"""What every algorithm costs on the wire and reaches on the main job's data.

    python docs/recipes/costs.py      6 minutes; writes the tables of docs/communication.md and
                                      docs/algorithms.md, between their marker comments

Every row is one run with the algorithm's own defaults: digits, ten clients of the heterogeneous split, full
participation, seed 0. Bytes are measured (the ledger, kind algorithm), not computed; tests/docs/test_costs.py
computes them and compares. docs/algorithms.md has no two rows of one algorithm: Case.same_as.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import ROOT, circumstances, table

import fedsim
from fedsim.experiment import build_algorithm
from launch.results.describe import all_exchanges, cost_once
from launch.runs.client_costs import sent_once
from launch.runs.folder import RunFolder
from protocols import REGISTRY, AnyAlgorithm, find

CLIENTS = 10
ROUNDS = 20
SIDES = ("down", "up")


@dataclass(frozen=True)
class Case:
    """A row: an algorithm with options, which change its messages or its family."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    same_as: str = ""
    """The row whose results it has where all clients take part; its messages may be others."""

    @property
    def label(self) -> str:
        return self.name + "".join(f", {k}={str(v).lower()}" for k, v in self.settings.items())

    @property
    def algorithm(self) -> AnyAlgorithm:
        return build_algorithm(find(self.name), self.settings)

    def rounds(self, most: int) -> int:
        """One where the algorithm has one round by design."""
        return most if find(self.name).default_rounds > 1 else 1


CASES = (
    *(Case(kind.name) for kind in REGISTRY),
    Case("fedadmm", {"silent": "last"}, same_as="fedadmm"),
    Case("fedadmm", {"silent": "last", "balance": 5.0, "inexact": 0.01}),
    Case("precond_admm", {"preconditioner": 10.0}, same_as="fedadmm"),
    Case("bayes_admm", {"covariance": "diagonal"}),
    Case("pvi", {"covariance": "full"}),
    Case("ivon_admm", {"silent": "last"}, same_as="ivon_admm"),
    Case("fedlap_func", {"points_per_class": 2}),
    Case("fedlap_func", {"send_global_labels": True}, same_as="fedlap_func"),
)
QUICK = (Case("fedlap_cov"), Case("mime"), Case("precond_admm"), Case("fedlap_func"), Case("bcm"))


@dataclass(frozen=True)
class Cost:
    """Bytes of one client, by side. values: its fields in a round, all exchanges (values and indices);
    envelopes: the same with headers and framing; once: the set-up's envelopes, and what is sent only once."""

    values: Mapping[str, float]
    envelopes: Mapping[str, float]
    once: Mapping[str, float]


def measured(run: RunFolder, algorithm: AnyAlgorithm) -> Cost:
    """From the ledger."""
    rows = run.ledger[run.ledger.kind == "algorithm"]
    rounds = rows[rows["round"] > 0]
    participants = len(rounds[["round", "client"]].drop_duplicates()) or 1  # none if nothing counts
    clients = run.clients
    values, envelopes, once = {}, {}, {}
    for side in SIDES:
        mine, setup = rounds[rounds.direction == side], rows[(rows["round"] == 0) & (rows.direction == side)]
        optional = {
            (exchange, name) for exchange, direction, name in sent_once(algorithm) if direction == side
        }
        alone = mine.bytes[[key in optional for key in zip(mine.exchange, mine.field, strict=True)]].sum()
        fields = mine[mine.layer.isin(["values", "indices"])].bytes.sum() - alone
        values[side], envelopes[side] = fields / participants, (mine.bytes.sum() - alone) / participants
        once[side] = (setup.bytes.sum() + alone) / clients
    return Cost(values, envelopes, once)


COST_HEAD = (
    *("algorithm", "P", "down", "values", "envelopes", "up", "values", "envelopes"),
    *("exchanges", "once per client", "measured"),
)


def cost_row(case: Case, params: int, cost: Cost) -> list[str]:
    """One line of the table in communication.md; bytes in units of 4 P."""
    algorithm = case.algorithm
    line = [case.label, f"{params:,}"]
    for side in SIDES:
        line += [
            all_exchanges(algorithm, side),
            *(in_p(n[side], params) for n in (cost.values, cost.envelopes)),
        ]
    once, exchanges = cost_once(algorithm), str(len(algorithm.exchanges))
    measured = ", ".join(f"{in_p(cost.once[side], params)} {side}" for side in SIDES) if once else ""
    if algorithm.setup:
        exchanges += f", set-up {len(algorithm.setup)}"
    return [*line, exchanges, once, measured]


def in_p(nbytes: float, params: int) -> str:
    return f"{nbytes / (4 * params):.3f}"


RESULT_HEAD = (
    *("algorithm", "rounds", "bytes down", "bytes up", "accuracy / NLL"),
    *("averaged over samples", "s per round"),
)


def result_row(case: Case, summary: Mapping[str, Any]) -> list[str]:
    """One line of the table in algorithms.md."""
    s = summary
    sampled = f"{s['ensemble_accuracy']:.3f} / {s['ensemble_nll']:.2f}" if s.get("ensemble_nll") else ""
    reached = f"{s['test_accuracy']:.3f} / {s['test_nll']:.2f}"
    sent = (f"{s['bytes_down']:,}", f"{s['bytes_up']:,}")
    return [case.label, str(s["rounds"]), *sent, reached, sampled, f"{s['seconds_round_median']:.2f}"]


def play(case: Case, rounds: int, folder: Path) -> RunFolder:
    """A run of two workers; evaluated at its end."""
    return fedsim.run(
        quiet=True,
        algo=case.name,
        hyperparameters=case.settings,
        clients=CLIENTS,
        rounds=case.rounds(rounds),
        eval_every=case.rounds(rounds),
        workers=2,
        out=folder,
    )


PAGES = (("communication.md", "costs"), ("algorithms.md", "results"))


def stored(page: str, name: str) -> dict[str, list[str]]:
    """The rows that a page has now, by their first cell."""
    text = (ROOT / "docs" / page).read_text()
    section = text[text.index(f"<!-- {name}: written") : text.index(f"<!-- end of {name} -->")]
    lines = (line for line in section.splitlines() if "|" in line)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in rows}


def between(text: str, name: str, new: str) -> str:
    """The text with `new` between the two marker comments of this name. Errors: ValueError."""
    opening, closing = f"<!-- {name}: written by python docs/recipes/costs.py -->", f"<!-- end of {name} -->"
    replaced, times = re.subn(
        f"{re.escape(opening)}.*?{re.escape(closing)}",
        lambda _: f"{opening}\n\n{new}\n\n{closing}",
        text,
        flags=re.DOTALL,
    )
    if times != 1:
        raise ValueError(f"the markers of {name} stand {times} times in the page, not once")
    return replaced


def left(head: Sequence[str], rows: Iterable[Sequence[str]], texts: set[int]) -> str:
    """A table whose columns of texts stand to the left."""
    first, _, *rest = table(head, list(rows)).splitlines()
    rule = ("---" if n == 0 or n in texts else "---:" for n in range(len(head)))
    return "\n".join([first, "| " + " | ".join(rule) + " |", *rest])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the two pages")
    parser.add_argument("--quick", action="store_true", help="a few rows of two rounds; shows that it runs")
    parser.add_argument("--only", nargs="*", default=[], help="algorithms to run; other rows stay")
    selected, started = parser.parse_args(argv), time.perf_counter()
    cases, rounds = (QUICK, 2) if selected.quick else (CASES, ROUNDS)
    costs, results = [], []
    kept = [stored(page, name) for page, name in PAGES] if selected.only else []
    for case in cases:
        pages = [0] if case.same_as else [0, 1]
        if kept and case.name not in selected.only and all(case.label in kept[page] for page in pages):
            costs.append(kept[0][case.label])
            results += [kept[page][case.label] for page in pages[1:]]
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = play(case, rounds, Path(folder) / "run")
            costs.append(cost_row(case, run.params, measured(run, case.algorithm)))
            result = result_row(case, run.summary)
        if not case.same_as:
            results.append(result)
        print(" | ".join([*costs[-1], *result[1:]]), flush=True)
    seconds = time.perf_counter() - started
    selected.out.mkdir(parents=True, exist_ok=True)
    tables = (
        left(COST_HEAD, costs, {2, 5, 8, 9, 10}),
        "\n\n".join([left(RESULT_HEAD, results, set()), circumstances(seconds)]),
    )
    for (page, name), written in zip(PAGES, tables, strict=True):
        text = (ROOT / "docs" / page).read_text()
        (selected.out / page).write_text(between(text, name, written))


if __name__ == "__main__":
    main()
