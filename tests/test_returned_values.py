"""A method of a user's algorithm that returns something wrong is named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedsim
from fedsim.errors import FedsimError, UsageError
from protocols import find

SOURCE = """
from dataclasses import dataclass
from fedsim.algorithm import Algorithm
from fedsim.learning.gaussian import Point
from protocols.fedavg import Down, FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    '''Wire: P down, P up.'''

    {method}
"""

WRONG = {
    "model": ("def model(self, server, ctx): return ctx.start", "a Point, Gaussian or Samples.*a Tensor"),
    "model of another shape": (
        "def model(self, server, ctx): return Point(ctx.start[:3])",
        r"the mean of model must be a tensor of shape \(7510,\); it has \(3,\)",
    ),
    "server_init": ("def server_init(self, ctx): pass", r"a \w+; it returned None \(is there a return"),
    "client_init": ("def client_init(self, ctx, k): return 3", r"a \w+; it returned a int"),
    "broadcast": (
        "def broadcast(self, server, ctx): return {'mean': ctx.start}",
        r"a \w+; it returned a dict",
    ),
    "client_update": (
        "def client_update(self, *given): return FedAvg.client_update(self, *given)[1]",
        r"two values, the client's state and a \w+; it returned a \w+",
    ),
    "client_update of three": (
        "def client_update(self, *given): return (*FedAvg.client_update(self, *given), 0)",
        "two values.*it returned 3 values",
    ),
    "client_update the wrong way round": (
        "def client_update(self, *given): return FedAvg.client_update(self, *given)[::-1]",
        r"client_update must return a \w+; it returned a \w+",
    ),
    "client_commit": ("def client_commit(self, *given): pass", r"a \w+; it returned None"),
    "server_update": (
        "def server_update(self, server, down, arrivals, ctx): list(arrivals)",
        r"a \w+; it returned None \(is there a return",
    ),
}


FAILING = {
    "server_init": ("def server_init(self, ctx): return 1 / 0", "server_init failed in line"),
    "broadcast": ("def broadcast(self, server, ctx): return server.nothing", "broadcast failed in line"),
    "add": ("def add(self, sums, a, ctx): return a.up.nothing", "the server's update failed in line"),
    "a broadcast of one number": (
        "def broadcast(self, server, ctx): return Down(server.mean.mean())",
        r"Down.mean of broadcast has shape \(\); its kind says \(P\)",
    ),
    "sums of a posterior": (
        "def add(self, sums, a, ctx) -> Down: return sums",
        "add returns Down, whose fields must be Sum, FullSum or Count",
    ),
    "client_update": (
        "def client_update(self, client, down, shard, task): return down.maen",
        "client_update of client . in round 1 failed in line",
    ),
    "model": ("def model(self, server, ctx): raise KeyError('x')", "model failed in line"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_failing_method_is_one_line(case: str, tmp_path: Path) -> None:
    method, words = FAILING[case]
    (tmp_path / "mine.py").write_text(SOURCE.format(method=method), encoding="utf-8")
    spec, out = f"{tmp_path}/mine.py:Mine", str(tmp_path / "run")
    with pytest.raises(FedsimError, match=words) as wrong:
        fedsim.run(algo=spec, clients=2, rounds=1, workers=0, quiet=True, out=out)
    assert "mine:Mine" in str(wrong.value) and "\n" not in str(wrong.value)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_result_names_file_method_and_rule(case: str, tmp_path: Path) -> None:
    method, words = WRONG[case]
    (tmp_path / "mine.py").write_text(SOURCE.format(method=method), encoding="utf-8")
    with pytest.raises(FedsimError, match=words) as wrong:
        fedsim.run(
            algo=f"{tmp_path}/mine.py:Mine",
            clients=2,
            rounds=1,
            workers=0,
            quiet=True,
            out=str(tmp_path / "run"),
        )
    text = str(wrong.value)
    assert "mine:Mine" in text and case.split(" ")[0] in text and "\n" not in text


def test_a_right_algorithm_gives_the_bits_of_the_class_it_derives_from(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE.format(method="pass"), encoding="utf-8")
    common = {"clients": 2, "rounds": 1, "workers": 0, "quiet": True}
    mine = fedsim.run(algo=f"{tmp_path}/mine.py:Mine", out=str(tmp_path / "mine"), **common)
    ours = fedsim.run(algo="fedavg", out=str(tmp_path / "ours"), **common)
    assert mine.summary["model_sha256"] == ours.summary["model_sha256"]


FOLD = """
from dataclasses import dataclass
import fedsim
from protocols.fedavg import Client, Down, Server, Up

@dataclass(frozen=True)
class Mine(fedsim.Algorithm[Server, Client, Down, Up]):
    name, paper, default_model = "mine", "none", "logistic"

    def server_init(self, ctx): ...
    def client_init(self, ctx, k): ...
    def broadcast(self, server, ctx): ...
    def client_update(self, client, down, shard, task): ...
    def model(self, server, ctx): ...
    {method}
"""
UNREADY = {
    "an old add": (
        SOURCE,
        "def add(self, sums, down, k, up, ctx): return sums",
        r"mine.py, line 11: add is called as add\(sums, arrival, ctx\): missing a required argument: 'up'",
    ),
    "too many": (SOURCE, "def model(self, server): ...", "line 11: model is called as .*too many positional"),
    "no sums": (FOLD, "def add(self, sums, a, ctx): ...", "the fold lacks from_sums; or it is server_update"),
    "no fold": (FOLD, "pass", "the fold lacks add and from_sums; or it is server_update"),
    "no annotation": (
        FOLD,
        "def add(self, sums, a, ctx): ...\n    def from_sums(self, server, down, sums, ctx): ...",
        "mine.py, line 15: add needs a return annotation, such as -> Sums",
    ),
}


@pytest.mark.parametrize("case", UNREADY)
def test_what_would_fail_in_round_1_is_found_when_the_file_is_loaded(case: str, tmp_path: Path) -> None:
    source, method, words = UNREADY[case]
    (tmp_path / "mine.py").write_text(source.format(method=method), encoding="utf-8")
    with pytest.raises(UsageError, match=f"--algo mine:Mine: .*{words}") as wrong:
        find(f"{tmp_path}/mine.py:Mine")
    assert "\n" not in str(wrong.value)
