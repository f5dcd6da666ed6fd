"""A module of the user's with the name of one of fedsim's packages is named, with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedsim.hidden_packages import refuse_hidden_packages
from tests.support.commands import ran

HIDING = ("launch.py", "workers.py", "protocols/__init__.py", "workers/__init__.py")


def _ran(folder: Path, program: str) -> str:
    """The last line that a program of this folder prints."""
    (folder / "script.py").write_text(program)
    done = ran([sys.executable, folder / "script.py"])
    return (done.stdout + done.stderr).splitlines()[-1]


@pytest.mark.parametrize("name", HIDING)
def test_it_is_named_when_fedsim_is_imported(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("import fedsim\n")
    last = _ran(tmp_path, "import fedsim\n")
    assert f"HiddenPackageError: {tmp_path / name} hides fedsim's package" in last
    assert "rename this file" in last


def test_it_is_named_if_it_was_imported_before(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text("")
    assert "workers.py hides" in _ran(tmp_path, "import workers\nimport fedsim\n")


def test_it_is_named_if_the_path_changes_later(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "launch.py").write_text("")
    program = f"import sys, fedsim\nsys.path.insert(0, {str(tmp_path / 'later')!r})\nfedsim.run()\n"
    assert "launch.py hides" in _ran(tmp_path, program)


def test_a_folder_without_init_is_named_or_hides_nothing(tmp_path: Path) -> None:
    """Python prefers a package anywhere in sys.path, but not the packages of an editable installation."""
    (tmp_path / "protocols").mkdir()
    last = _ran(tmp_path, "import fedsim, protocols\nprint(len(protocols.__path__))\n")
    assert last == "1" or ("protocols hides fedsim's package" in last and "rename this folder" in last)


@pytest.mark.parametrize("name", ["launch", "workers"])
def test_the_command_says_it_in_a_line(name: str, tmp_path: Path) -> None:
    """The folder may also come from PYTHONPATH."""
    (tmp_path / f"{name}.py").write_text("")
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom fedsim.__main__ import run\nrun()\n"
    assert f"{name}.py hides fedsim's package" in _ran(tmp_path, program)


def test_it_is_an_error_of_fedsim_and_of_import() -> None:
    refuse_hidden_packages()
    from fedsim.errors import UsageError
    from fedsim.hidden_packages import HiddenPackageError

    assert issubclass(HiddenPackageError, UsageError)
    assert issubclass(HiddenPackageError, ImportError)
