"""Every option of every command: a wrong value is one line, with exit code 2, that names the option as typed.

The cases are generated from the commands' parameters, so that an option which is added is tried, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import click
import pytest
from click.testing import CliRunner
from msgspec import Meta

from fedsim.errors import UsageError
from fedsim.experiment import Experiment
from launch.cli import main
from launch.configuration.config import Overrides
from launch.configuration.execution import Execution

NEEDED = {
    **{(reader,): ("nowhere",) for reader in ("resume", "verify", "ledger", "watch", "report", "trace")},
    **{(reader,): ("nowhere",) for reader in ("compare", "codecs")},
    **{(joins,): ("--join", "nowhere") for joins in ("worker", "node")},
    ("relay",): ("--to", "127.0.0.1:9"),
    ("sweep",): ("--seeds", "0", "--dry-run"),
    ("schedule",): ("full",),
    ("describe",): (),
    ("launch",): ("--out", "nowhere"),
    ("plan",): (),
}
"""What else a command needs."""

TEXTS = {
    **dict.fromkeys(
        (
            *("algo", "asynchronous", "bind", "codecs", "compute", "dataset", "deadline", "devices"),
            *("engine_options", "evaluate_on", "freeze", "hyperparameters", "image", "keys", "link"),
            *("model", "participation", "partition", "preset", "track", "train", "tree"),
        ),
        "zzz",
    ),
    "config": "zzz.toml",
    "data_dir": "/zzz",
    "out": "/dev/null/zzz",
    "runs": "/dev/null/zzz",
}
"""A wrong value of each text of `launch`."""

KINDS = ("algorithm", "data set", "model", "partition", "schedule", "preset", "tracker")
"""A name that does not exist is told as unknown NAME 'zzz', by its kind."""


def _commands(
    group: click.Group = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _options() -> Iterator[tuple[tuple[str, ...], click.Option]]:
    for path, command in _commands():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                yield path, parameter


def _limits(field: str) -> Meta | None:
    for kind in (Experiment, Execution):
        if field in {f.name for f in fields(kind)}:
            hint = get_type_hints(kind, include_extras=True)[field]
            return next(meta for meta in get_args(hint)[1:] if isinstance(meta, Meta))
    return None


def _wrong_values(path: tuple[str, ...], option: click.Option) -> Iterator[str]:
    kind, limits = option.type, _limits(str(option.name))
    numeric = isinstance(kind, click.types.IntParamType | click.types.FloatParamType)
    if numeric:
        yield from ("zzz", "", "1,5")
    if isinstance(kind, click.types.FloatParamType):
        yield from ("nan", "inf", "-inf")
    if isinstance(kind, click.types.IntParamType):
        yield "1.5"
    if isinstance(kind, click.IntRange | click.FloatRange):
        assert kind.min is not None, option.opts
        yield str(kind.min if kind.min_open else kind.min - 1)
        if kind.max is not None:
            yield str(kind.max + 1)
    elif limits is not None and numeric and path != ("resume",):  # there the run is looked at first
        for low, step in ((limits.ge, 1), (limits.gt, 0)):
            if low is not None:
                yield str(low - step)
        if limits.le is not None:
            yield str(limits.le + 1)
    if isinstance(kind, click.Choice):
        yield from ("zzz", "")
    if option.name in ("until", "workers") and isinstance(kind, click.types.FuncParamType):
        yield from ("zzz", "", "-1", "nan", "1.5.2")


CASES = [(path, option, value) for path, option in _options() for value in _wrong_values(path, option)]


def _refusal(*arguments: str) -> str:
    """The one line of a command that refuses its arguments."""
    done = CliRunner(catch_exceptions=False).invoke(main, arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("fedsim: ")
    return line


@pytest.mark.parametrize(
    ("path", "option", "value"), CASES, ids=[f"{' '.join(p)} {o.opts[0]} {v}" for p, o, v in CASES]
)
def test_a_wrong_value_names_the_option_as_it_was_typed(
    path: tuple[str, ...], option: click.Option, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = list(NEEDED.get(path, ()))
    if option.opts[0] in words:  # an option stands there once
        at = words.index(option.opts[0])
        del words[at : at + 2]
    for typed in option.opts:
        assert f"{typed} " in _refusal(*path, *words, typed, value)
        assert f"{typed} " in _refusal(*path, *words, f"{typed}={value}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", TEXTS)
def test_a_wrong_text_is_named_or_told_by_its_kind(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    option = next(p for p in main.commands["launch"].params if p.name == field).opts[0]
    words = [] if field in ("out", "runs") else ["--out", "nowhere"]
    words += ["--dataset", "mnist"] if field == "data_dir" else []
    done = CliRunner(catch_exceptions=False).invoke(
        main, ["launch", "--workers", "0", *words, option, TEXTS[field]]
    )
    (line,) = done.stderr.splitlines()
    if field in ("out", "runs"):  # which is the disk's refusal
        assert (done.exit_code, "the run folder /dev/null/zzz" in line) == (5, True)
    else:
        assert option in line or any(f"unknown {kind} 'zzz'" in line for kind in KINDS), line
        assert done.exit_code == 2


def test_every_text_of_launch_is_tried() -> None:
    texts = {
        p.name
        for p in main.commands["launch"].params
        if isinstance(p, click.Option) and isinstance(p.type, click.types.StringParamType)
    }
    assert texts == set(TEXTS)


SINGLE = [(path, option) for path, option in _options() if not option.multiple]


@pytest.mark.parametrize(
    ("path", "option"), SINGLE, ids=[f"{' '.join(path)} {option.opts[0]}" for path, option in SINGLE]
)
def test_an_option_of_one_value_is_taken_once(path: tuple[str, ...], option: click.Option) -> None:
    names = itertools.islice(itertools.cycle(option.opts), 2)  # --seat 1 --worker 2 are the same one
    words = [word for name in names for word in (name, "1")]
    line = _refusal(*path, *words)
    assert line.startswith(f"fedsim: {option.opts[0]} ") and "is given twice" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("plan --set lr=0.1 --set lr=0.2", "--set lr=: the key is given twice"),
        ("plan --set lr=0.1 --set local.lr=0.2", "--set: lr and local.lr are the same hyperparameter"),
        ("plan --codec mean=bf16 --codec mean=bf16", "--codec mean=: the key is given twice"),
        ("plan --link up=1mbit,up=2mbit", "--link up=1mbit,up=2mbit: up is given twice"),
        ("plan --participation 0.3+lost:0.1+lost:0.2", "once each"),
        ("sweep --set lr=0.1 --over lr=0.2,0.3", "--over lr=: --set lr=0.1 says it, too"),
        ("sweep --set lr=0.1 --over local.lr=0.2,0.3", "are the same hyperparameter"),
        ("sweep --clients 3 --over clients=4,5", "--over clients=: --clients 3 says it, too"),
        ("sweep --over clients=0,1", "--over clients=0: must be a whole number of at least 1"),
    ],
)
def test_a_key_is_given_once(words: str, says: str) -> None:
    assert says in _refusal(*words.split())


def test_a_file_has_a_key_once_and_the_command_line_goes_over_it(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[hyperparameters]\nlr = 0.1\nlr = 0.2\n")
    assert f"--config {file}: " in _refusal("plan", "--config", str(file))
    file.write_text("[hyperparameters]\nlr = 0.1\n[hyperparameters.local]\nlr = 0.2\n")
    assert "lr and local.lr are the same hyperparameter" in _refusal("plan", "--config", str(file))
    file.write_text("[hyperparameters.local]\nlr = 0.2\n")
    experiment, _ = Overrides.of({"config": str(file), "hyperparameters": ("lr=0.3",)}).resolve()
    assert list(experiment.hyperparameters.values())[-1] == 0.3


def test_a_codec_of_one_direction_goes_over_that_of_both_in_any_order() -> None:
    for codecs in (("mean=bf16", "up.mean=f16"), ("up.mean=f16", "mean=bf16")):
        resolved = Overrides.of({"codecs": codecs}).resolve()[0].codecs
        assert list(resolved.items()) == [("mean", "bf16"), ("up.mean", "f16")]


def test_a_value_of_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    for text, says in (
        ("[experiment]\nclients = 0\n", f"[experiment] of {file}: clients = 0: must be a whole number"),
        ("[execution]\nlease = -1.0\n", f"[execution] of {file}: lease = -1.0: must be a number above 0"),
        ("[experiment]\nroundz = 3\n", f"unknown key in [experiment] of {file}: 'roundz'; did you mean"),
    ):
        file.write_text(text)
        assert says in _refusal("plan", "--config", str(file))
        if "clients" in text:  # what the command line says is the command line's
            assert "fedsim: --clients -1: must" in _refusal("plan", "--config", str(file), "--clients", "-1")


def test_a_key_of_a_file_that_the_algorithm_has_not_says_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[hyperparameters]\ndelta = 1.0\n")
    assert _refusal("plan", "--config", str(file), "--algo", "scaffold") == (
        "fedsim: unknown hyperparameter of scaffold: 'delta' (all: fedsim describe scaffold); it is in "
        f"{file}: hyperparameters are one algorithm's own, so leave --algo out, or take a --config without "
        "this key"
    )
    assert "is in" not in _refusal("plan", "--algo", "scaffold", "--set", "delta=1")


@pytest.mark.parametrize(
    ("text", "share"), [("30%", "0.3"), ("0.001%", "0.00001"), ("30%+lost:10%", "0.3+lost:10%")]
)
def test_a_share_may_be_a_percentage(text: str, share: str) -> None:
    assert Overrides.of({"participation": text}).resolve()[0].participation == share


def test_percentages_are_the_same_in_a_schedule() -> None:
    printed = [
        CliRunner(catch_exceptions=False).invoke(main, ["schedule", *words]).stdout.splitlines()[1:]
        for words in (["0.3+lost:0.1"], ["30%+lost:10%"])
    ]
    assert printed[0] == printed[1]
    with pytest.raises(UsageError, match="unknown schedule 'x%'"):
        Overrides.of({"participation": "x%"}).resolve()
    assert "--participation '130%': give 'full'" in _refusal("schedule", "130%")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "launch --roundz 3",
            "--roundz is no option of fedsim launch; did you mean '--rounds'? (all: fedsim",
        ),
        ("launch --rounds", "--rounds: its value is missing"),
        ("launch --quiet=3", "--quiet: it takes no value"),
        ("launch extra", "unexpected argument (extra): fedsim launch [OPTIONS]"),
        ("launch --lr 3", "A hyperparameter is set by --set lr=3"),
        ("launch --transport tpc", "--transport 'tpc': must be one of ipc, tcp; did you mean 'tcp'?"),
        ("lanch", "unknown command of fedsim: 'lanch'; did you mean 'launch'?"),
        ("resume", "RUN is missing: fedsim resume [OPTIONS] RUN"),
        ("list zzz", "WHAT 'zzz': must be one of algorithms, datasets"),
        ("revoke run x", "WORKER 'x': must be a whole number"),
    ],
)
def test_what_there_is_not_is_told_in_one_line(words: str, says: str) -> None:
    assert says in _refusal(*words.split())
