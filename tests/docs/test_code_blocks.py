"""Every code block of a page that is a command or Python is run, or the page says why not.

- `<!-- run by FILE -->` above a block: that test (or .ci/run) runs it.
- `<!-- not run: WHY -->` above a block: nothing runs it. Its commands and options are checked all the same.
- `<!-- this page: run by FILE -->`, `<!-- this page: not run: WHY -->`: the same for all blocks of a page.
- A block without a mark is run here, in the order of its page, a launch without `--rounds` for one round.
  One that begins with `# NAME.py` or `# NAME.toml` is saved under that name before.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt

from launch.cli import main
from tests.support.commands import DEADLINE
from tests.support.pages import notebooks, reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {ROOT / "docs" / "reference.md": reference()}
GENERATED |= {ROOT / "docs" / "notebooks" / f"{name}.md": text for name, text in notebooks().items()}
"""Pages that only the site has."""
PAGES += GENERATED
SHELL, PYTHON = {"sh", "bash", "shell"}, {"python", "py"}
COMMAND = re.compile(r"(?!.* -- )(?:\w+=\S+ )*(?:fedsim|python3?|pip|git|docker|srun|eval) \S")
STATEMENT = re.compile(r"(?:import|from|with|for|def|class) \w|run = |fedsim\.")
MARK = re.compile(r"<!-- (?P<page>this page: )?(?:run by (?P<by>\S+)|not run: (?P<why>.+?)) -->", re.DOTALL)
SAVED = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    """A code block: its language as written or as guessed, and the mark that holds for it."""

    page: str
    line: int
    language: str
    text: str
    mark: re.Match[str] | None

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, with continued lines joined and comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]

    @property
    def saved(self) -> re.Match[str] | None:
        return SAVED.match(self.text)


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page that are commands, Python or files."""
    text = GENERATED.get(page) or page.read_text(encoding="utf-8")
    whole = next((mark for mark in MARK.finditer(text) if mark["page"]), None)
    mark: re.Match[str] | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in {"fence", "code_block"} and token.map is not None:
            language = token.info.strip() or _guess(token.content)
            if language in SHELL | PYTHON or SAVED.match(token.content):
                at = mark or whole
                yield Block(str(page.relative_to(ROOT)), token.map[0] + 1, language, token.content, at)
        match = MARK.search(token.content) if token.type == "html_block" else None
        mark = match if match is not None and not match["page"] else None


def _guess(text: str) -> str:
    """The language of a block that has none written: that of an indented one, mostly."""
    first = text.lstrip().split("\n")[0]
    return "sh" if COMMAND.match(first) else "python" if STATEMENT.match(first) else ""


ALL = [block for page in PAGES for block in blocks(page)]
UNMARKED = sorted({block.page for block in ALL if block.mark is None})


def test_the_pages_have_blocks_of_all_kinds() -> None:
    """A reader of Markdown that finds nothing would pass everything."""
    assert len(ALL) > 60
    assert sum(block.mark is not None and block.mark["by"] is not None for block in ALL) > 20
    assert {"docs/reliability.md", "docs/python-api.md"} <= set(UNMARKED)


def test_a_test_that_is_named_as_running_a_block_exists_and_reads_its_page() -> None:
    for block in ALL:
        if block.mark is not None and block.mark["by"] is not None:
            file, name = ROOT / block.mark["by"], Path(block.page).name
            assert file.is_file(), f"{block.page}:{block.line}: there is no {block.mark['by']}"
            text = file.read_text(encoding="utf-8")
            generated = Path(block.page).parent.name == "notebooks" and "notebooks" in text
            assert name in text or generated, f"{block.page}:{block.line}: {file.name} does not read {name}"


@pytest.mark.parametrize("page", sorted({block.page for block in ALL}))
def test_commands_and_options_exist(page: str) -> None:
    """Also of blocks that are not run: they are what grows old unseen."""
    for block in ALL:
        if block.page == page and block.language in SHELL:
            for line in block.commands:
                words = re.search(r"(?:^|\s|/)fedsim (?=[a-z])(?P<rest>.*)", line)
                if words is not None:
                    _check(shlex.split(words["rest"], comments=True), f"{page}:{block.line}: {line.strip()}")


def _check(words: list[str], where: str) -> None:
    command: click.Command = main
    while isinstance(command, click.Group):
        assert words and words[0] in command.commands, where
        command, words = command.commands[words[0]], words[1:]
    end = next((n for n, word in enumerate(words) if word in {"|", "&&", "||", ";", ">", "--"}), len(words))
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
    assert {word.partition("=")[0] for word in words[:end] if word.startswith("--")} <= known, where


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("page", UNMARKED)
def test_blocks_without_a_mark_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    for block in (block for block in ALL if block.page == page and block.mark is None):
        where = f"{page}:{block.line}"
        if block.saved is not None:
            (tmp_path / block.saved[1]).write_text(block.text, encoding="utf-8")
        elif block.language in PYTHON:
            done = subprocess.run(
                [sys.executable, "-c", block.text],
                capture_output=True,
                text=True,
                timeout=DEADLINE,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            assert done.returncode == 0, (where, done.stderr)
        else:
            for line in block.commands:
                name, *words = shlex.split(line, comments=True)
                assert name == "fedsim", f"{where}: only fedsim's commands are run here; mark the block"
                short = ["--rounds", "1"] if words[0] == "launch" and "--rounds" not in words else []
                result = CliRunner(catch_exceptions=False).invoke(main, words + short)
                assert result.exit_code == 0, (where, line, result.output)


def test_a_mark_holds_for_its_block_alone_and_a_pages_for_all(tmp_path: Path) -> None:
    page = ROOT / "docs" / "made.md"
    marked = "# T\n\n<!-- not run: no\nreason -->\n```sh\nfedsim runs\n```\n"
    text = f"{marked}\n    fedsim watch RUN\n\nA drawing:\n\n    a -> b\n"

    def read(text: str) -> list[tuple[str, str | None]]:
        (tmp_path / "made.md").write_text(text, encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{__name__}.ROOT", tmp_path)
            match = list(blocks(tmp_path / page.name))
        return [(b.text.strip(), b.mark["why"] if b.mark else None) for b in match]

    assert read(text) == [("fedsim runs", "no\nreason"), ("fedsim watch RUN", None)]
    assert read(text + "\n<!-- this page: not run: why -->\n")[1] == ("fedsim watch RUN", "why")


def test_the_code_beside_the_paper_in_the_readme_is_in_the_file() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Code that reads like the paper")[2].partition("\n## ")[0]
    file = re.search(r"\]\((protocols/\w+\.py)\) on the\s+right", section)
    assert file is not None
    code = "".join((ROOT / file[1]).read_text(encoding="utf-8").split()).replace(",)", ")")
    lines = section.partition("```\n")[2].partition("```")[0].splitlines()
    right = [line[59:] for line in lines]
    assert len(right) >= 5 and all(right)
    for line in right:
        parts = ["".join(part.split()) for part in line.split("...")]
        assert re.search(".{,400}?".join(map(re.escape, parts)), code), line
