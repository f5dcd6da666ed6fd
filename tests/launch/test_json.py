"""--json: one document on standard output, with the numbers of the tables, and its keys are documented."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fedsim
from launch.cli import main
from launch.terminal import plain
from protocols import REGISTRY
from tests.support.pages import reference

SMALL: dict[str, Any] = {"algo": "fedlap_cov", "clients": 3, "rounds": 2, "model": "logistic", "quiet": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> fedsim.Run:
    return fedsim.run(**SMALL | {"algo": "fedavg"}, out=tmp_path_factory.mktemp("other") / "run")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedsim.Run:
    return fedsim.run(**SMALL, codecs={"up.precision": "bf16"}, out=tmp_path_factory.mktemp("json") / "run")


def document(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_values_are_those_of_json() -> None:
    value = {"a": np.int64(3), 1: [math.nan, math.inf, 0.5], "p": Path("x"), "s": (np.float32(0.5),)}
    assert plain(value) == {"a": 3, "1": [None, None, 0.5], "p": "x", "s": [0.5]}


@pytest.mark.parametrize("kind", ["datasets", "models", "partitions", "codecs", "schedules", "presets"])
def test_lists(kind: str) -> None:
    names = document("list", kind)
    shown = CliRunner().invoke(main, ["list", kind]).stdout
    assert names and all(entry.get("usage", entry["name"])[:20] in shown for entry in names)


def test_the_list_of_algorithms() -> None:
    assert [a["name"] for a in document("list", "algorithms")] == [kind.name for kind in REGISTRY]


def test_describe() -> None:
    described = document("describe", "fedlap_cov")
    assert described["down"] == described["up"] == "2P" and described["model"] == "mlp_small"
    fields = {(m["message"], m["field"]) for m in described["messages"]}
    assert {("down", "mean"), ("up", "precision")} <= fields
    defaults = {h["name"]: h["default"] for h in described["hyperparameters"]}
    assert isinstance(defaults["local.lr"], float)


def test_the_ledger(run: fedsim.Run) -> None:
    own = run.ledger[run.ledger.kind == "algorithm"]
    whole = document("ledger", str(run.path))
    for name, keys in (("kind", ["kind"]), ("round", ["round"]), ("client", ["client"])):
        rows = run.ledger if name == "kind" else own
        for entry in whole[f"by_{name}"]:
            selected = rows[rows[keys[0]] == entry[keys[0]]]
            for side in ("down", "up"):
                assert entry[side] == selected[selected.direction == side].bytes.sum()
    assert sum(e["up"] for e in whole["by_field"]) == run.summary["bytes_up"]
    assert whole["broadcast_bytes"] == run.summary["bytes_down"] == 3 * whole["broadcast_bytes_once"]
    assert whole["envelopes"] == {"down": 6, "up": 6}
    rounds = document("ledger", str(run.path), "--by", "round", "--cumulative")
    assert rounds["by_round"][-1]["up"] == run.summary["bytes_up"] and "by_field" not in rounds
    assert len(document("ledger", str(run.path), "--all")["by_field"]) >= len(whole["by_field"])


def test_the_ledger_by_hop(run: fedsim.Run, tmp_path: Path) -> None:
    with_tree = fedsim.run(**SMALL | {"clients": 4}, tree="2x2", out=tmp_path / "tree")
    crossed = with_tree.ledger[with_tree.ledger.kind == "edge"]
    by_hop = document("ledger", str(with_tree.path), "--by", "hop")["by_hop"]
    assert [entry["hop"] for entry in by_hop] == ["edge0", "edge1"]
    for side in ("down", "up"):
        assert sum(entry[side] for entry in by_hop) == crossed[crossed.direction == side].bytes.sum() > 0
    assert document("ledger", str(with_tree.path))["by_hop"] == by_hop
    everything = document("ledger", str(with_tree.path), "--by", "hop", "--all")["by_hop"]
    assert {(e["hop"], e["kind"]) for e in everything} >= {("edge0", "edge"), ("edge1", "edge")}
    shown = CliRunner().invoke(main, ["ledger", str(with_tree.path)])
    assert "by hop to the root" in shown.output
    without = CliRunner().invoke(main, ["ledger", str(run.path), "--by", "hop"])
    assert without.exit_code == 2 and "has no edge servers" in without.output


def test_compare(run: fedsim.Run, other: fedsim.Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    compared = document("compare", str(run.path), str(other.path), "--out", str(page), "--to", "60%")
    group, _ = compared["groups"]
    assert (group["algo"], group["seeds"], group["params"]) == ("fedlap_cov", 1, 640)
    assert group["bytes_mean"] == run.summary["bytes_down"] + run.summary["bytes_up"]
    assert group["bytes_to_0.6_mean"] == run.bytes_to(accuracy=0.6)
    assert compared["files"] == {"page": str(page)} and page.is_file()
    assert compared["accuracies"] == [0.6] and compared["frontier"][0]["group"].startswith("fedavg")


def test_schedule() -> None:
    rounds = document("schedule", "0.5+lost:0.5", "--clients", "6", "--rounds", "4")["rounds"]
    assert [r["round"] for r in rounds] == [1, 2, 3, 4]
    assert all(len(r["participants"]) == 3 and set(r["lost"]) <= set(r["participants"]) for r in rounds)


def test_verify(run: fedsim.Run) -> None:
    verified = document("verify", str(run.path))
    assert verified["identical"] and not verified["faults"]
    assert [(r["round"], r["compared"], r["identical"]) for r in verified["rounds"]] == [(1, 3, 3), (2, 3, 3)]


@pytest.mark.slow
def test_codecs(run: fedsim.Run) -> None:
    measured = document("codecs", str(run.path))
    assert (measured["algo"], measured["params"], measured["round"]) == ("fedlap_cov", 640, 3)
    own = [
        m
        for m in measured["codecs"]
        if m["of_the_run"] and (m["direction"], m["field"]) == ("up", "precision")
    ]
    assert [(m["codec"], m["bytes"]) for m in own] == [("bf16", 2 * 640)]


# ---- the page that documents the keys


def documented() -> dict[str, set[str]]:
    """The keys of each section `JSON of ...` in docs/reference.md, read from its first column."""
    page = reference().partition("\n## JSON output\n")[2].partition("\n## ")[0]
    sections = re.split(r"^### JSON of ", page, flags=re.MULTILINE)[1:]
    cells = {s.splitlines()[0].strip("`"): re.findall(r"^\| (`.*?`) \|", s, re.MULTILINE) for s in sections}
    return {head: set(re.findall(r"`(.*?)`", " ".join(column))) for head, column in cells.items()}


def keys(value: Any, path: str = "") -> Iterator[str]:
    """Dotted keys; [] stands for the objects of a list."""
    if isinstance(value, dict):
        for key, v in value.items():
            yield f"{path}.{key}".lstrip(".")
            yield from keys(v, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for v in value:
            yield from keys(v, f"{path}[]")


FREE = {
    "fedsim ledger RUN": ("limits.",),
    "fedsim plan": ("bytes.", "least."),
    "fedsim compare": ("groups[].", "files."),
    "fedsim list algorithms": (),
}
"""Objects whose keys are names of fields or of columns that another page lists."""


@pytest.mark.parametrize("command", sorted(documented()))
def test_the_keys_are_those_of_the_page(
    command: str, run: fedsim.Run, other: fedsim.Run, tmp_path: Path
) -> None:
    path, second, page = str(run.path), str(other.path), str(tmp_path / "p.html")
    arguments = {
        "fedsim list KIND": ("list", "models"),
        "fedsim list algorithms": ("list", "algorithms"),
        "fedsim list presets": ("list", "presets"),
        "fedsim describe ALGO": ("describe", "fedlap"),
        "fedsim runs": ("runs", path),
        "fedsim ledger RUN": ("ledger", path),
        "fedsim plan": (
            *("plan", "--clients", "2", "--rounds", "1", "--link", "joules_up=1e-6"),
            *("--participation", "full+event:norm:1"),
        ),
        "fedsim compare": ("compare", path, second, "--out", page, "--to", "60%"),
        "fedsim schedule": ("schedule", "full"),
        "fedsim codecs": ("codecs", path),
        "fedsim verify RUN": ("verify", path),
    }
    free = FREE.get(command, ())
    created = {key for key in keys(document(*arguments[command])) if not key.startswith(free or ("\0",))}
    assert created == documented()[command]
