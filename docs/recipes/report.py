"""What the recipes share: their command line, a Markdown page with its circumstances, one style of figure."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from launch.results.figures import write_picture
from launch.sweep.finished import SUFFIX, read_archive

ROOT = Path(__file__).resolve().parents[2]
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
STYLE = {
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "fedsim",
}


def options(
    what: str, argv: Sequence[str] | None, folders: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """`--out` and `--quick`, which every recipe has, and `folders`: further options and what they are."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a few seconds' worth; shows that it runs")
    for name, meaning in (folders or {}).items():
        parser.add_argument(name, type=Path, help=meaning)
    return parser.parse_args(argv)


def figure(width: float, height: float, rows: int, columns: int, **how: object) -> tuple[Figure, object]:
    """An empty figure in the common style, and its axes as plt.subplots gives them."""
    plt.rcParams.update(STYLE)
    return plt.subplots(rows, columns, figsize=(width, height), **how)  # type: ignore[arg-type]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table: the first column to the left, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    escaped = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


@dataclass
class Page:
    """A result page that its recipe writes: `name` is that of the script and of its pictures.

    With `section_of` it is a section of the page of that name, whose other parts stay as they are.
    """

    name: str
    title: str
    options: argparse.Namespace
    section_of: str = ""
    parts: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def add(self, text: str) -> None:
        """A paragraph, a list, a table or a heading; tables are printed too."""
        if text.startswith("|"):
            print(text, flush=True)
        self.parts.append(text.strip())

    def picture(self, drawn: Figure, alt: str) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        write_picture(drawn, self.options.out / f"{self.name}.png")
        plt.close(drawn)
        self.parts.append(f"![{alt}]({self.name}.png)")

    def write(self) -> Path:
        """The page with its circumstances at the end. Returns its path."""
        command = f"python docs/recipes/{self.name}.py" + (" --quick" if self.options.quick else "")
        head = [f"# {self.title}", f"Written by `{command}`; do not edit by hand."]
        if self.options.quick:
            head.append("**A quick run: the numbers mean nothing.**")
        seconds = time.perf_counter() - self.started
        foot = [circumstances(seconds)]
        text = "\n\n".join([*head, *self.parts, *foot]) + "\n"
        path: Path = self.options.out / f"{self.section_of or self.name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.section_of:
            marker = f"<!-- section: {self.name} -->\n"
            text = f"{marker}\n{re.sub('^#', '##', text, flags=re.MULTILINE)}"
            before = path.read_text() if path.exists() else ""
            parts = re.split(r"^(?=<!-- section: )", before, flags=re.MULTILINE)
            place = next((n for n, part in enumerate(parts) if part.startswith(marker)), len(parts))
            text = "\n".join(
                part.strip() + "\n" for part in [*parts[:place], text, *parts[place + 1 :]] if part
            )
        path.write_text(text)
        print(f"{path} after {seconds:.0f} s", flush=True)
        return path


def circumstances(seconds: float) -> str:
    """Return run time, machine, commit and versions as one sentence."""
    names = ("torch", "numpy", "scikit-learn", "matplotlib")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"Circumstances: run time {seconds:.0f} s on one thread of {processor()}; load of the machine at the "
        f"end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; commit {commit()}; "
        f"Python {platform.python_version()}, {versions}."
    )


def commit() -> str:
    """Short hash of HEAD, and whether code under it was changed."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "fedsim", "protocols")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        ", with uncommitted changes" if changed else ""
    )


def processor() -> str:
    """The processor's name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@dataclass(frozen=True)
class Score:
    """An evaluated round of an archived run: scores at its end, megabytes sent since the start."""

    row: str
    """The name of the run's row in the sweep's tables."""
    seed: int
    round: int
    accuracy: float
    nll: float
    down: float
    up: float


def archived(sweep: str) -> Iterator[Score]:
    """Yield the evaluated rounds of all runs of docs/results/SWEEP_runs.jsonl.zst, run by run."""
    path = ROOT / "docs" / "results" / f"{sweep}{SUFFIX}"
    for run in read_archive(path).values():
        curve = run.curve
        names = ["test_accuracy", "test_nll", "MB down", "MB up"]
        for number, *numbers in curve[names].itertuples():
            yield Score(run.name, run.seed, number, *numbers)
