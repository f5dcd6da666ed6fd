"""Shell completion is click's own: verbs, options and choices, without a heavy import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.commands import ran

ROOT = Path(__file__).resolve().parents[2]


def completed(words: str) -> tuple[list[str], str]:
    """Return bash's completions of the last word, and the heavy modules that were imported."""
    program = (
        "import atexit, sys\n"
        "heavy = lambda: [n for n in ('torch', 'numpy', 'pandas', 'zmq') if n in sys.modules]\n"
        "atexit.register(lambda: print(heavy(), file=sys.stderr))\n"
        "from launch.cli import main\nmain(prog_name='fedsim')"
    )
    count = str(len(words.split()) - 1)
    environment = {"_FEDSIM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
    done = ran([sys.executable, "-c", program], cwd=ROOT, env=os.environ | environment)
    return done.stdout.splitlines(), done.stderr.strip()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fedsim ru", ["plain,runs"]),
        ("fedsim launch --unt", ["plain,--until"]),
        ("fedsim list mod", ["plain,models"]),
        ("fedsim report ru", ["file,ru"]),
    ],
)
def test_bash_is_answered_without_a_heavy_import(words: str, offered: list[str]) -> None:
    assert completed(words) == (offered, "[]")
