"""Names and lists without torch: what they say, and that a typo is told before anything is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.errors import UsageError
from launch import names
from launch.commands import write_names
from launch.config import resolve
from protocols import REGISTRY
from tests.support.commands import DEADLINE

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_is_what_the_registries_say() -> None:
    assert names.FILE.read_text(encoding="utf-8") == write_names.text(), (
        "python -m launch.commands.write_names"
    )


def test_every_algorithm_is_listed_in_the_order_of_the_registry() -> None:
    assert list(names.names("algorithms")) == [kind.name for kind in REGISTRY]


def _imports(*arguments: str) -> tuple[list[str], str]:
    """The heavy packages that a command imports, and all that it prints."""
    program = (
        "import sys\nfrom launch.cli import main\n"
        f"try:\n    main({list(arguments)!r})\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'numpy', 'zmq', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE
    )
    *rest, last = done.stdout.splitlines()
    return _printed_list(last), "\n".join(rest) + done.stderr


def _printed_list(text: str) -> list[str]:
    """['torch', 'numpy'] as Python prints it."""
    return [name.strip(" '") for name in text.strip("[]").split(",") if name.strip()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algo", "fedlap_cow"], "unknown algorithm 'fedlap_cow'; did you mean 'fedlap_cov'?"),
        (["--dataset", "fashion_mnits"], "unknown data set 'fashion_mnits'; did you mean 'fashion_mnist'?"),
        (["--model", "cnn_acar2"], "unknown model 'cnn_acar2'; did you mean 'cnn_acar'?"),
        (["--partition", "dirichlt:3"], "unknown partition 'dirichlt'; did you mean 'dirichlet:ALPHA'?"),
        (["--codec", "mean=bf17"], "unknown codec 'bf17'; did you mean 'bf16'?"),
        (["--codec", "meen=bf16"], "unknown message field 'meen'; did you mean 'mean'?"),
        (["--participation", "robn:2"], "unknown schedule 'robn'; did you mean 'robin:N'?"),
        (["--participation", "ful+lost:0.1"], "unknown schedule 'ful'; did you mean 'full'?"),
        (["--track", "tensorbord"], "unknown tracker 'tensorbord'; did you mean 'tensorboard'?"),
        (["--set", "delt=1"], "'delt'; did you mean 'delta'? (all: fedsim describe fedlap_cov)"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_name_is_told_before_anything_heavy_is_imported(arguments: list[str], words: str) -> None:
    imported, printed = _imports("launch", *arguments)
    assert words in printed
    assert imported == []
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["describe", "fedlap_cow"], "did you mean 'fedlap_cov'?"),
        (["schedule", "ful"], "did you mean 'full'?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_other_commands_tell_a_wrong_name_as_early(arguments: list[str], words: str) -> None:
    imported, printed = _imports(*arguments)
    assert words in printed
    assert imported == []


@pytest.mark.parametrize("kind", names.KINDS)
def test_a_list_imports_nothing_heavy_and_has_every_name(kind: str) -> None:
    imported, printed = _imports("list", kind)
    assert imported == []
    words = printed.split()
    assert all(name.usage.split()[0] in words for name in names.names(kind).values())


def test_good_names_and_users_files_pass() -> None:
    resolve({"participation": "markov:0.2,0.4+lost:0.1", "partition": "two_dirichlet:1,0.5"})
    resolve({"participation": "0.3+gone:0.1", "codecs": ("up.precision=csr:0.1", "mean=delta+zstd")})
    resolve({"participation": "trace:some+where.csv+lost:0.1", "dataset": "stackoverflow_lr:3"})
    resolve({"algo": "mine.py:Mine", "hyperparameters": ("anything=1",), "model": "net.py:Net"})
    resolve({"algo": "fedlap", "hyperparameters": ("local.lr=0.1", "epochs=1")})


def test_of_many_names_only_near_ones_are_shown() -> None:
    with pytest.raises(UsageError) as near:
        resolve({"algo": "fedlap_cow"})
    assert str(near.value) == (
        "unknown algorithm 'fedlap_cow'; did you mean 'fedlap_cov'? (also near: fedlap_func, fedlap, "
        "fedlap_cov_func; all: fedsim list algorithms)"
    )
    with pytest.raises(UsageError, match=r"unknown algorithm 'zzz' \(all: fedsim list algorithms\)$"):
        resolve({"algo": "zzz"})
