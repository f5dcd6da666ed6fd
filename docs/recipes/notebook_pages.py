"""The notebooks in docs/notebooks as pages of the site: their text, their code and what it prints.

    python docs/recipes/notebook_pages.py --out DIR                30 seconds; writes pages and pictures
    python docs/recipes/notebook_pages.py --out DIR first_run      one of them

docs/hooks.py does this when it builds the site; no page is committed.

A notebook is a Python file in jupytext's percent format, so it is read, compared and linted like any other
file. Jupyter opens it with jupytext (decision 033). Each is carried out in a new process and an empty folder.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.results.figures import write_picture

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
BORDER = re.compile(r"^# %%(?P<prose> \[markdown\])?$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook: prose in Markdown, or code. `line` counts from 1 in the file."""

    prose: bool
    text: str
    line: int


def cells(source: str) -> Iterator[Cell]:
    """The cells of a file in percent format, without jupytext's header."""
    borders = list(BORDER.finditer(source))
    for border, end in zip(borders, [*(b.start() for b in borders[1:]), len(source)], strict=True):
        text = source[border.end() : end].strip("\n")
        if border["prose"]:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
        yield Cell(bool(border["prose"]), text, source.count("\n", 0, border.end()) + 2)


def page(name: str, contents: Sequence[Cell], outputs: Sequence[str]) -> str:
    """A notebook as Markdown. Every piece of code is followed by its output, where it has one."""
    parts = [
        f"<!-- written by `python docs/recipes/notebook_pages.py` from {name}.py -->",
        "<!-- this page: run by tests/docs/test_notebooks.py -->",
    ]
    for cell, output in zip(contents, outputs, strict=True):
        parts.append(cell.text if cell.prose else f"```python\n{cell.text}\n```")
        if output:
            parts.append(output)
    parts.append(f"This page is the notebook [{name}.py]({name}.py), carried out.")
    return "\n\n".join(parts) + "\n"


def carry_out(name: str, contents: Sequence[Cell], out: Path) -> Iterator[str]:
    """What each cell gives, as Markdown. Figures are written to `out`.

    The cells share one module `__main__`, as in Jupyter, and the current folder is theirs.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    pictures = 0
    for cell in contents:
        if cell.prose:
            yield ""
            continue
        printed = io.StringIO()
        code = compile("\n" * (cell.line - 1) + cell.text, str(NOTEBOOKS / f"{name}.py"), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        parts = [f"```text\n{printed.getvalue().rstrip()}\n```"] if printed.getvalue().strip() else []
        for number in plt.get_fignums():
            pictures += 1
            file = f"{name}_{pictures}.png"
            write_picture(plt.figure(number), out / file, dpi=130)
            plt.close(number)
            parts.append(f"![What the cell above draws]({file})")
        yield "\n\n".join(parts)


def write(name: str, out: Path) -> None:
    """Carry a notebook out in this process and write its page."""
    contents = list(cells((NOTEBOOKS / f"{name}.py").read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        text = page(name, contents, list(carry_out(name, contents, out)))
    (out / f"{name}.md").write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    names = sorted(file.stem for file in NOTEBOOKS.glob("*.py"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all of them")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pages")
    options = parser.parse_args(argv)
    out, chosen = options.out.resolve(), options.names or names
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"there is no notebook {', '.join(unknown)}; there are {', '.join(names)}")
    if len(chosen) == 1:
        write(chosen[0], out)
    else:
        for name in chosen:
            subprocess.run([sys.executable, __file__, name, "--out", str(out)], check=True)


if __name__ == "__main__":
    main()
