"""Configuration: what is wrong is named, with the nearest thing that would have been right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

import protocols
from fedsim.errors import UsageError
from fedsim.experiment import (
    DEFAULTS,
    Experiment,
    build_algorithm,
    convert,
    hyperparameter_names,
    parse_setting,
    read_toml,
    resolved_hyperparameters,
)


@dataclass(frozen=True)
class LocalResult:
    lr: Annotated[float, Meta(gt=0)] = 0.01
    epochs: int = 2


@dataclass(frozen=True)
class Outer:
    lr: float = 1.0
    rho: float | Literal["1/K", "N_k/N"] = "1/K"
    name_: str = "x"
    on: bool = False
    local: LocalResult = LocalResult()
    other: LocalResult = LocalResult(0.5)


@dataclass(frozen=True)
class Picky:
    need: float
    two: int = 2

    def __post_init__(self) -> None:
        if self.two == 3:
            raise ValueError("two cannot be three")
        if self.two == 4:
            raise ValueError


def complaint(kind: type, values: Mapping[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        convert(kind, values, "[experiment] of f.toml")
    return str(caught.value)


# ---- convert


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"roundz": 3}, "'roundz'; did you mean 'rounds'"),
        ({"rounds": "x"}, "rounds = 'x': must be a whole number of at least 0"),
        ({"rounds": True}, "rounds = True: must be a whole number"),
        ({"clients": 0}, "clients = 0: must be a whole number of at least 1"),
        ({"fraction": 0}, "fraction = 0: must be a number above 0 and at most 1"),
        ({"fraction": float("nan")}, "fraction = nan: must be a finite number"),
        ({"inputs": "rw"}, "inputs = 'rw': must be one of raw, scaled"),
        ({"codecs": {"mean": 3}}, "codecs = {'mean': 3}: must be a table of text"),
    ],
)
def test_a_wrong_key_or_value_is_named(values: dict[str, Any], says: str) -> None:
    output = complaint(Experiment, values)
    assert says in output
    assert "[experiment] of f.toml" in output


def test_missing_keys_and_objections_of_the_class_are_reported() -> None:
    assert "missing required field `need`" in complaint(Picky, {})
    assert "two cannot be three" in complaint(Picky, {"need": 1, "two": 3})
    assert "[experiment] of f.toml" in complaint(Picky, {"need": 1, "two": 4})


def test_convert_takes_what_is_right() -> None:
    assert convert(Experiment, {}, "x") == DEFAULTS
    values = {"rounds": 0, "fraction": 1, "hyperparameters": {"lr": 0.1}, "codecs": {"up.mean": "bf16"}}
    built = convert(Experiment, values, "x")
    assert built == replace(
        DEFAULTS, rounds=0, hyperparameters={"lr": 0.1}, codecs={"up.mean": "bf16"}, fraction=1.0
    )
    assert type(built.fraction) is float


# ---- --set and --config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("delta=0.1", ("delta", 0.1)),
        ("local.lr=1e-3", ("local.lr", 0.001)),
        (" epochs = 3 ", ("epochs", 3)),
        ("carry=false", ("carry", False)),
        ("rho=1/K", ("rho", "1/K")),
        ("rho=N_k/N", ("rho", "N_k/N")),
        ("optimiser=sgd", ("optimiser", "sgd")),
        ("optimiser='sgd'", ("optimiser", "sgd")),
        ("a=b=c", ("a", "b=c")),
        ("a=", ("a", "")),
        ("a=[1, 2]", ("a", "[1, 2]")),
        ("a=2020-01-01", ("a", "2020-01-01")),
    ],
)
def test_a_setting_is_a_toml_scalar_or_else_a_string(text: str, expected: tuple[str, Any]) -> None:
    key, value = parse_setting(text)
    assert (key, value) == expected
    assert type(value) is type(expected[1])


@pytest.mark.parametrize("text", ["delta", "", "=3", " = 3"])
def test_a_setting_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--set .*: give key=value, such as --set delta=0\.1"):
        parse_setting(text)


def test_a_configuration_file_is_read_and_its_faults_name_it(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text("[experiment]\nrounds = 3\n")
    assert read_toml(path) == {"experiment": {"rounds": 3}}
    for content in (b"rounds = \n", b"name = '\xff\xfe'\n"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"--config .*f\.toml: "):
            read_toml(path)
    with pytest.raises(UsageError, match=r"--config .*none\.toml: No such file"):
        read_toml(tmp_path / "none.toml")


# ---- hyperparameters


def test_short_names_exist_where_they_are_unambiguous() -> None:
    names = hyperparameter_names(Outer)
    assert names["lr"] == "lr"
    assert names["local.lr"] == "local.lr"
    assert "epochs" not in names
    assert set(names) == {
        "lr", "rho", "name_", "on", "local.lr", "local.epochs", "other.lr", "other.epochs"
    }  # fmt: skip


def test_build_algorithm_overrides_by_name_and_by_table() -> None:
    built = Outer(lr=2.0, local=LocalResult(0.3), other=LocalResult(0.01, 7))
    assert build_algorithm(Outer, {"lr": 2, "local.lr": 0.3, "other.lr": 0.01, "other.epochs": 7}) == built
    assert (
        build_algorithm(Outer, {"lr": 2, "local": {"lr": 0.3}, "other": {"lr": 0.01, "epochs": 7}}) == built
    )
    assert build_algorithm(Outer, {}) == Outer()


def test_an_override_leaves_its_neighbours_at_the_algorithms_defaults() -> None:
    """`other` has a default of its own, Local(0.5); epochs must not reset its lr to that of Local."""
    assert build_algorithm(Outer, {"other.epochs": 9}) == Outer(other=LocalResult(0.5, 9))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lrr": 1}, "'lrr'; did you mean 'lr'"),
        ({"epochs": 1}, "unknown key in hyperparameters of Outer: 'epochs'; did you mean 'other.epochs'"),
        ({"local": {"lrr": 1}}, "'local.lrr'; did you mean 'local.lr'"),
        ({"local.lr": -1}, "local.lr = -1: must be a number above 0"),
        ({"rho": "1/N"}, "rho = '1/N': must be "),
        ({"on": 1}, "on = 1: must be true or false"),
    ],
)
def test_wrong_hyperparameters_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_algorithm(Outer, values)
    assert "hyperparameters of Outer" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("algorithm", protocols.REGISTRY, ids=lambda a: a.name)
def test_every_hyperparameter_is_a_toml_scalar_with_a_name_of_its_own(algorithm: type) -> None:
    resolved = resolved_hyperparameters(algorithm())
    assert all(type(value) in (bool, int, float, str) for value in resolved.values())
    for key, value in resolved.items():
        assert build_algorithm(algorithm, {key: value}) == algorithm()
    for short, name in hyperparameter_names(algorithm).items():
        assert build_algorithm(algorithm, {short: resolved[name]}) == algorithm()
