"""Reading a run, and refusing wrong input, where torch cannot be imported."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import fedsim
from fedsim.errors import MismatchError, UsageError
from launch.configuration.names import KINDS
from tests.support.commands import ran

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = '''
import json, sys
import builtins
real = builtins.__import__
def without(name, globals=None, locals=None, fromlist=(), level=0):
    """None in sys.modules would do, but scipy asks it for its tensors."""
    if not level and name.partition(".")[0] == "torch":
        raise ModuleNotFoundError(name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = without
from click.testing import CliRunner
from launch.cli import main
done = [CliRunner().invoke(main, arguments) for arguments in json.loads(sys.argv[1])]
ended = [(d.exit_code, d.output, repr(d.exception)) for d in done]
print(json.dumps([ended, [name for name in ("torch", "numpy", "pandas", "zmq") if name in sys.modules]]))
'''
Lines = tuple[str, ...]
"""Command lines. RUN has ended, KILLED has no summary, RUNS has both, EMPTY is no run, OUT is a folder."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in the command lines for folders."""
    runs, empty, out = (tmp_path_factory.mktemp(name) for name in ("runs", "empty", "out"))
    fedsim.run(quiet=True, algo="fedlap_func", model="logistic", clients=3, rounds=2, out=runs / "ended")
    shutil.copytree(runs / "ended", runs / "killed")
    (runs / "killed" / "summary.json").unlink()
    names = {"RUN": runs / "ended", "KILLED": runs / "killed", "RUNS": runs, "EMPTY": empty, "OUT": out}
    return {name: str(path) for name, path in names.items()}


def _carried_out(lines: Lines, places: dict[str, str]) -> tuple[list[tuple[int, str, str]], list[str]]:
    """How each command line ends (code, output, exception) in one process, and what that has imported."""
    words = [[_placed(word, places) for word in line.split()] for line in lines]
    done = ran([sys.executable, "-c", PROGRAM, json.dumps(words)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ended, imported = json.loads(done.stdout)
    return ended, imported


def _placed(word: str, places: dict[str, str]) -> str:
    first, slash, rest = word.partition("/")
    return places.get(first, first) + slash + rest


def test_a_launch_says_what_it_does_before_it_imports_torch(places: dict[str, str]) -> None:
    words = "launch --algo bcm --runs OUT/runs --workers"
    ended, _ = _carried_out((f"{words} 0", f"{words} 2"), places)
    for (code, output, error), where in zip(ended, ("in process", "2 workers over ipc"), strict=True):
        folder, task = output.splitlines()
        assert (code, error) == (1, "ModuleNotFoundError('torch')")
        assert folder.startswith(f"run folder: {places['OUT']}/runs/")
        assert task.startswith(f"bcm on digits, 1 round, participation full, seed 0; {where} (")


READ: dict[str, tuple[Lines, Lines, Lines]] = {
    "help": (("--help", "launch --help"), ("launch --roundz 3", "launhc"), ()),
    "launch": (
        (),
        (
            *("launch --algo fedvag", "launch --rounds x", "launch --set delt=1", "launch --dataset mnits"),
            *(
                *("launch --codec mean=bf17", "launch --model nope", "launch --partition iidd"),
                "launch --until 2",
            ),
            *(
                *("launch --participation ful", "launch --devices x", "launch --workers x"),
                "launch --preset nope",
            ),
            *("launch --config EMPTY/no.toml", "launch --onn slurm", "plan --algo fedvag", "plan --rounds x"),
        ),
        (),
    ),
    "list": (tuple(f"list {kind}" for kind in KINDS), ("list nope",), ()),
    "ledger": (
        ("ledger RUN", "ledger RUN --json", "ledger KILLED --by client --all", "ledger RUN --csv OUT/x.csv"),
        ("ledger EMPTY", "ledger RUN --by x", "ledger RUN --by hop"),
        ("numpy", "pandas"),
    ),
    "trace": (("trace RUN --out OUT/x.json", "trace KILLED --out -"), ("trace EMPTY", "trace"), ()),
    "report": (
        ("report RUN --out OUT/x.html", "report KILLED --out OUT/x.html"),
        ("report EMPTY", "report"),
        ("numpy", "pandas"),
    ),
    "compare": (
        ("compare RUN --out OUT/c.html --csv OUT/c.csv", "compare KILLED --json --out OUT/c.html"),
        ("compare EMPTY", "compare RUN --where nope=1", "compare RUN --to x"),
        ("numpy", "pandas"),
    ),
    "watch": (("watch RUN",), ("watch EMPTY", "watch RUN --interval x"), ()),
    "runs": (("runs RUNS", "runs RUNS --json"), ("runs EMPTY/no", "runs --all"), ()),
    "schedule": (
        ("schedule 0.5", "schedule coin:0.3+lost:0.1 --json"),
        ("schedule ful", "schedule coin:x", "schedule robin:99", "schedule 0.5 --rounds 0"),
        ("numpy",),
    ),
    "sweep": (
        (
            "sweep --dry-run --seeds 0,1 --runs OUT",
            "sweep --dry-run --over algo=fedavg,ivon_admm --over participation=full,0.5 --runs OUT",
        ),
        (
            *("sweep --dry-run", "sweep EMPTY/no.toml", "sweep --seeds x", "sweep --over algo=fedvag"),
            *("sweep --over lrr=1,2", "sweep --over dataset=mnits", "sweep --over rounds=x"),
        ),
        ("numpy",),
    ),
}
"""By command: what is read, what is refused, and which packages that may import."""

REFUSED: Lines = (
    *("resume EMPTY", "resume RUN --rounds 1", "resume RUN --algo fedavg", "verify EMPTY"),
    *("codecs EMPTY", "codecs --keep 7", "describe fedvag", "describe --model nope", "list nope", "nope"),
    *("worker --join EMPTY/no", "revoke EMPTY x"),
)
"""Wrong input of the other commands."""


@pytest.mark.parametrize("command", READ)
def test_a_run_is_read_and_wrong_input_refused_without_torch(command: str, places: dict[str, str]) -> None:
    good, wrong, allowed = READ[command]
    ended, imported = _carried_out((*good, *wrong), places)
    for line, (code, output, exception) in zip((*good, *wrong), ended, strict=True):
        due = 0 if line in good else UsageError.exit_code
        assert code == due and output.strip(), (line, code, output, exception)
    assert set(imported) <= set(allowed)


def test_other_commands_refuse_wrong_input_without_torch(places: dict[str, str]) -> None:
    ended, imported = _carried_out(REFUSED, places)
    for line, (code, output, exception) in zip(REFUSED, ended, strict=True):
        due = MismatchError.exit_code if line.startswith("resume RUN") else UsageError.exit_code
        assert code == due and len(output.splitlines()) == 1, (line, code, output, exception)
    assert set(imported) <= {"zmq"}
