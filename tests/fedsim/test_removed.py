"""Names that left are refused in one line that names what replaces them."""

from __future__ import annotations

import pytest

from fedsim.errors import unknown
from fedsim.removed import NAMES, removed


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_an_unknown_name_that_left_names_its_replacement(kind: str, name: str) -> None:
    message = str(unknown(kind, name, ["other"]))
    assert message.startswith(f"{name} left in 0.2: ")
    assert NAMES[kind][name] in message


def test_a_name_of_another_kind_is_an_unknown_name() -> None:
    assert removed("column", "lstm") is None
    assert str(unknown("column", "lstm", ["other"])).startswith("unknown column 'lstm'")
