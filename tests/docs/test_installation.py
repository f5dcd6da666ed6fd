"""What the texts say about installing is right: on the package index, `fedsim` is a stranger's package."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from setuptools import Distribution

import fedsim
from launch.cli import main

ROOT = Path(__file__).resolve().parents[2]
NAME = "fedsim-wire"
PACKAGES = ("fedsim", "protocols", "workers", "launch")


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_distribution_has_a_name_of_its_own_and_the_packages_keep_theirs(
    setup: configparser.ConfigParser,
) -> None:
    assert setup["metadata"]["name"] == NAME
    assert setup["options.packages.find"]["include"].split()[0] == "fedsim"
    assert f"{NAME}[ci,docs]" in setup["options.extras_require"]["dev"].split()


def test_the_wheel_has_every_file_of_the_four_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    build = Distribution({"script_name": "setup.py", "include_package_data": False})
    build.parse_config_files()
    command = build.get_command_obj("build_py")
    command.ensure_finalized()
    built = {str(Path(file).relative_to(command.build_lib)) for file in command.get_outputs(False)}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
        capture_output=True,
        text=True,
        check=True,
    )
    tree = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert built == tree
    assert {
        "workers/worker/runtime.py",
        "launch/configuration/names.json",
        "launch/results/page.html",
    } <= built


def test_the_version_is_read_without_the_distributions_name() -> None:
    result = CliRunner(catch_exceptions=False).invoke(main, ["--version"])
    assert result.stdout == f"fedsim {fedsim.__version__}\n"


def test_no_text_says_to_install_from_the_index_what_is_not_ours() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    command = re.compile(r"pip3? install\s+[^\n`;&]*?(?<![\w./-])fedsim(?!-wire)\b")
    assert command.search("pip install 'fedsim[tff]'") and command.search("pip install -U fedsim")
    bad = [
        f"{name}: {match[0]}"
        for name in listed.stdout.splitlines()
        if name.endswith((".py", ".md", ".cfg", ".yml", ".toml")) and (ROOT / name) != Path(__file__)
        for match in command.finditer((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert bad == []
