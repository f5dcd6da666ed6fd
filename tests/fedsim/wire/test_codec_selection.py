"""Which codec encodes which field, and what is said of a field that is not there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fedsim.algorithm import Exchange
from fedsim.errors import UsageError
from fedsim.wire.codec_selection import select_codecs
from fedsim.wire.schema import Mean, Scalar


@dataclass(frozen=True)
class Down:
    mean: Mean


@dataclass(frozen=True)
class Up:
    gradient: Mean
    train_loss: Scalar


def refusal(option: str) -> str:
    with pytest.raises(UsageError) as caught:
        select_codecs({option: "bf16"}, (Exchange(Down, Up),), stored_as_bytes=False)
    return str(caught.value)


def test_a_codec_is_selected_in_the_directions_that_have_the_field() -> None:
    selected = select_codecs({"mean": "bf16", "up.gradient": "f16"}, (Exchange(Down, Up),), False)
    assert selected == {"down": {"mean": "bf16"}, "up": {"gradient": "f16"}}


def test_a_field_of_the_other_direction_is_not_suggested_for_itself() -> None:
    """It said: unknown message field 'mean'; did you mean 'mean'?"""
    output = refusal("up.mean")
    assert "did you mean" not in output
    assert "no upload of this run has the field 'mean', which its broadcasts have (down.mean)" in output
    assert output.endswith("its uploads have: gradient, train_loss")
    output = refusal("down.gradient")
    assert "no broadcast of this run has the field 'gradient', which its uploads have" in output


def test_a_misspelt_field_is_corrected_in_either_direction() -> None:
    for option in ("meen", "up.meen", "down.meen"):
        assert "unknown message field 'meen'; did you mean 'mean'? (known: gradient, mean" in refusal(option)


def test_a_direction_that_does_not_exist_is_named() -> None:
    assert "the direction is 'down' or 'up', not 'left'" in refusal("left.mean")
