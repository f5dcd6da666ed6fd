"""Names that left are refused in one line that names what replaces them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import fedsim
from fedsim.errors import UsageError, unknown
from fedsim.removed import NAMES, removed
from launch.cli import main
from protocols import find


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_an_unknown_name_that_left_names_its_replacement(kind: str, name: str) -> None:
    message = str(unknown(kind, name, ["other"]))
    assert message.startswith(f"{name} left in 0.2: ")
    assert NAMES[kind][name] in message


def test_a_name_of_another_kind_is_an_unknown_name() -> None:
    assert removed("column", "lstm") is None
    assert str(unknown("column", "lstm", ["other"])).startswith("unknown column 'lstm'")


def test_an_algorithm_with_codecs_of_its_own_is_refused(tmp_path: Path) -> None:
    source = "from protocols.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    default_codecs = {}\n"
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(
        UsageError, match=r"default_codecs left in 0\.2: --codec names the codec of every field"
    ):
        find(f"{tmp_path}/mine.py:Mine")


@pytest.mark.parametrize(
    "line",
    [
        "replay RUN",
        "launch --keep-uploads",
        "devices generate --clients 3",
        "launch --durability none",
        "sweep --on ray",
        "launch --algo fedivon --set prior_power=1",
        "edge --join FILE",
        "plan --tree 2x5 --codec edge.mean=sigma:auto",
        "launch --dataset stackoverflow_nwp:20",
        "launch --partition pachinko:0.1,10,20",
        "launch --model lstm",
        "launch --model mlp+weights:w.safetensors+lora:r=4,target=fc1",
    ],
)
def test_a_typed_name_that_left_is_refused_in_one_line(line: str) -> None:
    done = CliRunner().invoke(main, line.split())
    assert done.exit_code == UsageError.exit_code
    assert " left in 0.2: " in done.stderr and done.stderr.count("\n") == 1


def test_a_value_that_left_names_its_replacement_in_python_too() -> None:
    with pytest.raises(UsageError, match=r"durability.*none.* left in 0"):
        fedsim.run(durability="none")  # type: ignore[arg-type]
