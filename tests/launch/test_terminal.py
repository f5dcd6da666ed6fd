"""What a terminal, a pipe, a full disk and a closed file get to see; what does not fit is left out."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.text import Text

from launch.cli import main
from launch.numbers import counted, duration, percentage, size
from launch.progress_display import ProgressLine, fitted, progress_parts
from launch.session.display import Display
from launch.table import Table
from launch.terminal import console
from tests.support.commands import DEADLINE, ran

ROOT = Path(__file__).resolve().parents[2]
JOB = "launch launch --clients 2 --rounds 6 --model logistic --set local.epochs=1"
METRICS = {
    "round": 12,
    "test_accuracy": 0.93521,
    "test_nll": 0.2913,
    "bytes_down": 603_020,
    "bytes_up": 603_650,
    "seconds": 0.042,
}


def _shell(script: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, with `fedsim` for the command."""
    run = script.replace("fedsim", f"{sys.executable} -m")
    return ran(["bash", "-c", run], cwd=ROOT)


@pytest.mark.process
@pytest.mark.parametrize(
    ("end", "workers"),
    [("| head -1; exit ${PIPESTATUS[0]}", 0), ("> /dev/full", 2), (">&-", 0), (">&- 2>&- <&-", 2)],
)
def test_a_run_goes_on_where_its_output_cannot_be_written(end: str, workers: int, tmp_path: Path) -> None:
    done = _shell(f"fedsim {JOB} --workers {workers} --out {tmp_path / 'run'} {end}")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "done"


@pytest.mark.process
def test_a_failed_run_keeps_its_exit_status_where_its_output_cannot_be_written(tmp_path: Path) -> None:
    bad = "--bad-uploads stop --max-norm 1e-6"
    done = _shell(f"fedsim {JOB} {bad} --workers 0 --out {tmp_path / 'run'} > /dev/full")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.process
def test_commands_that_print_end_silently_at_a_broken_pipe_and_fail_at_a_full_disk() -> None:
    done = _shell("fedsim launch list algorithms | true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (0, "")
    done = _shell("fedsim launch list algorithms > /dev/full")
    assert done.returncode == 5
    assert done.stderr == "fedsim: the output cannot be written: No space left on device\n"


@pytest.mark.process
@pytest.mark.parametrize(("encoding", "absent"), [("ascii", "."), ("utf-8", "\xb7")])
def test_characters_that_an_encoding_lacks_are_replaced_and_marks_stay_distinct(
    encoding: str, absent: str
) -> None:
    command = [sys.executable, "-m", "launch", "schedule", "0.3", "--clients", "3", "--rounds", "4"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        encoding=encoding,
        timeout=DEADLINE,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (done.returncode, done.stderr) == (0, "")
    folded = "\N{FULL BLOCK}" if encoding == "utf-8" else "#"
    marks = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("client")]
    assert [len(text) for text in marks] == [4] * 3 and set("".join(marks)) == {folded, absent}
    assert f"{folded} folded" in done.stdout and f"{absent} absent" in done.stdout


def _line(width: int, parts: int = 9) -> str:
    line = ProgressLine(20, progress_parts(METRICS, 14_500_000)[:parts])
    for round in range(13):
        line.committed(round, 2.0 * round)
    file = io.StringIO()
    console(file=file, width=width, color_system=None).print(line)
    (text,) = file.getvalue().splitlines()
    return text.rstrip()


@pytest.mark.parametrize("width", [30, 60, 100, 240])
def test_the_progress_line_fits_and_always_has_the_round(width: int) -> None:
    line = _line(width)
    assert line.startswith("round 12/20")
    assert len(line) < width


def test_the_progress_line_leaves_out_what_matters_least() -> None:
    assert _line(60) == "round 12/20  accuracy 93.5 %  14.50 MB so far  0:16 left"
    assert re.fullmatch(
        "round 12/20  [━╸╺ ]{8,}  accuracy 93.5 %  NLL 0.2913  14.50 MB so far  0:16 left", _line(80)
    )
    assert re.fullmatch(
        "round 12/20  [━╸╺ ]{8,}  accuracy 93.5 %  NLL 0.2913  14.50 MB so far  "
        "this round 0.60 MB down, 0.60 MB up  0.04 s  0:16 left",
        _line(160),
    )


def test_no_time_is_left_at_the_end_and_none_is_known_at_the_start() -> None:
    line = ProgressLine(2)
    assert line.time_left is None
    line.committed(0, 5.0)
    assert line.time_left is None
    line.committed(1, 8.0)
    assert line.time_left == 3.0
    line.committed(2, 11.0)
    assert line.time_left is None


def test_an_unknown_accuracy_and_an_infinite_score_are_said_as_such() -> None:
    parts = progress_parts(METRICS | {"test_accuracy": None, "test_nll": None}, 0)
    assert fitted("round 1/2", parts, 30) == "round 1/2  NLL nan  0 B so far"


def _table() -> Table:
    rows = [
        ("runs/a-name-without-a-space", "several words that fold where they have to", "12", "91.8 %"),
        ("b", "", "1,345", "-"),
    ]
    return Table(("run", "what it is", "bytes", "accuracy"), rows, 2, "title")


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_a_table_cuts_no_word_and_no_line_is_too_long(width: int) -> None:
    file = io.StringIO()
    _table().print(console(file=file, width=width))
    text = file.getvalue()
    cells = " ".join(cell for row in _table().rows for cell in row)
    words = "".join(text.split()) if width < 27 else text  # the name itself is folded then
    assert "…" not in text and all(word in words for word in cells.split())
    assert all(len(line) <= width for line in text.splitlines())


def test_what_has_no_room_in_a_table_goes_below_its_row() -> None:
    file = io.StringIO()
    _table().print(console(file=file, width=50), apart=False)
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "title",
        "run                          bytes  accuracy",
        "runs/a-name-without-a-space     12    91.8 %",
        "    several words that fold where they have to",
        "b                            1,345         -",
    ]


def test_a_table_in_a_pipe_has_one_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    Table(("words",), [("word " * 200,)]).print(console(file=file))
    assert len(file.getvalue().splitlines()) == 2


def test_an_accuracy_for_people_is_per_cent_with_one_decimal() -> None:
    assert [percentage(x) for x in (0.91834, 0.9, 1.0, 0.0)] == ["91.8 %", "90.0 %", "100.0 %", "0.0 %"]


def test_numbers_for_people() -> None:
    workers = [counted(n, "worker") for n in (0, 1, 2, 1000)]
    assert workers == ["0 workers", "1 worker", "2 workers", "1,000 workers"]
    assert [size(n) for n in (0, 640, 21_368, 603_000, 1.2e6, 2.5e9)] == [
        *("0 B", "640 B", "21.4 kB", "0.60 MB", "1.20 MB", "2.50 GB")
    ]
    assert [duration(s) for s in (0.4, 12, 75, 3723)] == ["0:00", "0:12", "1:15", "1:02:03"]


def test_no_color_means_no_styles_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, escapes in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        monkeypatch.setenv("TERM", "xterm-256color")
        file = io.StringIO()
        console(file=file, force_terminal=True).print(Text("fedlap", "bold"))
        assert ("\x1b[" in file.getvalue()) is escapes


def test_about_ten_rounds_stay_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    file = io.StringIO()
    monkeypatch.setattr("launch.terminal.console", lambda **options: console(file=file, force_terminal=True))
    display = Display(40)
    display.header(["header"])
    for round in range(41):
        display.committed(round)
        display.evaluated(METRICS | {"round": round}, 0)
    display.stop()
    kept = re.findall(r"^\S*?round +(\d+)/40", file.getvalue().replace("\r", "\n"), re.MULTILINE)
    assert {int(r) for r in kept} >= set(range(0, 41, 4))


BRACKETS = ("grid[lr=0.1]", "x[/y]/z", "[bold]", "[red]a[/red]", "a[link=b]", r"back\\[x]")


@pytest.mark.parametrize("name", BRACKETS)
def test_square_brackets_are_no_markup(name: str) -> None:
    """In a line, in a cell, in a heading, in a title, and in a note."""
    file = io.StringIO()
    out = console(file=file, width=100)
    out.print(name)
    Table((name,), [(name,)], title=name).print(out)
    display = Display(1)
    display.console = out
    display.note(name)
    assert file.getvalue().split() == [name] * 5


def test_a_run_folder_with_brackets_is_named_as_it_is(tmp_path: Path) -> None:
    """By launch, runs, sweep and compare."""
    out = tmp_path / "grid[lr=0.1]" / "x[" / "b]"
    job = ("--model", "logistic", "--clients", "2", "--rounds", "1")
    over = ("--over", "algo=fedavg", "--runs", str(tmp_path / "[/r]"))

    def output_of(*words: str) -> str:
        done = CliRunner(catch_exceptions=False).invoke(main, words)
        assert done.exit_code == 0, done.output
        return done.output

    assert f"run folder: {out}" in output_of(
        "launch", "--algo", "fedavg", *job, "--workers", "0", "--out", str(out)
    )
    assert "b]" in output_of("runs", str(out))
    assert "[/r]" in output_of("sweep", *job, *over, "--dry-run")
    assert "[page].html" in output_of("compare", str(out), "--out", str(tmp_path / "[page].html"))


def test_in_a_pipe_a_row_is_one_line_without_padding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    long = "x" * 40
    Table(("a", "b", "c", "n\nm"), [("1", "2", long, "9"), ("1", long, "3\n4", "10")], 3).print(console())
    assert capsys.readouterr().out.splitlines() == [
        f"a  b{' ' * 27}  c{' ' * 27}  n m",
        f"1  2{' ' * 27}  {long}    9",
        f"1  {long}  3; 4{' ' * 24}   10",
    ]


def test_help_has_all_verbs_in_groups_and_the_usual_ones_first() -> None:
    shown = CliRunner().invoke(main, ["--help"]).stdout.partition("Run:\n")[2]
    verbs = re.findall(r"^  (\w+)  ", shown, re.MULTILINE)
    assert sorted(verbs) == sorted(main.commands)
    usual = "launch resume sweep plan list describe runs report compare card"
    assert verbs[:10] == usual.split()
