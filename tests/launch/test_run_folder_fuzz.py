"""Mutated run folders: whatever a file of a run has, a command says it in one line or does its work.

FEDSIM_FUZZ is the number of mutations of each file of each run, and FEDSIM_FUZZ_SEED the first seed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from click.testing import CliRunner

import fedsim
from fedsim.errors import FedsimError, Interrupted
from fedsim.printable import printable
from launch.cli import main
from launch.commands import watch
from launch.runs.folder import RunFolder
from tests.support.kept_runs import LINK, files, kept_run
from tests.support.snapshots import at
from workers.storage.journal import read_journal

COUNT = int(os.environ.get("FEDSIM_FUZZ", "1"))
FIRST = int(os.environ.get("FEDSIM_FUZZ_SEED", "0"))
SLOWEST = 20
CODES = {0, 1, 2, 3, 4, 5, 130, 137}
SECRET = "content-of-a-file-elsewhere"
FILES = (
    *("manifest.json", "summary.json", "processes.json", "metrics.jsonl", "ledger.csv", "timeline.csv"),
    *("journal", "lock", "model.safetensors", "checkpoints/*", "state/*/*", "logs"),
)
HOSTILE = (
    *('"x"', '""', "NaN", "Infinity", "-Infinity", "-1", "0", "0.5", "1e400", "-1e308", "[]", "{}", "[1]"),
    *("null", "true", "9" * 400, "9" * 5000, "1" + "0" * 17, "-1" + "0" * 17, "[" * 100_000, "[[[1]]]"),
    *('"\\u001b[2J\\u0007\\n|`<script>alert(1)</script>$\\\\frac{\\u202e"', '"\\ud800"', '"\\u0000"'),
    *('{"x": "y"}', '["x", null, {}]', '"' + "x" * 100_000 + '"', "[" * 20 + "]" * 20, '"../../elsewhere"'),
    *("1000000", "[NaN]"),
)
CELLS = (
    "",
    "x",
    "-1",
    "nan",
    "inf",
    "1e400",
    "9" * 400,
    "9" * 5000,
    "1e17",
    "999999999999999999",
    '"',
    "\x1b[2J\x07",
)


@pytest.fixture(scope="module", params=["done", "interrupted"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    coded = {"codecs": {"up.mean": "sigma:0.05+dither", "up.precision": "ratio:0.25"}}
    if request.param == "done":
        return kept_run(run, algo="fedlap_cov", rounds=2, **coded, **LINK)

    def stop() -> None:
        raise Interrupted("seen")

    with at("committed", 2, stop), pytest.raises(Interrupted):
        kept_run(run, algo="fedlap_cov", rounds=3, participation="0.7")
    return run


# ---- mutations


def mutate(path: Path, away: Path, draw: random.Random) -> None:
    """Change a file as somebody could do it."""
    structured = {".json": _json, ".jsonl": _lines, ".csv": _cells}.get(path.suffix, _bytes)
    if path.name == "journal":
        structured = _records
    if not path.exists():  # an interrupted run has no model
        path.write_bytes(draw.randbytes(99))
    if path.is_file() and draw.random() < 0.7:
        return structured(path, draw)
    draw.choice((_bytes, _cut, _replaced, _sparse, _forbidden))(
        path, draw, away
    ) if path.is_file() else _replaced(path, draw, away)
    return None


def _bytes(path: Path, draw: random.Random, *_: Path) -> None:
    data = bytearray(path.read_bytes() or b"x")
    for _ in range(draw.choice((1, 3, 30))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)


def _cut(path: Path, draw: random.Random, *_: Path) -> None:
    data = path.read_bytes()
    at = draw.randrange(len(data) + 1)
    path.write_bytes(
        draw.choice((b"", data[:at], data[at:], data + data, data + b"\0" * 99, data.replace(b"\n", b"")))
    )


def _replaced(path: Path, draw: random.Random, away: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    kind = draw.choice(("link", "zero", "loop", "pipe", "folder", "nothing", "folder link"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "nothing":
        targets = {"link": away / "secret", "zero": "/dev/zero", "loop": path, "folder link": away}
        path.symlink_to(targets[kind])


def _sparse(path: Path, draw: random.Random, *_: Path) -> None:
    os.truncate(path, draw.choice((1 << 40, 1 << 27)))


def _forbidden(path: Path, draw: random.Random, *_: Path) -> None:
    path.chmod(0)


def _json(path: Path, draw: random.Random) -> None:
    path.write_text(_changed(json.loads(path.read_text()), draw))
    if draw.random() < 0.8:
        _unsign(path.parent)


def _lines(path: Path, draw: random.Random) -> None:
    lines = path.read_text().splitlines()
    n = draw.randrange(len(lines))
    lines[n] = _changed(json.loads(lines[n]), draw)
    path.write_text("\n".join([*lines, ""]))
    _unsign(path.parent)


def _cells(path: Path, draw: random.Random) -> None:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for _ in range(draw.choice((1, 1, 5))):
        row = draw.choice(rows[draw.choice((0, 1, 1, 1)) :])
        row[draw.randrange(len(row))] = draw.choice(CELLS)
    path.write_text("\n".join([*map(",".join, rows), ""]))
    _unsign(path.parent)


def _records(path: Path, draw: random.Random) -> None:
    """Change a record of the journal, with the right checksum."""
    records, out = read_journal(path), b""
    n = draw.randrange(len(records))
    for place, record in enumerate(records):
        if place == n:
            text = _changed(record, draw).replace("9" * 400, "7")
            try:
                payload = msgspec.msgpack.encode(json.loads(text))
            except (ValueError, RecursionError, OverflowError):
                payload = b"\x91" * 100_000
        else:
            payload = msgspec.msgpack.encode(record)
        out += struct.pack(">IQ", len(payload), xxhash.xxh3_64_intdigest(payload)) + payload
    path.write_bytes(out)
    _unsign(path.parent)


def _changed(value: Any, draw: random.Random) -> str:
    """Return JSON in which one value, or all of a name, is hostile or missing."""
    mark = "@hostile@"
    places: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        pairs = [(v, k) for v in level for k in (v if isinstance(v, dict) else range(len(v)))]
        places += pairs
        level = [v[k] for v, k in pairs if isinstance(v[k], dict | list)]
    holder, key = draw.choice(places)
    if draw.random() < 0.15:
        del holder[key]
    elif draw.random() < 0.1 and isinstance(holder, dict):
        holder[mark] = holder.pop(key)
    else:
        holder[key] = mark
    text = draw.choice(HOSTILE)
    return json.dumps(value).replace(f'"{mark}":', '"\\u001b\\u0007$x_\\n":').replace(f'"{mark}"', text)


def _unsign(run: Path) -> None:
    """Remove the digests that would show the change, as the one who has made it would."""
    for name, key in (
        ("manifest.json", "experiment_sha256"),
        ("summary.json", "experiment_sha256"),
        ("summary.json", "files"),
    ):
        try:
            content = json.loads((run / name).read_text())
            content.pop(key, None)
            (run / name).write_text(json.dumps(content))
        except (OSError, ValueError, RecursionError, AttributeError):
            pass
    if not (run / "model.safetensors").exists():
        shutil.rmtree(run / "checkpoints", ignore_errors=True)


# ---- what reads them


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command(*words: object) -> str:
    """Call a command; check that its error is one line without control characters, and return its output."""
    with deadline(SLOWEST):
        done = CliRunner().invoke(main, list(map(str, words)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in CODES and "Traceback" not in done.output, done.output
    assert printable(done.output) == done.output
    assert SECRET not in done.output
    if done.exit_code and words[0] != "watch":
        errors = [line for line in done.stderr.splitlines() if line.startswith("fedsim: ")]
        assert len(errors) == 1, done.output
    return done.output


def opened(run: Path) -> None:
    with deadline(SLOWEST):
        for read in (
            lambda r: (r.status, r.label, r.params, r.clients, r.drift, r.starts, r._repr_html_()),
            lambda r: (r.metrics, r.curve["MB"], r.commits, r.processes, r.not_recorded),
            lambda r: r.ledger,
            lambda r: r.to_experiment(),
        ):
            with suppress(FedsimError):
                read(fedsim.open(run))


READERS: dict[str, Callable[[Path, Path], object]] = {
    "open": lambda run, page: opened(run),
    "report": lambda run, page: command("report", run),
    "card": lambda run, page: command("card", run),
    "trace": lambda run, page: command("trace", run),
    "ledger": lambda run, page: (command("ledger", run), command("ledger", run, "--by", "client", "--json")),
    "compare": lambda run, page: command(
        *("compare", run, run.parent / "good", "--out", page, "--markdown", page.with_suffix(".md")),
        *("--csv", page.with_suffix(".csv")),
    ),
    "watch": lambda run, page: command("watch", run, "--interval", "0.05"),
    "verify": lambda run, page: command("verify", run),
    "resume": lambda run, page: command(
        "resume", run, "--quiet", "--rounds", 4
    ),  # not the manifest's million
}
OFTEN = {"open": 3, "report": 3, "card": 3, "ledger": 2, "trace": 2, "compare": 2}


def check(whole: Path, name: str, seed: int, folder: Path) -> str:
    """Mutate a file and read the folder; return what failed, or ''."""
    draw = random.Random(f"{whole.name} {name} {seed}")
    parent, away = folder / "parent", folder / "away"
    away.mkdir(parents=True)
    (away / "secret").write_text(SECRET)
    run, good = (Path(shutil.copytree(whole, parent / n)) for n in ("bad", "good"))
    path = draw.choice(
        [*sorted(run.glob(name)), run / name.partition("/")[0]] if "*" in name else [run / name]
    )
    done = "mutation"
    try:
        mutate(path, away, draw)
        before = files(away), files(good)
        done = "runs"
        command("runs", parent)
        assert str(good) in command("runs", parent, "--json")
        names = random.Random(seed).sample(
            sorted(READERS), k=3, counts=[OFTEN.get(n, 1) for n in sorted(READERS)]
        )
        for done in sorted(set(names), key=list(READERS).index):
            READERS[done](run, folder / "pages.html")
            assert (files(away), files(good)) == before
        pages = [*run.glob("*.html"), *run.glob("card.md"), *folder.glob("pages.*")]
        for page in pages if not path.is_symlink() else ():
            text = page.read_text()
            assert SECRET not in text and printable(text) == text, page
    except (Exception, KeyboardInterrupt) as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        text = f"{type(e).__name__}: {str(e)[-300:]} [{where.filename}:{where.lineno}]"
        return f"seed {seed} {name}: {done}: {text}"
    finally:
        for place in (run, *run.rglob("*")):
            if place.is_dir() and not place.is_symlink():
                place.chmod(0o755)
        shutil.rmtree(folder)
    return ""


@pytest.mark.filterwarnings("ignore::UserWarning")  # matplotlib's, of glyphs and of space
@pytest.mark.parametrize("name", FILES)
def test_a_mutated_file_is_an_error_of_one_line_or_harmless(
    name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "GRACE", 0.0)
    monkeypatch.setattr(RunFolder, "_elsewhere", lambda run: False)
    monkeypatch.chdir(tmp_path)
    failed = [text for n in range(FIRST, FIRST + COUNT) if (text := check(whole, name, n, tmp_path / str(n)))]
    assert not failed, "\n".join([f"{len(failed)} of {COUNT}", *failed])
