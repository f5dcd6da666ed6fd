"""The project's verbs: `nox -s fast`, or several, `nox -s lint types fast`. `nox -l` lists them.

Every session uses the environment that nox runs in and installs nothing, so it works without a network.
`test`, `fast` and `golden` hand on what follows two dashes: `nox -s test -- tests/fedsim -k gaussian`.
"""

import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "fast"]


def python(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, *arguments, external=True)


@nox.session
def test(session: nox.Session) -> None:
    """Run every test."""
    python(session, "-m", "pytest", "-n", "2", "--dist", "loadscope", *session.posargs)


@nox.session
def fast(session: nox.Session) -> None:
    """Run the tests that start no process and take no long time."""
    chosen = "not process and not chaos and not slow"
    python(session, "-m", "pytest", "-m", chosen, "-n", "auto", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure which lines the tests of README's command execute; fails below the floor of pyproject.toml.

    The figure is the last line, each file is in build/coverage/html (extra `coverage`).
    """
    Path("build/coverage").mkdir(parents=True, exist_ok=True)
    python(session, "-m", "coverage", "erase")
    # under `ulimit -f` a process cannot write its own measurements either
    names = "not full_disk and not disk_that_is_full"
    tests = ("-n", "2", "--dist", "loadscope", "-m", "not long", "-k", names)
    python(session, "-m", "coverage", "run", "-m", "pytest", *tests, *session.posargs)
    python(session, "-m", "coverage", "combine", "--quiet")
    python(session, "-m", "coverage", "html", "--quiet", "--fail-under=0")
    python(session, "-m", "coverage", "report", "--skip-covered")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and the ladder of imports."""
    python(session, "-m", "ruff", "check")
    python(session, "-m", "ruff", "format", "--check")
    python(session, "-c", "from importlinter.cli import lint_imports_command as check; check()")


@nox.session
def types(session: nox.Session) -> None:
    """Check types."""
    python(session, "-m", "mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into build/site. Every warning is an error."""
    python(session, "-m", "mkdocs", "build", "--strict")


@nox.session
def golden(session: nox.Session) -> None:
    """Compare the bits of short runs with the recorded ones."""
    python(session, "-m", "tests.golden", *session.posargs)


@nox.session
def notebooks(session: nox.Session) -> None:
    """Carry docs/notebooks out in Jupyter kernels, into build/notebooks (extra `notebooks`)."""
    files = sorted(map(str, Path("docs/notebooks").glob("*.py")))
    out = Path("build/notebooks")
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        python(session, "-m", "jupytext", "--to", "ipynb", "--output", f"{out / Path(file).stem}.ipynb", file)
    ours = ("-o", "addopts=", "-o", "filterwarnings=default")  # Jupyter's packages warn
    python(session, "-m", "pytest", *ours, "--nbmake", "--nbmake-timeout=300", "--overwrite", str(out))


@nox.session
def release(session: nox.Session) -> None:
    """Build sdist and wheel into dist/ and check them; nothing is uploaded (extra `release`)."""
    python(session, "-m", "tests.release", *session.posargs)


@nox.session
def sbom(session: nox.Session) -> None:
    """Write dist/sbom.json: what is installed here, as CycloneDX (extra `release`)."""
    Path("dist").mkdir(exist_ok=True)
    how = ("--pyproject", "pyproject.toml", "--output-reproducible", "--output-file", "dist/sbom.json")
    python(session, "-m", "cyclonedx_py", "environment", *how, sys.executable)


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark at its smallest size, to see that it still runs."""
    folder = Path("tests/benchmarks")
    names = {f.stem for f in folder.glob("[!_]*.py") if "__main__" in f.read_text(encoding="utf-8")}
    for name in sorted(names | {f.parent.name for f in folder.glob("*/__main__.py")}):
        python(session, "-m", f"tests.benchmarks.{name}", "--tiny")
