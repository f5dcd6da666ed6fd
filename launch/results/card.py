"""fedsim card: facts that a paper must state about a run's communication and how to repeat the run.

Several runs that differ only in their seed make one card. The checklist states which claims the runs support,
and what is missing for the others. (Source: docs/card.md.)
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedsim.errors import UsageError
from fedsim.experiment import Experiment, dotted
from launch.configuration import names
from launch.results import html
from launch.results.groups import Group, gather
from launch.results.significance import LEAST, half_width
from launch.results.statistics import heading, percent, scale_of
from launch.results.tables import NONE, Grid, extent
from launch.runs.folder import RunFolder

SCORES = (
    *("test_accuracy", "test_nll", "test_ece", "test_brier", "client_accuracy_worst"),
    *("ensemble_accuracy", "ensemble_nll", "ensemble_ece", "personal_accuracy_mean"),
)
SIDES = ("down", "up")


@dataclass(frozen=True)
class Check:
    """One line of the checklist. ok: the runs support the claim. text: the claim, or what is missing."""

    ok: bool
    text: str


@dataclass(frozen=True)
class Part:
    """A section: names with values, then tables."""

    title: str
    rows: Mapping[str, str]
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True)
class Card:
    """The card of the runs of one configuration."""

    title: str
    parts: tuple[Part, ...]
    checks: tuple[Check, ...]

    def markdown(self) -> str:
        """Return the card as Markdown."""
        lines = [f"# {self.title}", ""]
        for part in self.parts:
            lines += [f"## {part.title}", ""]
            if part.rows:
                pairs = tuple((name, value) for name, value in part.rows.items())
                lines += [Grid("", ("", ""), pairs).markdown()]
            for grid in part.grids:
                lines += [grid.markdown()]
        lines += ["## Checklist", ""]
        lines += [f"- [{'x' if c.ok else ' '}] {c.text}" for c in self.checks]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Return the card as a separate HTML page."""
        return html.page(self.title, (f"<h1>{escape(self.title)}</h1>", *self.sections()))

    def sections(self) -> Iterator[str]:
        """Yield the sections of the page."""
        for part in self.parts:
            tables = (html.table(grid.header, grid.lines) for grid in part.grids)
            yield html.section(part.title, html.pairs(part.rows), *tables)
        yield html.section("Checklist", self.checklist())

    def checklist(self) -> str:
        """Return the checklist as HTML."""
        items = (f"<li>{'✓' if c.ok else '✗'} {escape(c.text)}</li>" for c in self.checks)
        return f'<ul class="checks">{"".join(items)}</ul>'


def write(paths: Sequence[Path], out: Path | None) -> list[Path]:
    """Write the card of runs that differ only in their seed; return the files.

    out: the file, .md or .html; by default card.md and card.html in the first run's folder.
    """
    group = only_group(paths)
    card = of(group)
    targets = [out] if out else [group.members[0].run.path / f"card.{suffix}" for suffix in ("md", "html")]
    for path in targets:
        if path.suffix not in (".md", ".html"):
            raise UsageError(f"--out {path}: a card is a .md or a .html file")
        html.save(path, card.markdown() if path.suffix == ".md" else card.html())
    return targets


def only_group(paths: Sequence[Path]) -> Group:
    """Read runs that differ only in their seed; raise UsageError if there are several configurations."""
    groups = gather(paths)
    if len(groups) > 1:
        several = ", ".join(g.label for g in groups[:4])
        raise UsageError(
            f"a card is of one configuration, with any number of seeds; these runs have {len(groups)}: "
            f"{several}. fedsim compare puts them side by side"
        )
    return groups[0]


def of(group: Group) -> Card:
    """Return the card of the runs of one configuration."""
    runs = [m.run for m in group.members]
    first = runs[0]
    experiment = _experiment(first)
    count = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
    parts = (
        _task(runs),
        _algorithm(experiment),
        _schedule(group),
        _traffic(group),
        _time(runs),
        Part("Scores", {}, (_scores(group),)),
        _repeat(runs),
    )
    title = f"{first.label} on {experiment['dataset']}, {count}"
    return Card(title, tuple(p for p in parts if p.rows or p.grids), tuple(_checks(group)))


def _experiment(run: RunFolder) -> dict[str, Any]:
    """Return the run's experiment, with defaults for keys that an older run does not have."""
    return {**vars(Experiment()), **run.experiment}


# ---- sections


def _task(runs: Sequence[RunFolder]) -> Part:
    e = _experiment(runs[0])
    sizes = [int(n) for n in e.get("client_sizes") or ()]
    spread = f"{min(sizes):,} to {max(sizes):,}, median {median(sizes):,.0f}" if sizes else NONE
    digests = [f"{run.experiment['seed']}: {run.experiment.get('data') or NONE}" for run in runs]
    rows = {
        "data set": f"{e['dataset']}, a share of {e.get('fraction', 1):g}",
        "inputs": str(e.get("inputs") or NONE),
        "split": str(e["partition"]),
        "clients": f"{int(e['clients']):,}",
        "training rows of a client, first seed": spread,
        "evaluated on": str(e.get("evaluate_on") or "test"),
        "digest of data and split, by seed": "; ".join(digests),
        "model": str(e.get("model") or NONE),
        "P": f"{runs[0].params:,}",
    }
    return Part("Task", rows)


def _algorithm(experiment: Mapping[str, Any]) -> Part:
    known = names.names("algorithms").get(str(experiment["algo"]))
    sources = experiment.get("sources") or {}
    rows = {"name": str(experiment["algo"])}
    if known:
        rows |= {"source": known.cells[-1], "link": known.url, "differs from it": known.differs or "nothing"}
    rows |= {f"digest of {name}": str(digest) for name, digest in sources.items()}
    rows |= {key: str(value) for key, value in dotted(experiment.get("hyperparameters") or {})}
    return Part("Algorithm", rows)


def _schedule(group: Group) -> Part:
    e, summaries = _experiment(group.members[0].run), [m.run.summary for m in group.members]
    took = [n for s in summaries for n in s.get("took_part") or ()]
    folded = [n for s in summaries for n in s.get("folded") or ()]
    rounds = [int(s.get("rounds") or 0) for s in summaries]
    silent = [sum(len(line.get("unchanged") or ()) for line in m.run.lines) for m in group.members]
    rows = {
        "participation, as asked for": str(e["participation"]),
        "rounds": extent(rounds) + f" of {e['rounds']}",
        "broadcasts to a client": extent(took),
        "uploads of a client that were folded": extent(folded),
        "share of clients in a round": _share(sum(took), sum(rounds) * int(e["clients"])),
    }
    if any(silent):
        rows["uploads without fields, in evaluated rounds"] = extent(silent)
    for key in ("asynchronous", "tree", "deadline", "until"):
        if e.get(key):
            rows[key] = str(e[key])
    return Part("Schedule", rows)


def _traffic(group: Group) -> Part:
    e = _experiment(group.members[0].run)
    fields = Grid(
        "Bytes by field, mean over the seeds",
        ("field", "down", "up", "share"),
        tuple(_fields(group)),
    )
    totals = {side: fmean(sum(m.traffic[side].values()) for m in group.members) for side in SIDES}
    residuals = [m.run.summary.get("kernel_residual") for m in group.members]
    rows = {
        "bytes down, up": ", ".join(f"{totals[side]:,.0f}" for side in SIDES),
        "per client and round, in units of P": ", ".join(_units(group, side, False) for side in SIDES),
        "once per client, in units of P": ", ".join(_units(group, side, True) for side in SIDES),
        "codecs": ", ".join(f"{k}={v}" for k, v in (e.get("codecs") or {}).items()) or "dense, no loss",
        "error feedback": "yes" if e.get("error_feedback") else "no",
        "ledger minus kernel": "not measured" if None in residuals else "; ".join(map(str, residuals)),
        "bytes that the coordinator's kernel sent again": _retransmitted(group),
    }
    limits = group.members[0].run.summary.get("limits") or {}
    if kl := limits.get("kl"):
        rows["KL of an upload from its broadcast, first seed, at the end"] = f"{kl:.4g} bits a parameter"
    grids = [fields]
    if coded := tuple(_coded(limits)):
        title = "Entropy-coded fields, first seed, one client's messages of the last evaluated round"
        heads = ("field", "bits a value", "entropy of its integers", "step / deviation", "rounding / change")
        grids.append(Grid(title, heads, coded))
    return Part("Communication", rows, tuple(grids))


def _coded(limits: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield cost and loss of every field with an entropy coder (fedsim.wire.limits)."""
    keys = {"bits": ".2f", "entropy": ".2f", "step": ".3g", "rounding": ".3f"}
    for side in SIDES:
        for name, measured in (limits.get(side) or {}).items():
            cells = [NONE if (x := measured.get(k)) is None else format(x, form) for k, form in keys.items()]
            yield f"{side}.{name}", *cells


def _retransmitted(group: Group) -> str:
    """Return TCP's retransmissions downwards by seed. A resumed run counts from its last start."""
    counts = [m.run.summary.get("kernel_retransmitted") for m in group.members]
    return "not measured" if None in counts else "; ".join(f"{count:,}" for count in counts)


def _fields(group: Group) -> Iterator[tuple[str, ...]]:
    count = len(group.members)
    named = sorted({name for m in group.members for side in SIDES for name in m.traffic[side]})
    by = {n: [sum(m.traffic[side][n] for m in group.members) / count for side in SIDES] for n in named}
    total = sum(map(sum, by.values())) or 1.0
    for name, (down, up) in sorted(by.items(), key=lambda item: -sum(item[1])):
        yield name, f"{down:,.0f}", f"{up:,.0f}", f"{100 * (down + up) / total:.1f} %"


def _time(runs: Sequence[RunFolder]) -> Part:
    e, devices = _experiment(runs[0]), [run.summary.get("devices") or {} for run in runs]
    rows = {}
    for key, what in (("link", "links of the virtual clock"), ("compute", "devices of the virtual clock")):
        if e.get(key):
            rows[what] = str(e[key])
    if any(devices):
        rows["simulated seconds"] = extent([d["simulated_seconds"] for d in devices if d], ".1f")
        if joules := [d["client_joules_total"] for d in devices if "client_joules_total" in d]:
            rows["joules of all clients, modelled"] = extent(joules, ".4g")
    seconds = [run.summary["seconds_clients"] for run in runs if run.summary.get("seconds_clients")]
    if seconds:
        rows["seconds of computing here, all clients"] = extent(seconds, ".1f")
    return Part("Time and energy", rows)


def _scores(group: Group) -> Grid:
    lines = []
    for metric in SCORES:
        values = group.values(f"{metric}@end", metric)
        if not values:
            continue
        scale, digits = scale_of(f"{metric}@end")
        digits = max(digits, 3) if scale == 1 else digits
        scaled = [scale * v for v in values]
        unit = " %" if percent(metric) else ""
        half = half_width(scaled)
        interval = NONE if math.isnan(half) else f"± {half:.{digits}f}"
        each = ", ".join("diverged" if math.isnan(v) else f"{v:.{digits}f}" for v in scaled)
        mean = NONE if any(map(math.isnan, scaled)) else f"{fmean(scaled):.{digits}f}"
        lines.append((heading(metric) + unit, mean, interval, str(len(values)), each))
    seeds = ", ".join(map(str, group.seeds))
    return Grid("", ("", "mean", "95 % interval", "n", f"seeds {seeds}"), tuple(lines))


def _repeat(runs: Sequence[RunFolder]) -> Part:
    manifest = runs[0].manifest
    platform, command = manifest.get("platform") or {}, [str(w) for w in manifest.get("command") or ()]
    if command:
        command[0] = "fedsim"
    processors = {_processor(r) for r in runs}
    rows = {
        "command of the first run": shlex.join(command) or NONE,
        "commit": ", ".join(sorted({str(r.manifest.get("commit")) for r in runs})),
        "versions": "; ".join(dict.fromkeys(_listed(r.manifest.get("versions")) for r in runs)),
        "processor": ", ".join(sorted(filter(None, processors))) or NONE,
        "GPUs": ", ".join(map(str, platform.get("gpus") or ())) or "none",
        "system": str(platform.get("system") or NONE),
        "probe of the arithmetic": _listed(platform.get("probe")),
        "numerics": str(runs[0].experiment.get("numerics")),
        "digest of the experiment, first seed": str(manifest.get("experiment_sha256")),
    }
    digests = Grid(
        "Digests of the results",
        ("seed", "model", "states of the clients", "ledger"),
        tuple(
            (
                str(r.experiment["seed"]),
                *(str(r.summary.get(key) or NONE)[:16] for key in ("model_sha256", "clients_sha256")),
                str((r.summary.get("files") or {}).get("ledger.csv", {}).get("sha256") or NONE)[:16],
            )
            for r in runs
        ),
    )
    return Part("To repeat it", rows, (digests,))


# ---- the checklist


def _checks(group: Group) -> Iterator[Check]:
    """Yield the claims that the runs support, and what is missing for the others."""
    runs = [m.run for m in group.members]
    e, n = _experiment(runs[0]), len(runs)
    unfinished = [f"seed {r.experiment['seed']} is {r.status}" for r in runs if r.status != "done"]
    unfinished += [f"left out: another run of seed {m.seed}, {m.run.status}" for m in group.aside]
    yield _check("every run is finished", "; ".join(unfinished))
    target = ", ".join(str(m.seed) for m in group.members if m.stopped)
    early = f"seed {target} ended at its target accuracy: its scores are of another round" if target else ""
    yield _check("every run has all of its rounds", early)
    few = "one seed: no comparison" if n == 1 else f"n = {n}: no ranking"
    yield _check(f"n = {n}: a comparison is possible", f"{few}; {LEAST} seeds allow one" if n < LEAST else "")
    yield Check(False, "one configuration: a claim that it is better takes fedsim compare with another one")
    bad = ", ".join(str(m.seed) for m in group.members if _diverged(m.run))
    unknown = "" if group.has("test_nll") else "no NLL, which would show a run that diverged"
    yield _check("no run diverged: the NLL fell", f"diverged: seed {bad}" if bad else unknown)
    rows = str(e.get("evaluate_on") or "test")
    yield _check("scores are those of the test rows", "" if rows == "test" else f"scores are of {rows}")
    yield _check("calibration is measured", "" if group.has("test_ece") else "no calibration")
    kernel = [r.summary.get("kernel_residual") for r in runs]
    unequal = f"the ledger differs from the kernel: {kernel}" if any(map(_residual, kernel)) else ""
    alone = "the ledger was not compared with the kernel: --transport tcp --verify-bytes"
    yield _check("the ledger equals the kernel's counters", alone if None in kernel else unequal)
    timed = e.get("link") or e.get("compute")
    yield _check("time is simulated", "" if timed else "no claim about time: --link and --compute model it")
    loss = "codecs may lose precision: fedsim codecs RUN says how much" if e.get("codecs") else ""
    yield _check("messages are sent without loss", loss)
    commits = {str(r.manifest.get("commit") or "unknown") for r in runs}
    dirty = ", ".join(sorted(c for c in commits if c == "unknown" or c.endswith("+")))
    yield _check("the source is a commit without changes", f"uncommitted changes: {dirty}" if dirty else "")
    drift = "; ".join(text for r in runs for text in r.drift)
    makes = {(_listed(r.manifest.get("versions")), _processor(r)) for r in runs}
    several = "several commits, versions or processors" if len(makes) > 1 or len(commits) > 1 else ""
    yield _check("one commit, one set of versions, one processor", drift or several)
    here = "the bits repeat on processors of this kind; --numerics portable for all x86-64"
    portable = e.get("numerics") == "portable"
    yield _check("the bits repeat on any x86-64 processor", "" if portable else here)


def _check(good: str, lack: str) -> Check:
    """Return a line of the checklist: `good`, or `lack` if it is not empty."""
    return Check(not lack, lack or good)


def _residual(by_side: Any) -> bool:
    return any(by_side.values()) if isinstance(by_side, Mapping) else bool(by_side)


def _processor(run: RunFolder) -> str:
    return str((run.manifest.get("platform") or {}).get("processor_name") or "")


def _diverged(run: RunFolder) -> bool:
    """Return whether the last NLL is NaN, or above the NLL of the initial model."""
    curve = run.curve
    if len(curve.lines) < 2 or not curve.has("test_nll"):
        return False
    values = curve.metric("test_nll")
    return math.isnan(values[-1]) or values[-1] > values[0]


def _units(group: Group, side: str, once: bool) -> str:
    return f"{fmean(m.units(side, once) for m in group.members):.3f} {side}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else NONE


def _listed(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in (values or {}).items()) or NONE
