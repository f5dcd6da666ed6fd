"""Completion of values, as click answers the shells, and as bash asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from launch.cli import main
from launch.configuration import names
from tests.support.commands import DEADLINE

ROOT = Path(__file__).resolve().parents[2]


def completed(*words: str) -> list[str]:
    """What is offered for the last word."""
    *arguments, incomplete = words
    shell = ShellComplete(main, {}, "fedsim", "_FEDSIM_COMPLETE")
    return [item.value for item in shell.get_completions(arguments, incomplete)]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (
            ("launch", "--algo", "fedl"),
            ["fedlap", "fedlap_cov", "fedlap_func", "fedlap_func_public", "fedlap_cov_func"],
        ),
        (("launch", "--dataset", "fash"), ["fashion_mnist"]),
        (("resume", "--preset", "fash"), ["fashion_mnist"]),
        (("launch", "--track", "tens"), ["tensorboard"]),
        (("launch", "--track", "wandb,t"), ["wandb,tensorboard", "wandb,trackio"]),
        (("launch", "--model", "mlp"), [n for n in names.names("models") if n.startswith("mlp")]),
        (
            ("launch", "--partition", "two_"),
            [n for n in names.names("partitions") if n.startswith("two_")],
        ),
        (("launch", "--participation", "ro"), ["robin:"]),
        (("schedule", "mar"), ["markov:"]),
        (("launch", "--codec", "up.prec"), ["up.precision="]),
        (("launch", "--algo", "fedavg", "--codec", "me"), ["mean="]),
        (("launch", "--codec", "edge.p"), []),
        (
            ("plan", "--codec", "up.precision=b"),
            [f"up.precision={n}" for n in ("bf16", "bitmap:", "best:")],
        ),
        (("launch", "--algo", "fedlap", "--set", "delt"), ["delta="]),
        (("describe", "ivon"), ["ivon_admm", "ivon_pvi"]),
        (("list", "mod"), ["models"]),
        (("ru",), ["runs"]),
        (("launch", "--unt"), ["--until"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_values_are_offered(words: tuple[str, ...], offered: list[str]) -> None:
    assert sorted(completed(*words)) == sorted(offered)


def test_a_file_of_the_users_own_is_left_to_the_shell() -> None:
    shell = ShellComplete(main, {}, "fedsim", "_FEDSIM_COMPLETE")
    (item,) = shell.get_completions(["launch", "--algo"], "own/min")
    assert (item.value, item.type) == ("own/min", "file")


@pytest.mark.parametrize("command", ["resume", "verify", "report", "ledger", "codecs", "compare", "runs"])
def test_run_folders_are_offered(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/b-1", "runs/a-1", "runs/sweep/c-1", "elsewhere/d-1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "runs/no-run").mkdir()
    assert completed(command, "") == ["elsewhere/d-1", "runs/a-1", "runs/b-1", "runs/sweep/c-1"]
    assert completed(command, "runs/a") == ["runs/a-1"]
    assert completed(command, "elsewhere/") == ["elsewhere/d-1"]


def asked(words: str, at: int) -> tuple[list[str], str]:
    """What the command answers bash, which divides words at = and :, and which heavy modules it imports."""
    program = (
        "import atexit, sys\n"
        "heavy = lambda: [n for n in ('torch', 'numpy', 'pandas', 'zmq') if n in sys.modules]\n"
        "atexit.register(lambda: print(heavy(), file=sys.stderr))\n"
        "from launch.cli import main\nmain(prog_name='fedsim')"
    )
    environment = {"_FEDSIM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return done.stdout.splitlines(), done.stderr.strip()


@pytest.mark.parametrize(
    ("words", "at", "answer"),
    [
        ("fedsim launch --algo ivon_p", 3, ["plain,ivon_pvi"]),
        ("fedsim launch --algo = ivon_p", 4, ["plain,ivon_pvi"]),
        ("fedsim launch --codec up.precision = bi", 5, ["plain,bitmap:"]),
        ("fedsim launch --codec up.precision =", 4, None),
        ("fedsim launch --codec precision = best : 0.1 --algo fedpr", 9, ["plain,fedprox"]),
    ],
)
def test_bash_is_answered_without_a_heavy_import(words: str, at: int, answer: list[str] | None) -> None:
    offered, heavy = asked(words, at)
    assert offered == answer if answer else "plain,log8" in offered
    assert heavy == "[]"


def test_the_script_of_bash_is_valid() -> None:
    environment = os.environ | {"_FEDSIM_COMPLETE": "bash_source"}
    program = "from launch.cli import main; main(prog_name='fedsim')"
    command = [sys.executable, "-c", program]
    script = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE
    ).stdout
    assert "compopt -o nospace" in script
    loaded = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\ncomplete -p fedsim"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert loaded.stdout.endswith("-F _fedsim_completion fedsim\n"), loaded.stderr
