"""The cache: all or nothing, first come first served, and never the reason for a failure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fedsim.data import cache
from fedsim.data.arrays import REQUIRED, Arrays
from fedsim.data.cache import cache_root, cached


def _arrays(value: int) -> Arrays:
    return {key: np.full(3, value) for key in REQUIRED}


def _never() -> Arrays:
    raise AssertionError("built again")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"x")
    return path


def test_arrays_are_built_once_and_read_only(source: Path) -> None:
    with_centres = {**_arrays(4), "centres": np.arange(3)}
    for build in (lambda: with_centres, _never):
        arrays = cached("name", [source], build)
        assert sorted(arrays) == sorted(with_centres)
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, with_centres[key])
            assert type(array) is np.ndarray and not array.flags.writeable
    source.write_bytes(b"xy")
    assert cached("name", [source], lambda: _arrays(5))["test_inputs"][0] == 5


def test_a_damaged_folder_is_made_again(source: Path) -> None:
    cached("name", [source], lambda: _arrays(1))
    (folder,) = cache_root().iterdir()
    file = folder / "train_inputs.npy"
    for value, damage in enumerate((b"", file.read_bytes()[:-1], None), start=2):
        file.unlink()
        if damage is not None:
            file.write_bytes(damage)
        assert cached("name", [source], lambda v=value: _arrays(v))["train_inputs"][0] == value  # type: ignore[misc]
        assert cached("name", [source], _never)["train_inputs"][0] == value


@pytest.mark.parametrize("name", ["train_inputs.npy", "test_targets.npy", "centres.npy", cache.DIGESTS])
def test_a_flipped_bit_is_seen_and_the_folder_made_again(
    name: str, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = {**_arrays(1), "centres": np.arange(3)}
    cached("name", [source], lambda: arrays)
    (folder,) = cache_root().iterdir()
    whole = (folder / name).read_bytes()
    for at in (0, 10, len(whole) // 2, len(whole) - 2):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        (folder / name).write_bytes(damaged)
        again = cached("name", [source], lambda: arrays)
        assert {key: array.tolist() for key, array in again.items()} == {
            key: array.tolist() for key, array in arrays.items()
        }
        assert f"{folder} is damaged" in caplog.messages[-1]
        assert (folder / name).read_bytes() == whole
    assert (name == cache.DIGESTS) or f"{name} is not as it was written" in caplog.messages[-1]


def test_an_array_that_is_missing_is_seen(source: Path) -> None:
    cached("name", [source], lambda: {**_arrays(1), "centres": np.arange(3)})
    (folder,) = cache_root().iterdir()
    (folder / "centres.npy").unlink()
    assert "centres" in cached("name", [source], lambda: {**_arrays(1), "centres": np.arange(3)})


def test_a_process_compares_a_file_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached("name", [source], lambda: _arrays(1))
    read: list[str] = []
    digest = cache.sha256
    monkeypatch.setattr(cache, "sha256", lambda path, most: read.append(path.name) or digest(path, most))
    monkeypatch.setattr(cache, "_intact", set())
    for _ in range(3):
        cached("name", [source], _never)
    assert sorted(read) == sorted(f"{key}.npy" for key in REQUIRED)


def test_copies_of_the_sources_share_one_folder(source: Path, tmp_path: Path) -> None:
    cached("name", [source], lambda: _arrays(1))
    other = tmp_path / "copy"
    other.write_bytes(source.read_bytes())
    os.utime(other, ns=(1, 1))
    assert cached("name", [other], _never)["train_inputs"][0] == 1
    assert len(list(cache_root().iterdir())) == 1
    assert cached("another", [other], lambda: _arrays(2))["train_inputs"][0] == 2  # another reader


def test_sources_are_read_once_and_again_when_they_change(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    content = cache._content

    def recorded(sources: Sequence[Path], state: str) -> str:
        read.extend(sources)
        return content(sources, state)

    monkeypatch.setattr(cache, "_content", recorded)
    for _ in range(3):
        cached("name", [source], lambda: _arrays(1))
    assert read == [source]
    source.write_bytes(b"y")
    os.utime(source, ns=(1, 1))
    assert cached("name", [source], lambda: _arrays(2))["train_inputs"][0] == 2
    assert len(read) == 2


@pytest.mark.parametrize("largest", [cache.LARGEST, 0])
@pytest.mark.parametrize("replaced", [True, False])
def test_other_content_of_the_same_size_and_time_is_seen(
    source: Path, largest: int, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LARGEST", largest)
    os.utime(source, ns=(1, 1))
    cached("name", [source], lambda: _arrays(1))
    if replaced:  # as mv, rsync and the checkout of an archive do
        other = source.with_name("other")
        other.write_bytes(b"y")
        other.replace(source)
    else:  # as cp -p into an existing file does
        source.write_bytes(b"y")
    os.utime(source, ns=(1, 1))
    assert cached("name", [source], lambda: _arrays(2))["train_inputs"][0] == 2


def test_sources_that_change_while_they_are_read_are_not_kept(source: Path) -> None:
    def build() -> Arrays:
        source.write_bytes(b"xy")
        return _arrays(1)

    before = source.read_bytes()
    assert cached("name", [source], build)["train_inputs"][0] == 1
    source.write_bytes(before)
    assert cached("name", [source], lambda: _arrays(2))["train_inputs"][0] == 2


def test_of_racing_processes_the_first_wins(source: Path) -> None:
    def slow() -> Arrays:
        # While this process decodes, another one finishes.
        assert cached("race", [source], lambda: _arrays(1))["train_inputs"][0] == 1
        return _arrays(2)

    assert cached("race", [source], slow)["train_inputs"][0] == 1
    assert [p.name.startswith("race-v") for p in cache_root().iterdir()] == [True]


def test_a_failing_reader_leaves_nothing(source: Path) -> None:
    with pytest.raises(AssertionError):
        cached("name", [source], _never)
    assert not cache_root().exists() or not list(cache_root().iterdir())


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("FEDSIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/fedsim")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path("/home/someone/.cache/fedsim")
