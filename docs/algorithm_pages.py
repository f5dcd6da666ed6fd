"""The site's page of each algorithm: paper, box, messages, cost, hyperparameters, differences and results.

docs/hooks.py calls `pages` when it builds the site; no page is committed. Everything is read from the code,
docs/references/citations.toml and the titles of docs/results, which takes about 3 seconds and runs nothing.
Measured bytes and scores stand in docs/communication.md and docs/algorithms.md (docs/recipes/costs.py).
"""

from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.results.describe import cost_once, hyperparameter_rows, message_rows, wire_cost
from protocols import REGISTRY, AnyAlgorithm

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLDER = "algorithms"


def page(kind: type[AnyAlgorithm], citations: dict[str, Any]) -> str:
    """The page of one algorithm."""
    algorithm = kind()
    file = Path(inspect.getfile(kind)).relative_to(ROOT)
    title, *paragraphs = (inspect.getmodule(kind).__doc__ or "").strip().split("\n\n")
    wire = [p for p in paragraphs if p.startswith("Wire")]
    differs = [p.removeprefix("Differs: ") for p in paragraphs if p.startswith("Differs: ")]
    box = [p for p in paragraphs if p not in wire and not p.startswith(("Differs: ", "References:"))]
    siblings = [k.name for k in REGISTRY if k is not kind and inspect.getfile(k) == inspect.getfile(kind)]
    others = f", which also holds {_links(siblings)}" if siblings else ""
    citation = citations["algorithms"][kind.name]
    once = cost_once(algorithm)
    return "\n\n".join(
        [
            f"# {kind.name}",
            _prose(title),
            f"`fedsim launch --algo {kind.name}` runs it. The code is [{file}](../../{file}){others}.",
            "\n".join(_cited(citation, citations["papers"])),
            "## The box",
            *_box(box),
            "## Messages",
            _table(("message", "field", "kind", "shape", "type"), message_rows(algorithm)),
            f"Cost per client and round, scalars left out: **{wire_cost(algorithm)}**"
            + (f", and once per client **{once}**." if once else ".")
            + " P is the number of the model's parameters. "
            + "[Measured bytes](../communication.md#what-every-algorithm-costs) include headers and framing.",
            *map(_prose, wire),
            "## Hyperparameters",
            _table(("hyperparameter", "default", "values", "meaning"), hyperparameter_rows(algorithm)),
            f"`--set NAME=VALUE` changes one. The default model is `{kind.default_model}`.",
            *(f"## What differs from the paper\n\n{_prose(d[0].upper() + d[1:])}" for d in differs),
            "## Results",
            "\n".join(_results(kind.name)),
            "",
        ]
    )


def _cited(citation: dict[str, Any], papers: dict[str, Any]) -> list[str]:
    """The paper with its link, the papers beside it, and the page of the equations."""
    lines = [f"- {_paper(papers[citation['paper']])}: {_prose(citation['where'])}"]
    for also in citation["also"]:
        key, _, what = also.partition(": ")
        lines.append(f"- {_paper(papers[key])}: {_prose(what)}")
    return [*lines, f"- The equations in our signs: [{citation['page']}](../references/{citation['page']})"]


def _paper(paper: dict[str, Any]) -> str:
    title = f"[{paper['title']}]({paper['url']})" if "url" in paper else paper["title"]
    names = [name.split()[-1] for name in paper["authors"]]
    authors = f"{names[0]} et al." if len(names) > 3 else ", ".join(names)
    return f"{authors}, {title}, {paper['venue']}"


def _box(paragraphs: Iterable[str]) -> list[str]:
    """Indented paragraphs are formulas and stay as they are; the others are text."""
    out: list[str] = []
    for paragraph in paragraphs:
        formulas = textwrap.dedent(paragraph).rstrip()
        if not paragraph.startswith("    "):
            out.append(_prose(paragraph))
        elif out and out[-1].startswith("```"):
            out[-1] = out[-1].removesuffix("\n```") + f"\n\n{formulas}\n```"
        else:
            out.append(f"```text\n{formulas}\n```")
    return out


def _prose(text: str) -> str:
    """A paragraph as one line of Markdown that shows its signs as they are."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_<\[\]|])", r"\\\1", p) for p in pieces)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _links(names: Iterable[str]) -> str:
    return ", ".join(f"[{name}]({name}.md)" for name in names)


def _results(name: str) -> list[str]:
    """The pages of results that name the algorithm, or whose recipe does."""
    lines = ["- [One run with its defaults on digits](../algorithms.md), beside all others"]
    for result in sorted((DOCS / "results").glob("*.md")):
        text = result.read_text(encoding="utf-8")
        recipes = [DOCS / "recipes" / f"{result.stem}{suffix}" for suffix in (".toml", ".py")]
        sources = [recipe.read_text(encoding="utf-8") for recipe in recipes if recipe.is_file()]
        named = re.search(rf"\b{name}\b", text) or any(f'"{name}"' in source for source in sources)
        if result.name != "README.md" and named:
            lines.append(f"- [{text.splitlines()[0].removeprefix('# ')}](../results/{result.name})")
    return lines


def pages() -> dict[str, str]:
    """The Markdown of every algorithm's page, by its path in docs/."""
    citations = tomllib.loads((DOCS / "references" / "citations.toml").read_text(encoding="utf-8"))
    return {f"{FOLDER}/{kind.name}.md": page(kind, citations) for kind in REGISTRY}
