"""A release is refused while names, addresses or versions are missing; workflows name actions by commit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import release

ROOT = Path(__file__).resolve().parents[1]
ACTION = re.compile(r"^\s*(?:- )?uses: (?P<action>.*)$", re.MULTILINE)
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
FILES = (*release.OWNED, "CHANGELOG.md", "fedsim/version.py")


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A copy of the files, as the owner would leave them for version 9.8.7."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = (
            (ROOT / name)
            .read_text(encoding="utf-8")
            .replace(release.PRIVATE, "Topic :: Scientific/Engineering")
        )
        text = re.sub(r"(__version__ = \"|^version: )[\d.]+", r"\g<1>9.8.7", text, flags=re.MULTILINE)
        (tmp_path / name).write_text(release.PLACEHOLDER.sub("ada@uni.edu", text))
    for name, line in (("CHANGELOG.md", "## [9.8.7]"), ("README.md", f"![ci](https://{release.BADGE})")):
        (tmp_path / name).write_text(f"{(tmp_path / name).read_text()}\n{line}\n")
    return tmp_path


def test_a_tree_without_placeholders_and_with_equal_versions_is_ready(ready: Path) -> None:
    assert release.undone(ready, "v9.8.7") == []


@pytest.mark.parametrize("name", release.OWNED)
def test_a_placeholder_in_any_file_is_named_with_its_line(name: str, ready: Path) -> None:
    with (ready / name).open("a") as file:
        file.write("# maintainers@example.org\n")
    lines = len((ready / name).read_text().splitlines())
    assert release.undone(ready, "v9.8.7") == [f"{name}:{lines} has a placeholder"]


@pytest.mark.parametrize("name", ["fedsim/version.py", "CITATION.cff", "CHANGELOG.md"])
def test_a_file_of_another_version_is_named(name: str, ready: Path) -> None:
    (ready / name).write_text((ready / name).read_text().replace("9.8.7", "9.8.6"))
    (line,) = release.undone(ready, "v9.8.7")
    assert line.startswith(f"{name} has no line")


def test_the_classifier_and_missing_badges_are_named(ready: Path) -> None:
    shutil.copy(ROOT / "README.md", ready)
    with (ready / "setup.cfg").open("a") as file:
        file.write(f"# {release.PRIVATE}\n")
    lines = release.undone(ready, "v9.8.7")
    assert any(release.PRIVATE in line for line in lines)
    assert release.BADGE in (ROOT / "README.md").read_text() or "README.md has no badges" in lines


def test_a_release_of_placeholders_ends_with_one_line_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        release, "PLACEHOLDER", re.compile("fedsim")
    )  # also once the owner has filled them in
    monkeypatch.setattr(release, "run", lambda *command, **options: pytest.fail(f"ran {command}"))
    with pytest.raises(SystemExit) as raised:
        release.main(["--tag", "v0.1.0", "--out", str(tmp_path / "dist")])
    assert re.fullmatch(
        r"release: v0\.1\.0 is not ready \(docs/release\.md\): .*setup\.cfg:\d+ .*", str(raised.value)
    )
    assert not (tmp_path / "dist").exists()


def test_workflows_name_each_action_by_a_commit_and_its_version() -> None:
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    actions = {f"{file.name}: {m['action']}" for file in files for m in ACTION.finditer(file.read_text())}
    assert {action.split(":")[0] for action in actions} == {file.name for file in files}
    assert [action for action in sorted(actions) if not PINNED.fullmatch(action.split(": ")[1])] == []
