"""Builds what a release would have, and checks it; uploads nothing.

    python -m tests.release --out DIR      sdist, wheel, and what is checked of them, in about a minute
    python -m tests.release --tag v0.1.0   the same for a release: refused while docs/release.md is not done

1. The tracked files are copied to two folders. The first gives an sdist and from it a wheel, the second a
   wheel at another time, in another time zone, language and order of hashes. Both wheels must be equal byte
   for byte: the build is reproducible, and the sdist is complete. Modes of files follow the umask, so both
   builds have 022, and whoever builds without this script must set it, too.
2. The wheel is installed into a new environment. README's main job and the other COMMANDS, which read
   every kind of file that the wheel has, run from it in an empty folder. The dependencies are those of the
   environment that runs this: it takes no download.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {"fedsim", "protocols", "workers", "launch"}
JOB = "launch --workers 10 --algo fedlap_cov --rounds 2 --out runs/main"
SMALL = "--model logistic --set local.epochs=1 --clients 4 --rounds 2"
COMMANDS = (
    JOB,
    f"launch {SMALL} --workers 2 --tree 2x2 --out runs/tree",
    f"launch {SMALL} --workers 2 --async fedbuff:2 --compute 1ms --out runs/async",
    "list presets",
    "describe ivon_admm",
    "ledger runs/tree",
    "report runs/tree --out report.html",
    "compare runs/tree runs/async --out comparison.html",
    f"sweep {SMALL} --over algo=fedavg,fedlap --seeds 0 --runs runs/sweep --jobs 1",
    "resume runs/tree --rounds 3",
    "verify runs/tree",
    "runs runs",
)
"""What is run from the wheel, one after the other."""
PLACEHOLDER = re.compile(r"\bOWNER\b|@example\.org|The fedsim maintainers")
OWNED = ("setup.cfg", "CITATION.cff", "CODE_OF_CONDUCT.md", "SUPPORT.md", "README.md")
"""Files with names and addresses that only the owner knows."""
PRIVATE = "Private :: Do Not Upload"
BADGE = "actions/workflows/ci.yml/badge.svg"


def undone(root: Path, tag: str) -> list[str]:
    """The reasons why the tree at `root` cannot be released as `tag`, empty if there are none.

    Placeholders by file and line, versions that differ, the classifier that the index refuses, and a README
    without badges.
    """
    texts = {
        name: (root / name).read_text(encoding="utf-8")
        for name in (*OWNED, "CHANGELOG.md", "fedsim/version.py")
    }
    result = [
        f"{name}:{number} has a placeholder"
        for name in OWNED
        for number, line in enumerate(texts[name].splitlines(), start=1)
        if PLACEHOLDER.search(line)
    ]
    version = tag.removeprefix("v")
    for name, line in (
        ("fedsim/version.py", f'__version__ = "{version}"'),
        ("CITATION.cff", f"version: {version}"),
        ("CHANGELOG.md", f"## [{version}]"),
    ):
        if not any(text.startswith(line) for text in texts[name].splitlines()):
            result.append(f"{name} has no line {line!r}")
    if PRIVATE in texts["setup.cfg"]:
        result.append(f"setup.cfg has the classifier {PRIVATE!r}")
    if BADGE not in texts["README.md"]:
        result.append("README.md has no badges")
    return result


def run(*command: str | Path, **options: object) -> str:
    """The standard output of a command; its output is shown and the script ends if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"release: {' '.join(map(str, command))} failed with exit code {done.returncode}")
    return str(done.stdout)


def commit_time() -> str:
    """Seconds of the last commit: the time of every file in what is built."""
    return run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()


def copy(to: Path) -> Path:
    """The tracked files as they are in the working tree."""
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes((ROOT / name).read_bytes())
            (to / name).chmod(0o644)
    return to


def build(source: Path, out: Path, *which: str, **surroundings: str) -> Path:
    """Build what is said, or an sdist and a wheel from it; returns the wheel."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": commit_time()} | surroundings
    run(sys.executable, "-m", "build", *which, "--outdir", out, source, env=environment, umask=0o022)
    (wheel,) = out.glob("*.whl")
    return wheel


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def differences(one: Path, other: Path) -> list[str]:
    """The entries of two wheels that differ in name, contents, time or mode."""
    entries = []
    for file in (one, other):
        with zipfile.ZipFile(file) as wheel:
            entries.append({i.filename: (i.CRC, i.date_time, i.external_attr) for i in wheel.infolist()})
    return sorted(
        name for name in entries[0].keys() | entries[1].keys() if entries[0].get(name) != entries[1].get(name)
    )


def top_level(wheel: Path) -> set[str]:
    """The folders that a wheel puts beside other people's packages."""
    with zipfile.ZipFile(wheel) as file:
        return {name.split("/")[0] for name in file.namelist() if ".dist-info/" not in name}


def installed(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel; it sees the dependencies of this one, and no editable install."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    )
    return folder / "bin"


def commands(binaries: Path, folder: Path) -> str:
    """Run COMMANDS from the installed wheel in a new folder; returns the line of the main job's end."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    folder.mkdir()
    shown = f"import {', '.join(sorted(TOP_LEVEL))}\nfor p in ({', '.join(TOP_LEVEL)}): print(p.__file__)"
    for file in run(binaries / "python", "-c", shown, cwd=folder, env=environment).split():
        if not Path(file).is_relative_to(binaries.parent):
            raise SystemExit(f"release: {file} was imported, and not the wheel's")
    outputs = {
        line: run(binaries / "fedsim", *line.split(), cwd=folder, env=environment) for line in COMMANDS
    }
    return next(line for line in outputs[JOB].splitlines() if line.startswith("done after"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of sdist and wheel")
    parser.add_argument("--tag", help="the tag of a release, v0.1.0; without it nothing is released")
    arguments = parser.parse_args(argv)
    out = arguments.out.resolve()
    if arguments.tag and (missing := undone(ROOT, arguments.tag)):
        raise SystemExit(f"release: {arguments.tag} is not ready (docs/release.md): {'; '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="fedsim-release-") as name:
        folder = Path(name)
        first = build(copy(folder / "a"), folder / "first")
        other = {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "PYTHONHASHSEED": "1"}
        second = build(copy(folder / "b" / "deeper"), folder / "second", "--wheel", **other)
        if digest(first) != digest(second):
            raise SystemExit(f"release: two builds differ: {differences(first, second)[:10]}")
        if top_level(first) != TOP_LEVEL:
            raise SystemExit(f"release: the wheel has {sorted(top_level(first))}")
        done = commands(installed(first, folder / "venv"), folder / "job")
        out.mkdir(parents=True, exist_ok=True)
        for file in (first, *(folder / "first").glob("*.tar.gz")):
            (out / file.name).write_bytes(file.read_bytes())
            print(digest(file), file.name, f"{file.stat().st_size:,} bytes")
    print(f"two builds, one digest; {len(COMMANDS)} commands of the wheel in a new environment: {done}")


if __name__ == "__main__":
    main()
