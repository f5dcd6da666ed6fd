"""Run README's first command; write its card's checklist to docs/what-a-number-is-worth.md.

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


def main(page: Path) -> None:
    """Run it, and put the checklist of its card into the page."""
    with tempfile.TemporaryDirectory() as folder:
        fedsim = [sys.executable, "-m", "launch"]
        run, card = f"{folder}/run", Path(folder) / "card.md"
        subprocess.run([*fedsim, *command(), "--quiet", "--out", run], check=True, cwd=ROOT)
        subprocess.run([*fedsim, "card", run, "--out", str(card)], check=True, cwd=ROOT)
        checklist = card.read_text(encoding="utf-8").partition("## Checklist\n\n")[2].strip()
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{checklist}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main(ROOT / "docs" / "what-a-number-is-worth.md")
