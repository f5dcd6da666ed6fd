"""The commit of the source in manifest.json and sweep.json."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fedsim
from launch.runs import source_commit
from launch.runs.source_commit import ROOT, UNKNOWN, commit, look_up
from tests.support.commands import ran


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = ran(["git", *identity, *arguments], cwd=folder, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_it_is_the_commit_with_a_sign_if_files_were_changed(repository: Path) -> None:
    first = git(repository, "rev-parse", "--short=9", "HEAD")
    git(repository, "tag", "v1")  # a tag does not take the place of the commit
    assert commit(repository) == first
    (repository / "file").write_text("two")
    assert commit(repository) == first  # looked up once
    source_commit._started.cache_clear()
    source_commit.commit.cache_clear()
    look_up(repository)
    assert commit(repository) == f"{first}+"


def test_the_repository_of_somebody_else_does_not_count(repository: Path) -> None:
    """Packages that are installed into an environment inside of another project."""
    installed = repository / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    assert commit(installed) == UNKNOWN


def test_without_git_it_is_unknown(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    assert commit(repository / ".") == commit(repository) == UNKNOWN


def test_the_manifest_has_it(tmp_path: Path) -> None:
    run = fedsim.run(algo="fedavg", clients=2, rounds=1, model="logistic", quiet=True, out=tmp_path / "run")
    assert run.manifest["commit"] == commit()
    assert (commit() == UNKNOWN) == (not os.path.exists(ROOT / ".git"))
    fedsim.resume(run, rounds=2, quiet=True)
    assert fedsim.open(run.path).manifest["resumes"][0]["commit"] == commit()
