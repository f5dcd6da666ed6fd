"""Run README's first command; write its card to docs/results/readme_card.md, the checklist to docs/card.md.

    python docs/recipes/readme_card.py      20 seconds

The command is read from README.md.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- checklist: docs/recipes/readme_card.py -->", "<!-- end of checklist -->"


def command() -> list[str]:
    """The words of README's first fedsim launch."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"fedsim (launch [^\n]*)", text)
    if match is None:
        raise SystemExit("README.md has no fedsim launch")
    return shlex.split(match[1])


def main(page: Path, card: Path) -> None:
    """Run it, write the card, and put its checklist into the page."""
    with tempfile.TemporaryDirectory() as folder:
        fedsim = [sys.executable, "-m", "launch"]
        run = f"{folder}/run"
        subprocess.run([*fedsim, *command(), "--quiet", "--out", run], check=True, cwd=ROOT)
        subprocess.run([*fedsim, "card", run, "--out", str(card)], check=True, cwd=ROOT)
    text = card.read_text(encoding="utf-8").replace(f"--quiet --out {run}", "")
    card.write_text(text, encoding="utf-8")
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    checklist = text.partition("## Checklist\n\n")[2].strip()
    page.write_text(f"{before}{BEGIN}\n\n{checklist}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main(ROOT / "docs" / "card.md", ROOT / "docs" / "results" / "readme_card.md")
