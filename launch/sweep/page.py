"""The page of a sweep in docs/results: what was run, tables, plots, and where every number is from."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.sweep.table import Grid, Results


def write_page(path: Path, results: Results, grids: list[Grid], plots: list[Path], command: str) -> None:
    """Markdown with the tables and plots of a finished sweep."""
    recipe = results.recipe
    parts = [f"# {recipe.title}", recipe.about.strip(), f"```\n{command}\n```"]
    parts += [g.markdown().rstrip() for g in grids]
    parts += [f"![{p.stem.replace('_', ' ')}]({p.name})" for p in plots]
    parts += [recipe.notes.strip(), _provenance(results)]
    path.write_text("\n\n".join(p for p in parts if p) + "\n")


def _provenance(results: Results) -> str:
    """Runs, commits, versions, time: from the run folders themselves."""
    done = [t for t in results.trials if results.pool.done(t)]
    signs = [results.pool.signed(t) for t in done]
    seconds = sum(float(s["seconds"]) for s in signs)
    commits = sorted({str(s["commit"]) for s in signs})
    versions: Mapping[str, Any] = results.pool.manifest(done[0]).get("versions", {}) if done else {}
    libraries = ", ".join(
        f"{name} {v}" for name, v in versions.items() if name in ("python", "torch", "numpy")
    )
    seeds = ", ".join(map(str, results.recipe.seeds))
    unfinished = len(results.trials) - len(done)
    return (
        f"Cells are the mean ± the population standard deviation over seeds {seeds}; bands are the range of "
        f"the seeds. {len(done)} runs{f', {unfinished} missing' if unfinished else ''}, {seconds / 60:,.0f} "
        f"CPU-minutes in all ({platform.machine()}, one thread each), at commit {', '.join(commits)}; "
        f"{libraries}."
    )
