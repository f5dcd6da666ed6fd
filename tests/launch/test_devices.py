"""fedsim devices: files of devices that are drawn, and FedScale's traces. The fixtures are made by hand."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, strategies as st

from fedsim.client_devices import Computer, Link, network, parse_value
from fedsim.participation import schedule
from launch.cli import main
from launch.commands.device_files import cell

FEDSCALE = Path(__file__).parent / "fedscale"
CAPACITY, BEHAVIOUR = FEDSCALE / "client_device_capacity.json", FEDSCALE / "client_behave_trace.json"


def command(*words: object) -> Result:
    return CliRunner().invoke(main, ["devices", *map(str, words)])


def done(*words: object) -> None:
    result = command(*words)
    assert result.exit_code == 0, result.output


@given(st.sampled_from(["up", "rtt", "joules_up"]), st.floats(1e-9, 1e12))
def test_a_cell_is_read_as_it_was_written(column: str, value: float) -> None:
    text = cell(column, value)
    if float(text.rstrip("bitms")) > 0:
        assert parse_value(column, text, "") == pytest.approx(value, rel=1e-3)


def test_generated_devices_are_read_back(tmp_path: Path) -> None:
    out = tmp_path / "drawn.csv"
    drawn = ("--up", "6mbit,0.8", "--rtt", "70ms", "--compute", "5ms,0.5", "--noise", 0.3)
    done("generate", "--clients", 4000, "--from", "lte", *drawn, "--joules-up", "2e-6", "--out", out)
    described = network(str(out), "", clients=4000)
    read, server = described.devices, described.server
    assert server == Link()
    for column, median, sigma in ((read.up, 6e6, 0.8), (read.seconds, 0.005, 0.5)):
        logs = np.log(column / median)
        assert abs(float(logs.mean())) < 4 * sigma / math.sqrt(4000)
        assert float(logs.std()) == pytest.approx(sigma, rel=0.05)
    assert set(read.down.tolist()) == {13e6} and set(read.rtt.tolist()) == {0.07}
    assert set(read.noise.tolist()) == {0.3} and set(read.joules_up.tolist()) == {2e-6}
    assert not read.joules_down.any()


def test_a_client_has_the_same_device_among_more(tmp_path: Path) -> None:
    def lines(clients: int, seed: int = 0) -> list[str]:
        out = tmp_path / "drawn.csv"
        done("generate", "--clients", clients, "--seed", seed, "--up", "6mbit,0.8", "--out", out)
        return out.read_text().splitlines()

    assert lines(50)[:11] == lines(10) != lines(10, seed=1)


def test_spread_is_that_of_columns_without_one(tmp_path: Path) -> None:
    out = tmp_path / "drawn.csv"
    done("generate", "--clients", 50, "--from", "lte", "--spread", 0.5, "--up", "1mbit,0", "--out", out)
    read = network(str(out), "", clients=50).devices
    assert len(set(read.up.tolist())) == 1 and len(set(read.down.tolist())) == 50


def test_fedscale_capacities(tmp_path: Path) -> None:
    out = tmp_path / "devices.csv"
    done("capacity", CAPACITY, "--clients", 4, "--out", out)
    read = network(str(out), "", clients=4).devices
    assert read.computer(0) == Computer(0.486) and read.computer(1) == Computer(0.12)
    assert read.link(1) == Link(2e6, 2e6) and read.link(2) == Link(1.2e8, 1.2e8)
    assert read.up[0] == pytest.approx(5.6485e6, rel=1e-3)
    assert (read.link(3), read.computer(3)) == (read.link(0), read.computer(0))  # from the first again
    done("capacity", CAPACITY, "--passes", 15, "--out", out)
    assert network(str(out), "", clients=3).devices.computer(1) == Computer(0.6)


def test_fedscale_availability(tmp_path: Path) -> None:
    out = tmp_path / "trace.csv"
    done("availability", BEHAVIOUR, "--rounds", 8, "--every", "200s", "--out", out)
    with out.open(newline="") as file:
        rows = [(int(row["round"]), int(row["client"])) for row in csv.DictReader(file)]
    # at 0, 200, ..., 1400 s, which is 400 s again; client 0: [0, 100] and [600, 900], 1: [100, 500]
    assert rows == [(1, 0), (2, 1), (3, 1), (4, 0), (5, 0), (6, 0), (7, 1), (8, 1)]
    played = schedule(f"trace:{out}", clients=3, seed=0)
    assert [played(r).participants for r in (1, 2)] == [(0,), (1,)]


def test_some_of_those_who_are_there(tmp_path: Path) -> None:
    out, rounds = tmp_path / "trace.csv", 20
    words = ("availability", BEHAVIOUR, "--clients", 30, "--rounds", rounds, "--every", "200s", "--out", out)
    done(*words, "--per-round", 4)
    first = out.read_text()
    played = schedule(f"trace:{out}", clients=30, seed=0)
    taking_part = [played(r).participants for r in range(1, rounds + 1)]
    assert all(len(p) == 4 and len({k % 3 for k in p}) == 1 for p in taking_part)
    assert len(set(taking_part)) > 5
    done(*words, "--per-round", 4)
    assert out.read_text() == first


@pytest.mark.parametrize(
    ("words", "content", "says"),
    [
        (("capacity",), {"1": {"computation": 3}}, "client 1: communication is None"),
        (("capacity",), {"1": {"computation": -3, "communication": 5}}, "client 1: computation is -3"),
        (("capacity",), {"1": 5}, "client 1: 5 is no object"),
        (("capacity",), [], "no object with an entry per client"),
        (("availability",), {"a": {"finish_time": 9, "active": [1], "inactive": []}}, "1 times of active"),
        (("availability",), {"a": {"finish_time": 9, "active": "x", "inactive": []}}, "active is no list"),
        (("availability",), {"a": {"finish_time": 0, "active": [], "inactive": []}}, "finish_time is 0"),
        (("availability",), {"a": {"finish_time": 9, "active": [5], "inactive": [6]}}, "no client is there"),
    ],
)
def test_a_wrong_export_is_one_line(words: tuple[str], content: Any, says: str, tmp_path: Path) -> None:
    file = tmp_path / "export.json"
    file.write_text(json.dumps(content))
    more = ("--rounds", 1, "--every", "10s") if words[0] == "availability" else ()
    result = command(*words, file, *more, "--out", tmp_path / "out.csv")
    assert result.exit_code == 2 and says in result.output, result.output
    assert len(result.output.strip().splitlines()) == 1 and not (tmp_path / "out.csv").exists()


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "client_device_capacity").write_bytes(b"\x80\x04}\x94.")
    result = command("capacity", tmp_path / "client_device_capacity", "--out", tmp_path / "out.csv")
    assert result.exit_code == 2 and "is not JSON" in result.output and "export it first" in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "name a column"),
        (("--from", "let"), "did you mean 'lte'"),
        (("--up", "fast"), "--up: 'fast' is no rate"),
        (("--up", "1mbit,x"), "write MEDIAN,SIGMA"),
        (("--up", "1mbit,500"), "a SIGMA from 0 to 10"),
        (("--rtt", "1s", "--noise", "0.3"), "--noise is that of --compute"),
        (("--joules-example", "some"), "--joules-example: 'some' is no number"),
    ],
)
def test_a_wrong_distribution_is_one_line(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    result = command("generate", "--clients", 3, *words, "--out", tmp_path / "out.csv")
    assert result.exit_code == 2 and says in result.output, result.output
    assert len(result.output.strip().splitlines()) == 1
