"""A codec in a user's file: tried before a run, and refused if it does not keep its promise."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from fedsim.errors import UsageError, WireError
from fedsim.wire.codecs import codec, pack_or_dense, unpack_checked
from fedsim.wire.codecs.base import Spec

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "adding-a-codec.md").read_text(encoding="utf-8")
((NAME, INT8),) = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, re.DOTALL)
SPEC = Spec.of((5,), torch.float32)


def spec_of(folder: Path, *changes: tuple[str, str], stem: str = "int8") -> str:
    """The guide's codec, with changes."""
    source = INT8
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    (folder / f"{stem}.py").write_text(source)
    return f"{folder}/{stem}.py:int8"


def test_the_guides_codec_round_trips_under_its_name_on_the_wire(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    created, x = codec(spec), torch.tensor([0.0, 1.0, -2.0, 0.5, 2.0])
    assert created.name == f"int8:int8@{sha256(INT8.encode()).hexdigest()[:8]}"
    assert codec(created.name) is created is codec(spec)
    name, parts = pack_or_dense(created, x, SPEC)
    assert (name, parts[0][1].nbytes) == (created.name, 13)
    assert torch.allclose(unpack_checked(name, parts, SPEC, "up"), x, atol=2 / 254)


def test_sizes_are_checked_before_the_users_code_sees_a_byte(tmp_path: Path) -> None:
    name = codec(spec_of(tmp_path)).name
    with pytest.raises(WireError, match="12 bytes of values where the layout demands 13"):
        unpack_checked(name, (("values", memoryview(bytes(12))),), SPEC, "up")
    with pytest.raises(WireError, match="a part of 'indices'"):
        unpack_checked(name, (("indices", memoryview(bytes(13))),), SPEC, "up")


def test_what_the_unpacker_raises_is_a_damaged_message(tmp_path: Path) -> None:
    strict = (
        "    levels = np.frombuffer(parts[0][8:]",
        "    assert scale != 9\n    levels = np.frombuffer(parts[0][8:]",
    )
    name = codec(spec_of(tmp_path, strict, stem="strict")).name
    forged = memoryview(torch.tensor([9.0], dtype=torch.float64).numpy().tobytes() + bytes(5))
    with pytest.raises(
        WireError, match=r"up: codec 'strict:int8@[0-9a-f]{8}' cannot unpack this: AssertionError"
    ):
        unpack_checked(name, (("values", forged),), SPEC, "up")


def test_function_that_returns_a_codec_is_called(tmp_path: Path) -> None:
    lazy = ("int8 = Codec", "def int8() -> Codec:\n    return Codec")
    assert codec(spec_of(tmp_path, lazy, stem="lazy")).name.startswith("lazy:int8@")


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    before = codec(spec_of(tmp_path, stem="edited"))
    after = codec(spec_of(tmp_path, ("lossy=True", "lossy=True, bias=0.5"), stem="edited"))
    assert (before.bias, after.bias) == (0.0, 0.5)


def test_two_files_of_one_name_are_two_codecs(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one = codec(spec_of(tmp_path, stem="twice"))
    other = codec(spec_of(tmp_path / "other", ("lossy=True", "lossy=True, bias=0.5"), stem="twice"))
    assert one.name != other.name
    assert codec(one.name) is one
    assert codec(other.name) is other


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (", lossy=True", "", "what it unpacks is not what was packed"),
        ("8 + spec.count, 8", "7 + spec.count, 7", "where its bounds say [('values', 8, 8)]"),
        ("reshape(spec.shape)", "reshape(-1, 1)", "unpacks (1, 1) torch.float32 where (1,)"),
        (".to(spec.dtype)", "", "unpacks (1,) torch.float64"),
        ("(scale / 127)", "(scale / 127) + np.inf", "a number that is not finite"),
        ("values = x", "x += 1\n    values = x", "its packer changes the tensor"),
        ("np.float64(scale)", "np.float64(np.random.rand())", "other bytes when it is called again"),
        ("values = x", "1 / 0\n    values = x", "packing 1 numbers failed in line 11: ZeroDivisionError"),
        ("levels * (scale / 127)", "levels[1:]", "cannot unpack this: RuntimeError"),
        ("bounds, lossy=True)", "bounds, lossy=True), 1", "must be a fedsim.Codec, or a function"),
        ("lossy=True)", "lossy=True, kinds=frozenset({'mean'}))", "says in `why` what it is for"),
    ],
)
def test_codec_that_breaks_its_promise_is_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        codec(spec_of(tmp_path, (old, new), stem="broken"))
    assert str(caught.value).startswith("--codec broken:int8")


def test_name_in_a_header_never_loads_a_file(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit")
    with pytest.raises(UsageError, match="unknown codec 'trap'"):
        codec("trap:int8")
