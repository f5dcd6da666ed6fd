"""A recorded run has the recorded bits when it is carried out again on a machine with the same probe."""

from __future__ import annotations

import json

import pytest

from tests.golden import GOLDEN, runs

pytestmark = [pytest.mark.process, pytest.mark.slow]

NAME = "fedlap_cov dense"


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, str]]:
    """The recorded digests by name.

    They say nothing on a machine whose probe is another one: torch chooses its kernels by the processor.
    """
    golden = json.loads(GOLDEN.read_text())
    here = runs.probe()
    if golden["probe"] != here:
        pytest.skip(f"this machine's probe is {here}, the one of {GOLDEN.name} is {golden['probe']}")
    records: dict[str, dict[str, str]] = golden["runs"]
    return records


@pytest.mark.parametrize("workers", [0, 2])
def test_recorded_run_has_the_recorded_bits(workers: int, recorded: dict[str, dict[str, str]]) -> None:
    assert runs.created(NAME, workers) == recorded[NAME]


def test_every_algorithm_and_codec_is_recorded() -> None:
    assert set(json.loads(GOLDEN.read_text())["runs"]) == set(runs.names())
