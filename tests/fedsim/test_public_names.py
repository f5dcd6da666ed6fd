"""What `import fedsim` offers, and what it costs."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, get_origin

import pytest

import fedsim
from fedsim.wire.schema import FieldKind
from tests.support.commands import ran

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
NAMES = {
    "algorithms": "Algorithm AnyShard Arrival At Context Exchange IvonMoments IvonTraining LocalTraining "
    "Moments Shard Step Task Unsent accumulating endless_batches ivon minimise step_size",
    "distributions": "Gaussian Increment Point Posterior RandomStream Samples",
    "field kinds": "Check Count Curvature Delta Dual FieldKind Flag FullDelta FullPrecision Gradient Inputs "
    "Least Logits Mean Norm Owners Precision Scalar Shift Statistic Sum Total Weights",
    "data, schedules, codecs": "Bound ClientPopulation Codec Dataset Part Participation Spec load_dataset",
    "runs": "Experiment Run algorithms compare open plan preset resume run sweep",
    "errors": "AccessError ConnectionLost DataError DiskError FedsimError Interrupted MismatchError "
    "TaskError UsageError WireError",
}
PUBLIC = sorted(name for names in NAMES.values() for name in names.split())
ALIASES = {"AnyShard", "Step", "Part", "Unsent"}
"""Unions, tuples and literals, which have no docstring of their own; the guide says what they are."""


def test_public_names_are_the_list() -> None:
    assert sorted(fedsim.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(fedsim))


@pytest.mark.parametrize("name", PUBLIC)
def test_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(fedsim, name)
    assert f"`{name}`" in GUIDE
    if get_origin(value) is Annotated:
        assert isinstance(value.__metadata__[0], FieldKind) or name in ALIASES
    elif name not in ALIASES:
        assert (inspect.getdoc(value) or "").strip()
        assert inspect.getdoc(value) != inspect.getdoc(type(value))


def test_the_stub_names_the_module_that_defines_each_name() -> None:
    for name, module in fedsim._HOMES.items():  # type: ignore[attr-defined]
        value = getattr(importlib.import_module(module), name)
        assert value is getattr(fedsim, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ == module, name


def test_public_name_is_no_submodule() -> None:
    """Importing a submodule would put it in the place of the name."""
    modules = {path.stem for path in (ROOT / "fedsim").iterdir()}
    assert not modules & set(PUBLIC)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = fedsim.rum  # type: ignore[attr-defined]


def test_import_is_light_and_the_door_imports_no_torch() -> None:
    probe = (
        "import sys, fedsim; light = set(sys.modules); fedsim.run; fedsim.UsageError; fedsim.Experiment; "
        "print(sorted({'torch', 'numpy', 'pandas', 'msgspec', 'launch', 'workers', 'protocols'} & light), "
        "sorted({'torch', 'numpy', 'pandas', 'zmq', 'protocols'} & set(sys.modules)))"
    )
    done = ran([sys.executable, "-c", probe], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout == "[] []\n", done.stderr
