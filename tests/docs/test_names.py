"""Names of hyperparameters and of modules on the pages are names that exist."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from launch.configuration.names import names
from tests.support.pages import reference

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {p.name: p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
TEXTS["reference.md"] = reference()
PLACEHOLDERS = {"key", "KEY"}
SILENT = re.compile(r"with `--set silent=last` ((?:\w+,\s+)*\w+)\)")
DOTTED = re.compile(r"`((?:launch|workers|protocols|fedsim)(?:\.[A-Za-z_]\w*)+)")


def unknown_settings(text: str) -> list[str]:
    """The `--set NAME=` that the command's algorithm, or every algorithm, lacks."""
    algorithms = {name: set(entry.hyperparameters) for name, entry in names("algorithms").items()}
    wrong = []
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.findall(r"--set [^`\n]*|fedsim [^`\n]*", line):
            algo = re.search(r"--algo (\S+)", command)
            if algo is not None and ".py" in algo[1]:
                continue  # the user's own file
            known = algorithms[algo[1]] if algo is not None else set().union(*algorithms.values())
            matches = set(re.findall(r"--set ([\w.]+)=", command)) - PLACEHOLDERS
            wrong += sorted(matches - known)
    return wrong


def exists(dotted: str) -> bool:
    """Say whether a dotted name is a module, or a name at the top of one, or of a class there."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            spec = find_spec(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        if spec is None or spec.origin is None:
            continue
        left = parts[end:]
        file = Path(spec.origin)
        stub = file.with_suffix(".pyi")  # names that are imported when they are used
        text = (stub if stub.is_file() else file).read_text(encoding="utf-8")
        return not left or left[0] in {
            word
            for node in ast.walk(ast.parse(text))
            for word in (
                getattr(node, "name", None),
                getattr(node, "asname", None),
                getattr(node, "id", None),
                getattr(node, "value", None) if isinstance(node, ast.Constant) else None,
            )
        }
    return False


def test_every_hyperparameter_that_a_page_sets_exists() -> None:
    wrong = {page: unknown_settings(text) for page, text in TEXTS.items()}
    assert {page: matches for page, matches in wrong.items() if matches} == {}
    assert unknown_settings("fedsim launch --algo bregman_admm --set silent=last --set rho=1") == ["silent"]
    assert unknown_settings("a `--set sillent=last` b") == ["sillent"]


def test_the_page_on_asynchronous_rounds_names_members_with_the_option_silent() -> None:
    text = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    listed = SILENT.search(text)
    assert listed is not None
    having = {name for name, entry in names("algorithms").items() if "silent" in entry.hyperparameters}
    assert set(re.split(r",\s+", listed[1])) == having


def test_every_dotted_name_of_a_page_exists() -> None:
    texts = TEXTS | {"api.py": (ROOT / "launch/api.py").read_text(encoding="utf-8")}
    matches = [(page, name) for page, text in texts.items() for name in DOTTED.findall(text)]
    assert len(matches) > 20
    assert [(page, name) for page, name in matches if not exists(name)] == []
    assert not exists("launch.execution.Execution") and not exists("launch.configuration.config.Executoin")
    assert exists("launch.configuration.execution.Execution")
