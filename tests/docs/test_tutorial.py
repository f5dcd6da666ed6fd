"""docs/tutorial.md and README.md: their commands run, in the order of the page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from launch.cli import main
from protocols import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
FAQ = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")


def commands(page: str) -> Iterator[list[str]]:
    """The arguments of every fedsim command in a page's shell blocks."""
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("fedsim "):
                yield shlex.split(line, comments=True)[1:]


def needs_files(command: list[str]) -> bool:
    """Whether a command needs data that must be fetched, or reads runs of such data."""
    return "--data-dir" in command or any("fashion" in word for word in command)


def checkable(command: list[str]) -> list[str]:
    """The same without the data: a sweep is listed and not run."""
    at = command.index("--data-dir")
    return [*command[:at], *command[at + 2 :], *(["--dry-run"] if command[0] == "sweep" else [])]


@pytest.mark.process
@pytest.mark.slow
def test_the_tutorials_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    ran = [c for c in commands(TUTORIAL) if not needs_files(c)]
    assert len(ran) > 12
    for command in ran:
        command = ["0" if word == "0,1,2" else word for word in command]  # one seed of a sweep is enough
        done = CliRunner(catch_exceptions=False).invoke(main, command)
        assert done.exit_code == 0, (command, done.output)
        if command[0] == "launch" and "runs/fedavg" in command:
            shown = re.search(r"```\nalgorithm traffic.*?```", TUTORIAL, re.DOTALL)
            assert shown is not None
            for name, down in re.findall(r"^(mean|header|framing) +([\d,]+)", shown[0], re.MULTILINE):
                assert re.search(rf"^{name} +{down} ", done.output, re.MULTILINE), done.output
    assert (tmp_path / "question.html").is_file()
    assert (tmp_path / "runs" / "fedavg" / "report.html").is_file()


@pytest.mark.parametrize("page", [TUTORIAL, README], ids=["tutorial", "README"])
def test_sweeps_that_need_files_are_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweeps = [c for c in commands(page) if c[0] == "sweep" and "--preset" in c]
    assert sweeps
    for command in sweeps:
        done = CliRunner(catch_exceptions=False).invoke(main, checkable(command))
        assert done.exit_code == 0, done.output
        assert done.output.count("to do ") == 30


@pytest.mark.parametrize("page", [TUTORIAL, README, FAQ], ids=["tutorial", "README", "faq"])
def test_commands_and_options_on_a_page_exist(page: str) -> None:
    for command in [
        *commands(page),
        *(shlex.split(c)[1:] for c in re.findall(r"`(fedsim [a-z][^`]*)`", page)),
    ]:
        assert command[0] in main.commands, command
        known = {o for p in main.commands[command[0]].params for o in p.opts} | {"--help"}
        assert {word.partition("=")[0] for word in command if word.startswith("--")} <= known, command


def test_the_readme_counts_the_algorithms() -> None:
    assert f"{len(REGISTRY)} algorithms are here" in README
