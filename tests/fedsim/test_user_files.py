"""Texts that users bring: byte order marks, other encodings, other separators; and paths that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim import user_files
from fedsim.client_devices import network
from fedsim.errors import DataError, FedsimError
from fedsim.experiment import read_toml
from fedsim.participation import schedule
from fedsim.tree import tree
from fedsim.user_files import no_file, no_folder, opened_text, read_text
from launch.configuration.config_files import read_config


def _trace(path: Path) -> Any:
    rounds = schedule(f"trace:{path}", clients=4, seed=0)
    return [rounds(r).participants for r in (1, 2)]


READERS: list[tuple[str, str, Callable[[Path], Any], Any]] = [
    ("trace.csv", "round,client\r\n1,0\r\n1,2\r\n", _trace, [(0, 2), ()]),
    ("links.csv", "client,rtt\n0,40ms\n", lambda p: network(str(p), "", clients=1).devices.rtt[0], 0.04),
    (
        "c.toml",
        '[experiment]\nalgo = "fedavg"\n',
        lambda p: read_config(str(p))["experiment"],
        {"algo": "fedavg"},
    ),
    ("r.toml", "rounds = 2\n", lambda p: read_toml(p, "recipe"), {"rounds": 2}),
    ("tree.toml", '[edges]\na = "0-1"\n', lambda p: tree(str(p), 2).names, ("a",)),
    (
        "manifest.json",
        '{"experiment": {"rounds": 3}}',
        lambda p: read_config(str(p))["experiment"],
        {"rounds": 3},
    ),
]


@pytest.mark.parametrize(("name", "text", "read", "value"), READERS, ids=[r[0] for r in READERS])
def test_a_byte_order_mark_is_no_part_of_a_text(
    tmp_path: Path, name: str, text: str, read: Callable[[Path], Any], value: Any
) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        path = tmp_path / name
        path.write_bytes(text.encode(encoding))
        assert read(path) == value


@pytest.mark.parametrize(("name", "text", "read", "value"), READERS, ids=[r[0] for r in READERS])
def test_utf_16_is_refused_by_its_name(
    tmp_path: Path, name: str, text: str, read: Callable[[Path], Any], value: Any
) -> None:
    path = tmp_path / name
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(FedsimError, match=f"{name}.* UTF-16; save it as UTF-8"):
            read(path)
    path.write_bytes(b"# caf\xe9\n" + text.encode())
    with pytest.raises(FedsimError, match=f"{name}.* no text in UTF-8 .byte 0xe9.*save it as UTF-8"):
        read(path)


@pytest.mark.parametrize(("separator", "word"), [(";", "semicolons"), ("\t", "tabs")])
@pytest.mark.parametrize("at", [0, 1])
def test_the_separators_of_another_country_are_named(
    tmp_path: Path, separator: str, word: str, at: int
) -> None:
    name, text, read, _ = READERS[at]
    (tmp_path / name).write_text(text.replace(",", separator))
    with pytest.raises(DataError, match=f"its columns are separated by {word}; save it with commas"):
        read(tmp_path / name)


def test_line_ends_of_other_systems_are_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\r\nb\n")
    assert read_text(path) == "a\nb\n"
    with opened_text(path) as file:
        assert file.read() == "a\r\nb\n"


def test_what_is_wrong_with_a_path_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("x")
    link.symlink_to(tmp_path / "gone")
    assert (no_folder(tmp_path), no_file(file)) == ("", "")
    assert no_folder(file) == "is a file, not a folder"
    assert no_file(tmp_path) == "is a folder, not a file"
    assert no_folder(tmp_path / "none") == no_file(tmp_path / "none") == "does not exist"
    for wrong in (no_folder(link), no_file(link)):
        assert wrong == f"is a link to {tmp_path / 'gone'}, which does not exist"
    for wrong in (no_folder(file / "x"), no_file(file / "x")):
        assert wrong == f"does not exist: {file} is a file"

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    monkeypatch.setattr("os.open", denied)
    assert no_folder(tmp_path) == no_file(file) == "cannot be read: Permission denied"


def test_a_table_is_known_by_the_end_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in ("my.csv", "a/b.CSV.gz,label=x", "x.parquet", "T.TSV"):
        assert user_files.is_table(spec)
    for spec in ("digits", "mine.py:data", "x.txt", "x.npz,label=y", "csv"):
        assert not user_files.is_table(spec)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.csv").write_text("")
    assert user_files.absolute_table("my.csv,label=x") == f"{tmp_path}/my.csv,label=x"
    assert user_files.absolute_table("other.csv,label=x") == "other.csv,label=x"
    assert user_files.short_table(f"{tmp_path}/my.csv,label=x") == "my.csv,label=x"
