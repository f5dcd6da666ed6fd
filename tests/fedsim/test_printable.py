"""Text of others shows what it is and moves nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedsim.errors import TaskError, WireError
from fedsim.printable import one_line, printable
from fedsim.wire.envelope import VERSION, Header, blob, pack, unpack
from launch import terminal
from launch.commands import errors as command_errors
from launch.results import html
from workers import protocol_messages as messages
from workers.coordinator import failures
from workers.transport.handshake import Hello, hello, read_hello, refusal, refusal_reason

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J",
    "return": "sound\rforged",
    "C1": "\x9b2J\x85",
    "delete": "\x7f",
    "bidi": "\u202eabc\u2066",
    "zero width": "fed\u200bsim\ufeff",
    "separators": "a\u2028b\u2029c",
    "tag": "a\U000e0041",
}
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


def clean(text: str) -> bool:
    return all(c in "\n\t" or c.isprintable() for c in text)


@hostile
def test_control_and_format_characters_are_escaped(text: str) -> None:
    assert clean(printable(text)) and clean(one_line(text))
    assert json.loads(f'"{one_line(text)}"'.replace("\\U000e0041", "\U000e0041")) == text


def test_a_lone_surrogate_is_escaped_on_a_page_and_in_the_error_of_a_task(tmp_path: Path) -> None:
    assert printable("a\ud800b") == "a\\ud800b"
    terminal.write_text(tmp_path / "page.html", html.Page.of("a\ud800b", []).html())
    assert "a\\ud800b" in (tmp_path / "page.html").read_text(encoding="utf-8")
    for error in (TaskError("a\ud800b"), ValueError("a\ud800b")):
        assert "a\\ud800b" in str(failures.failure(3, messages.failed("run", error)))


def test_other_text_stays_as_it_is() -> None:
    text = "Größe 漢字 🎉 a\\u001b\n\tb"
    assert printable(text) == text
    assert one_line("a\nfedsim: done") == "a\\u000afedsim: done"


@hostile
def test_a_console_prints_none(text: str) -> None:
    from rich.table import Table

    file = io.StringIO()
    console = terminal.console(file=file, width=200, force_terminal=True, color_system=None)
    console.print(text)
    table = Table(text)
    table.add_row(text)
    console.print(table)
    assert clean(file.getvalue().replace("\x1b[?25l", ""))


@hostile
def test_an_error_prints_none_and_its_lines_stay_its_own(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command_errors._complain(TaskError, f"worker 1: {text}\nfedsim: the run is done")
    out = capsys.readouterr().err
    assert clean(out)
    assert [line.startswith("fedsim: ") for line in out.splitlines()] == [True, False]


@hostile
def test_json_has_the_same_value_without_them(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({text: [text, "漢字\n"]})
    out = capsys.readouterr().out
    assert clean(out) and json.loads(out) == {text: [text, "漢字\n"]}
    assert "漢字" in out


@hostile
def test_a_page_has_none(text: str, tmp_path: Path) -> None:
    terminal.write_text(tmp_path / "page.html", html.Page.of(text, [html.Text(text)]).html())
    assert clean((tmp_path / "page.html").read_text())


# ---- from the wire


@hostile
def test_what_a_peer_says_is_escaped_where_it_is_read(text: str) -> None:
    text += "\nfedsim: forged"
    claimed = read_hello(hello(Hello("", 1, 2, text)))
    assert claimed.host == one_line(text)
    assert refusal_reason(refusal(text)) == one_line(text)
    error = failures.failure(3, messages.failed("run", TaskError(text)))
    assert clean(str(error))


@hostile
@pytest.mark.parametrize("what", ["kind", "run", "name", "codec", "dtype", "layer"])
def test_a_name_on_the_wire_has_none(what: str, text: str) -> None:
    (field,), frames = blob("x", b"1")
    header = Header(VERSION, "upload", "run")
    if what in ("kind", "run"):
        header = msgspec.structs.replace(header, **{what: text})
    elif what == "layer":
        field = msgspec.structs.replace(field, parts=(msgspec.structs.replace(field.parts[0], layer=text),))
    else:
        field = msgspec.structs.replace(field, **{what: text})
    envelope = pack(msgspec.structs.replace(header, fields=(field,)), frames)
    with pytest.raises(WireError, match="not of this format") as refused:
        unpack([envelope.head, *envelope.frames], "here")
    assert clean(str(refused.value))


@pytest.mark.parametrize("name", ["a\nb", "a\0", "a\n"])
def test_a_name_on_the_wire_is_one_line(name: str) -> None:
    envelope = pack(Header(VERSION, name, "run"))
    with pytest.raises(WireError, match="not of this format"):
        unpack([envelope.head], "here")


def test_a_user_may_name_fields_in_any_script() -> None:
    envelope = pack(Header(VERSION, "μ_größe", "run"))
    assert unpack([envelope.head], "here").header.kind == "μ_größe"


@hostile
@pytest.mark.parametrize("where", ["data", "sources"])
def test_digests_of_a_worker_are_printable(where: str, text: str) -> None:
    manifest: dict[str, Any] = {"data": "", "sources": {}} | {where: text if where == "data" else {"a": text}}
    fields, frames = blob("ready", json.dumps(manifest).encode())
    with pytest.raises(WireError, match="unreadable 'ready'"):
        messages.WorkerManifest.of(pack(Header(VERSION, "ready", "run", fields=fields), frames))


def test_a_host_name_is_no_markup_and_no_second_line(tmp_path: Path) -> None:
    """`[/x]` is markup that does not fit, of which rich makes an error."""
    from types import SimpleNamespace

    from launch.session.display import Display
    from launch.session.recorder import Recorder

    file = io.StringIO()
    display = Display(1)
    display.console = terminal.console(file=file, width=300)
    recorder: Any = Recorder.__new__(Recorder)
    recorder.display, recorder.workers, recorder.remote = display, 2, True
    recorder.supervisor = SimpleNamespace(note_remote=lambda *_: None, note_left=lambda *_: None)
    recorder.joined(1, Hello("", 1, 2, "[/x][bold]a\nworker 0 is gone\x1b[2J"))
    recorder.left(1, "sent [/x]\x1b[2J\nround 9/9 done")
    lines = file.getvalue().splitlines()
    assert len(lines) == 2 and clean(file.getvalue())
    assert lines[0].startswith("worker 1 comes from [/x][bold]a\\u000aworker 0")
