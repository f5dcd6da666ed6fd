"""A user's mistake is one clear line and exit code 2, never a traceback, and loses nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import fedsim
from fedsim.errors import UsageError
from fedsim.experiment import Experiment, convert
from launch.cli import main
from launch.configuration.config import Overrides


def launch(out: Path, *arguments: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, ["launch", "--out", str(out), *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algo", "nowhere.py:Mine"], "there is no file"),
        (["--set", "delta=-1"], "delta = -1"),
        (["--set", "drop_last=1"], "drop_last = 1: must be true or false"),
        (["--set", "lr=1e400"], "--set lr=inf: must be a finite number"),
        (["--dataset", "mnist", "--data-dir", "/nowhere"], "the data folder /nowhere"),
        (["--codec", "sideways.mean=bf16"], "the direction is"),
        (["--partition", "natural"], "natural"),
        (["--partition", "iid+nosie:0.2"], "--partition 'iid+nosie:0.2': behind a + stands least:N, once"),
        (["--dataset", "d.npz,label=y"], ".npz left in 0.2: write FILE.py:NAME that reads it"),
        (["--clients", "100000"], "100,000 clients cannot divide 1,442 training examples: use fewer clients"),
        (["--remote-workers", "2"], "--remote-workers 2 needs an address for them"),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_clear_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    workers = () if "--workers" in arguments else ("--workers", "0")
    done = launch(tmp_path / "run", *workers, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert re.fullmatch(r"(run folder: .*\n.*\n)?", done.stdout)  # what needs torch is found later
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = launch(tmp_path, "--workers", "0")
    assert done.exit_code == 2
    assert "not empty" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_python_refuses_infinity_as_the_command_line_does() -> None:
    with pytest.raises(UsageError, match="lr = inf: must be a finite number"):
        convert(Experiment, {"hyperparameters": {"lr": float("inf")}}, "the arguments")


def test_the_number_of_workers_does_not_change_the_experiment() -> None:
    experiments = [Overrides.of({"workers": workers}).resolve()[0] for workers in (0, 1, 3, 10, 40)]
    experiments += [
        Overrides.of({}).resolve()[0],
        Overrides.of({"remote_workers": 2, "bind": "tcp://127.0.0.1:*"}).resolve()[0],
    ]
    assert [experiment.clients for experiment in experiments] == [10] * 7


def _sections(command: str) -> dict[str, list[str]]:
    """The options of a command's help, by section."""
    text = CliRunner().invoke(main, [command, "--help-all"]).stdout
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            section = sections.setdefault(line[:-1], [])
        elif line.startswith("  -") and sections:
            section += [word.rstrip(",") for word in line.split("  ")[1].split() if word.startswith("-")]
    return sections


def test_the_help_of_launch_has_every_option_in_a_section() -> None:
    sections = _sections("launch")
    assert sections.pop("Other options") == ["-h", "--help", "--help-all"]
    assert {option for options in sections.values() for option in options} == {
        option for p in main.commands["launch"].params for option in p.opts
    }
    assert "--codec" in sections["On the wire"] and "--workers" in sections["Execution"]


@pytest.mark.parametrize("command", ["launch", "plan", "resume", "sweep"])
def test_the_help_shows_the_usual_options_on_one_screen(command: str) -> None:
    text = CliRunner(env={"COLUMNS": "80"}).invoke(main, [command, "--help"]).stdout
    assert len(text.splitlines()) <= 50 and "--help-all" in text and "Usual options" in text
    assert "--max-norm" not in text and "--rounds" in text


def test_the_help_of_resume_and_plan_shows_what_they_use() -> None:
    resumed = {option for options in _sections("resume").values() for option in options}
    assert {"--rounds", "--workers", "--allow-drift"} <= resumed
    assert not {"--algo", "--clients", "--seed", "--out"} & resumed
    assert "fedlap_cov" not in CliRunner().invoke(main, ["resume", "--help"]).stdout
    planned = {option for options in _sections("plan").values() for option in options}
    assert {"--algo", "--clients", "--codec", "--participation"} <= planned
    assert not {"--lease", "--verify-bytes", "--workers"} & planned


LATIN_1 = "caf\udce9"
"""The name café as a shell in Latin-1 passes it."""


@pytest.mark.parametrize(
    "words", [["launch", "--out", LATIN_1], ["report", LATIN_1], ["plan", "--data-dir", LATIN_1]]
)
def test_a_path_that_is_not_utf_8_is_refused_in_one_line(words: list[str]) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert done.stderr == "fedsim: 'caf\\udce9' is not UTF-8; rename the file or folder\n"


@pytest.mark.parametrize(
    "words", [["card"], ["watch"], ["launch", "--rounds", "1", "--out"], ["launch", "--config"]], ids=" ".join
)
def test_a_name_that_is_too_long_for_a_file_is_one_line(words: list[str]) -> None:
    done = CliRunner().invoke(main, [*words, long := "x" * 300])
    assert done.exit_code == 2
    assert done.stderr == f"fedsim: {long}: File name too long\n"


def test_a_run_in_python_refuses_a_path_that_is_not_utf_8() -> None:
    with pytest.raises(UsageError, match=r"out.*must be UTF-8"):
        fedsim.run(algo="fedavg", rounds=1, workers=0, quiet=True, out=LATIN_1)


class WriteAndFlush:
    """What scripts put in the place of sys.stdout: nothing but write and flush."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.text, self._encoding = "", encoding

    def write(self, text: str) -> int:
        self.text += text.encode(self._encoding).decode(self._encoding)
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_output_needs_write_and_flush_alone(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that an encoding lacks are replaced, and the rest of the output is there."""
    stream = WriteAndFlush(encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    run = fedsim.run(algo="fedavg", model="logistic", clients=2, rounds=1, workers=0, out=tmp_path / "run")
    assert run.status == "done"
    assert "run folder" in stream.text or "done after 1 round" in stream.text
