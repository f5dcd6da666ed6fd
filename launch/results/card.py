"""fedsim card: facts that a paper must state about a run's communication and how to repeat the run.

Several runs that differ only in their seed make one card. Its statements are names with values, by section;
Markdown, the HTML page and the last section of fedsim report show the same rows. The checklist says which
claims the runs support, and what is missing for the others. (Source: docs/what-a-number-is-worth.md.)
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedsim import plugins
from fedsim.errors import UsageError
from fedsim.experiment import dotted
from fedsim.printable import markdown
from launch.configuration import names
from launch.numbers import NONE, extent, optional
from launch.results.columns import column
from launch.results.groups import Member, RunGroup, gather
from launch.results.html import Page, Part, Text
from launch.results.significance import LEAST, half_width
from launch.runs.folder import RunFolder
from launch.runs.source_commit import ROOT
from launch.table import Table
from launch.terminal import write_text

SCORES = (
    *("test_accuracy", "test_nll", "test_ece", "test_brier", "client_accuracy_worst"),
    *("ensemble_accuracy", "ensemble_nll", "ensemble_ece"),
)
DIGESTS = ("experiment_sha256", "model_sha256", "clients_sha256", "ledger.csv")
SIDES = ("down", "up")
Rows = Mapping[str, object]
"""Values by name. A row without a value (EMPTY) is left out."""
EMPTY: tuple[object, ...] = ("", NONE, None, [])


@dataclass(frozen=True)
class Card:
    """The card of the runs of one configuration. sections: rows by title. checks: each claim that the runs
    support with True, or what is missing for a claim with False."""

    title: str
    sections: Mapping[str, Mapping[str, str]]
    checks: tuple[tuple[bool, str], ...]

    def markdown(self) -> str:
        """Return the card as Markdown."""
        text = [f"# {markdown(self.title)}\n"]
        for title, rows in self.sections.items():
            text.append(f"## {title}\n\n{Table.pairs(rows).markdown()}")
        checks = "".join(f"- [{'x' if good else ' '}] {markdown(said)}\n" for good, said in self.checks)
        return "\n".join([*text, f"## Checklist\n\n{checks}"])

    def parts(self) -> Iterator[Part]:
        """Yield the card as parts of a page: the checklist, then the sections."""
        yield Table(("", ""), [("✓" if good else "✗", said) for good, said in self.checks], 2)
        for title, rows in self.sections.items():
            yield Text(title, "heading")
            yield Table.pairs(rows)


def write(paths: Sequence[Path], out: Path | None) -> list[Path]:
    """Write the card of runs that differ only in their seed; return the files.

    out: the file, .md or .html; by default card.md and card.html in the folder of the first run of each
    configuration.
    """
    groups = gather(paths)
    if len(groups) > 1 and out:
        several = ", ".join(g.label for g in groups[:4])
        raise UsageError(
            f"--out {out}: a card is of one configuration, with any number of seeds; these runs have "
            f"{len(groups)}: {several}. Without --out each has a card in the folder of its first run"
        )
    written = []
    for group in groups:
        created, folder = card(group), group.members[0].path
        for path in [out] if out else [folder / "card.md", folder / "card.html"]:
            if path.suffix not in (".md", ".html"):
                raise UsageError(f"--out {path}: a card is a .md or a .html file")
            page = Page.of(created.title, created.parts())
            write_text(path, page.html() if path.suffix == ".html" else created.markdown())
            written.append(path)
    return written


def title_of(run: RunFolder) -> str:
    """Return the algorithm with its codecs, and the data set, without the folders of files."""
    codecs = (run.experiment.get("codecs") or {}).items()
    coded = ", ".join(f"{field} {plugins.short(str(codec))}" for field, codec in codecs)
    algo, dataset = (plugins.short(str(run.experiment[key])) for key in ("algo", "dataset"))
    return f"{algo}{f' ({coded})' if coded else ''} on {dataset}"


def card(group: RunGroup) -> Card:
    """Return the card of the runs of one configuration."""
    runs = group.members
    sections = {
        "Settings": _settings(group),
        "Schedule": _schedule(runs),
        "Communication": _traffic(group),
        "Scores": dict(_score(group, metric) for metric in SCORES),
        "To repeat it": _provenance(runs),
    }
    filled = {
        title: {k: str(v) for k, v in rows.items() if v not in EMPTY} for title, rows in sections.items()
    }
    title = f"{title_of(runs[0])}, {len(runs)} seed{'s' * (len(runs) > 1)}"
    return Card(title, {title: rows for title, rows in filled.items() if rows}, tuple(_checks(group)))


# ---- sections


def _settings(group: RunGroup) -> Rows:
    """Return the algorithm's source, and all settings by their names in the manifest."""
    rows: dict[str, object] = {}
    if known := names.names("algorithms").get(str(group.settings["algo"])):
        source = " ".join(filter(None, (known.cells[-1], known.url)))
        rows = {"source": source, "differs from it": known.differs or "nothing"}
    return rows | dict(group.settings)


def _schedule(runs: Sequence[Member]) -> Rows:
    """Return who took part and how long it took: the least and the most of all runs and clients."""
    summaries = [run.summary for run in runs]
    devices = [summary["devices"] for summary in summaries if summary.get("devices")]
    sizes = [int(n) for n in runs[0].experiment.get("client_sizes") or ()]
    took, folded = ([n for s in summaries for n in s.get(key) or ()] for key in ("took_part", "folded"))
    rounds = [int(s.get("rounds") or 0) for s in summaries]
    chances = sum(rounds) * int(runs[0].experiment["clients"])
    silent = [sum(len(line.get("unchanged") or ()) for line in run.evaluated) for run in runs]
    seconds = [d["simulated_seconds"] for d in devices]
    joules = [d["client_joules_total"] for d in devices if "client_joules_total" in d]
    computing = [s["seconds_clients"] for s in summaries if s.get("seconds_clients")]
    return {
        "training rows of a client, first seed": extent(sizes),
        "the median of these rows": f"{median(sizes):,.0f}" if sizes else "",
        "completed rounds": extent(rounds),
        "broadcasts to a client": extent(took),
        "uploads of a client that were folded": extent(folded),
        "share of clients in a round": f"{sum(took) / chances:.3f}" if chances else "",
        "uploads without fields, in evaluated rounds": extent(silent) if any(silent) else "",
        "simulated seconds": extent(seconds, ".1f"),
        "joules of all clients, modelled": extent(joules, ".4g"),
        "seconds of computing here, all clients": extent(computing, ".1f"),
    }


def _traffic(group: RunGroup) -> Rows:
    """Return bytes as means over the seeds, what the kernel counted, and the limits of coded fields."""
    members, summaries = group.members, [m.summary for m in group.members]
    fields = {name for m in members for side in SIDES for name in m.traffic[side]}
    means = {name: [fmean(m.traffic[side][name] for m in members) for side in SIDES] for name in fields}
    down, up = (sum(by[n] for by in means.values()) for n in (0, 1))
    rows: dict[str, object] = {"bytes": f"{down:,.0f} down, {up:,.0f} up"}
    for name, by in sorted(means.items(), key=lambda item: (-sum(item[1]), item[0])):
        share = sum(by) / (down + up or 1)
        rows[f"bytes of {name}"] = f"{by[0]:,.0f} down, {by[1]:,.0f} up, {100 * share:.1f} %"
    for once, what in ((False, "per client and round"), (True, "once per client")):
        units = (f"{fmean(m.units(side, once) for m in members):.3f} {side}" for side in SIDES)
        rows[f"{what}, in units of P"] = ", ".join(units)
    counters = {"ledger minus kernel": "kernel_residual", "sent again by TCP": "kernel_retransmitted"}
    for name, key in counters.items():
        counts = [summary.get(key) for summary in summaries]
        rows[name] = "not measured" if None in counts else "; ".join(map(str, counts))
    limits = summaries[0].get("limits") or {}
    if kl := limits.get("kl"):
        rows["KL of an upload from its broadcast, first seed"] = f"{kl:.4g} bits a parameter"
    for side in SIDES:
        for name, measured in (limits.get(side) or {}).items():
            cells = (f"{key} {x:.4g}" for key, x in measured.items() if x is not None)
            rows[f"{side}.{name}, first seed, last evaluated round"] = ", ".join(cells)
    return rows


def _score(group: RunGroup, metric: str) -> tuple[str, str]:
    """Return a score's name, and its mean with Student's 95 % interval, n, and the value of every seed."""
    score = column(f"{metric}@end")
    form, name = f".{score.fine_digits}f", score.heading.removesuffix("@end") + " %" * score.percent
    values = [score.scale * v for v in group.known(score.text)]
    if not values:
        return name, ""
    half = half_width(values)
    interval = "" if math.isnan(half) else f" ± {half:{form}}"
    each = ", ".join(optional(v, form, "diverged") for v in values)
    mean = optional(fmean(values), form)
    return name, f"{mean}{interval}, n = {len(values)} (seeds {', '.join(map(str, group.seeds))}: {each})"


def _provenance(runs: Sequence[RunFolder]) -> Rows:
    """Return what was executed where, and the digests of what came out, by their names in the run's files."""
    facts = [{**run.manifest, **run.summary, "data": run.experiment.get("data")} for run in runs]
    for of in facts:
        of["ledger.csv"] = (of.get("files") or {}).get("ledger.csv", {}).get("sha256")
    command = [str(word) for word in runs[0].manifest.get("command") or ()]
    rows: dict[str, object] = {"command, first seed": shlex.join(["fedsim", *command[1:]]) if command else ""}
    for key in ("commit", "versions", "platform"):
        rows[key] = "; ".join(dict.fromkeys(_text(of.get(key)) for of in facts))
    for key in ("run", "started", "data", *DIGESTS):
        rows[f"{key}, by seed"] = "; ".join(
            f"{run.experiment['seed']}: {_text(of.get(key))}" for run, of in zip(runs, facts, strict=True)
        )
    return rows


# ---- the checklist


def _checks(group: RunGroup) -> Iterator[tuple[bool, str]]:
    """Yield True with every claim that the runs support, and False with what is missing for the others."""

    def check(good: str, lack: str) -> tuple[bool, str]:
        return not lack, lack or good

    runs, e, n = group.members, group.settings, len(group.members)
    unfinished = [f"seed {m.seed} is {m.status}" for m in runs if not m.done]
    unfinished += [f"left out: another run of seed {m.seed}, {m.status}" for m in group.aside]
    yield check("every run is finished", "; ".join(unfinished))
    target = ", ".join(str(m.seed) for m in group.members if m.stopped)
    early = f"seed {target} ended at its target accuracy: its scores are of another round" if target else ""
    yield check("every run has all of its rounds", early)
    few = "one seed: no comparison" if n == 1 else f"n = {n}: no ranking"
    yield check(f"n = {n}: a comparison is possible", f"{few}; {LEAST} seeds allow one" if n < LEAST else "")
    yield False, "one configuration: a claim that it is better takes fedsim compare with another one"
    bad = ", ".join(str(m.seed) for m in group.members if _diverged(m))
    unknown = "" if group.has("test_nll") else "no NLL, which would show a run that diverged"
    yield check("no run diverged: the NLL fell", f"diverged: seed {bad}" if bad else unknown)
    rows = str(e.get("evaluate_on") or "test")
    yield check("scores are those of the test rows", "" if rows == "test" else f"scores are of {rows}")
    yield check("calibration is measured", "" if group.has("test_ece") else "no calibration")
    kernel = [run.summary.get("kernel_residual") for run in runs]
    unequal = f"the ledger differs from the kernel: {kernel}" if any(map(_residual, kernel)) else ""
    alone = "the ledger was not compared with the kernel: --transport tcp --verify-bytes"
    yield check("the ledger equals the kernel's counters", alone if None in kernel else unequal)
    timed = e.get("link") or e.get("compute")
    yield check("time is simulated", "" if timed else "no claim about time: --link and --compute model it")
    lossy = (
        "codecs may lose precision: fedsim codecs RUN says how much"
        if runs[0].experiment.get("codecs")
        else ""
    )
    yield check("messages are sent without loss", lossy)
    commits = {str(run.manifest.get("commit") or "unknown") for run in runs}
    dirty = ", ".join(sorted(c for c in commits if c == "unknown" or c.endswith("+")))
    files = {str(path) for run in runs for path in run.experiment.get("sources") or () if ".py" in path}
    outside = ", ".join(sorted(Path(f).name for f in files if not Path(f).is_relative_to(ROOT)))
    lacks = (("uncommitted changes", dirty), ("not in the commit", outside))
    lack = "; ".join(f"{what}: {where}" for what, where in lacks if where)
    yield check("the source is a commit without changes", lack)
    drift = "; ".join(text for run in runs for text in run.drift)
    makes = {(_text(run.manifest.get("versions")), _processor(run)) for run in runs}
    several = "several commits, versions or processors" if len(makes) > 1 or len(commits) > 1 else ""
    yield check("one commit, one set of versions, one processor", drift or several)
    here = "the bits repeat on processors of this kind; --numerics portable for all x86-64"
    yield check("the bits repeat on any x86-64 processor", "" if e.get("numerics") == "portable" else here)


def _residual(by_side: Any) -> bool:
    return any(by_side.values()) if isinstance(by_side, Mapping) else bool(by_side)


def _processor(run: RunFolder) -> str:
    return str((run.manifest.get("platform") or {}).get("processor_name") or "")


def _diverged(run: RunFolder) -> bool:
    """Return whether the last NLL is NaN, or above the NLL of the initial model."""
    curve = run.curve
    if len(curve) < 2 or "test_nll" not in curve or not curve["test_nll"].notna().any():
        return False
    first, last = curve["test_nll"].iloc[0], curve["test_nll"].iloc[-1]
    return bool(math.isnan(last) or last > first)


def _text(value: Any) -> str:
    """Return a value of a run's files as text, or a table without its empty values."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {v}" for key, v in dotted(value) if v not in EMPTY)
    return str(value or NONE)
