"""Seconds and energy of clients, in summary.json, the report and the plan."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launch.cli import main
from launch.runs.folder import RunFolder
from tests.support.commands import fedsim, over

HEADS = "client,compute,noise,up,down,rtt,jitter,joules_up,joules_down,joules_example"
LINES = (
    "0,1ms,0.2,6mbit,13mbit,70ms,10ms,4e-6,1e-6,0.01",
    "1,20ms,0.2,2mbit,13mbit,70ms,10ms,5e-6,1e-6,0.02",
    "2,1ms,0.2,6mbit,40mbit,20ms,5ms,4e-6,2e-6,0.01",
    "3,5ms,,6mbit,13mbit,,,,,",
    "server,,,20mbit,20mbit,,,,,",
)
LOSSES = "full+lost:0.3+gone:0.2"
SMALL = ("--clients", "4", "--model", "logistic", "--algo", "mime", "--participation", LOSSES)


def file_of(folder: Path, *lines: str) -> str:
    path = folder / "devices.csv"
    path.write_text("\n".join((HEADS, *lines, "")))
    return str(path)


def launched(folder: Path, *options: str, workers: str = "0", rounds: str = "4") -> RunFolder:
    command = ("launch", *SMALL, "--rounds", rounds, "--workers", workers, "--out", str(folder), *options)
    done = CliRunner().invoke(main, [*over(*command), "--quiet"])
    assert done.exit_code == 0, done.output
    return RunFolder.open(folder)


def spent(run: RunFolder) -> dict[str, Any]:
    measured: dict[str, Any] = run.summary["devices"]
    return measured


def planned(*options: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["plan", *over(*options), "--json"])
    assert done.exit_code == 0, done.output
    measured: dict[str, Any] = json.loads(done.stdout)["devices"]
    return measured


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("devices")
    return launched(folder / "run", "--link", file_of(folder, *LINES))


def test_the_sum_over_clients_is_the_total(run: RunFolder) -> None:
    for name in ("client_seconds", "client_joules"):
        values = spent(run)[name]
        assert len(values) == 4 and math.fsum(values) == spent(run)[f"{name}_total"] > 0


def test_simulated_seconds_are_those_of_the_rounds(run: RunFolder) -> None:
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    rounds = [line["simulated_seconds"] for line in lines if line["round"]]
    assert len(rounds) == 4 and spent(run)["simulated_seconds"] == pytest.approx(sum(rounds), rel=1e-12)


def test_energy_is_that_of_the_ledger(run: RunFolder) -> None:
    own = run.ledger[run.ledger.kind == "algorithm"]
    by = own.groupby(["client", "direction"]).bytes.sum()
    answered = own[own.direction == "up"].groupby("client")[["round", "exchange"]]
    sizes = run.experiment["client_sizes"]
    for k, line in enumerate(LINES[:3]):
        up, down, example = map(float, line.split(",")[-3:])
        tasks = len(answered.get_group(k).drop_duplicates())
        expected = up * by[k, "up"] + down * by[k, "down"] + example * tasks * sizes[k]
        assert spent(run)["client_joules"][k] == pytest.approx(expected, rel=1e-12)
    assert spent(run)["client_joules"][3] == 0


def test_no_energy_is_named_where_none_is_known(tmp_path: Path) -> None:
    measured = launched(tmp_path / "run", "--compute", "1ms", rounds="1")
    of_clients = ("client_seconds", "client_waits", "client_holds")
    totals = (f"{name}_total" for name in of_clients)
    assert set(spent(measured)) == {"simulated_seconds", *of_clients, *totals}
    assert "devices" not in launched(tmp_path / "plain", rounds="1").summary


def test_who_waits_for_whom(tmp_path: Path) -> None:
    """A client computes, or waits for those that do: its seconds are those of the run."""
    slow = ("0,1ms,,,,,,,,", "1,20ms,,,,,,,,", "2,1ms,,,,,,,,", "3,5ms,,,,,,,,")
    options = ("--participation", "full", "--algo", "fedavg", "--link", file_of(tmp_path, *slow))
    run = launched(tmp_path / "run", *options)
    all_of, of = spent(run)["simulated_seconds"], spent(run)
    for busy, waits in zip(of["client_seconds"], of["client_waits"], strict=True):
        assert busy + waits == pytest.approx(all_of, rel=1e-12)
    sizes = run.experiment["client_sizes"]
    assert of["client_waits"][1] == 0 and of["client_holds"][0] == of["client_holds"][2] == 0
    others = max(4 * s * n for s, n in zip((0.001, 0, 0.001, 0.005), sizes, strict=True))
    assert of["client_holds"][1] == pytest.approx(4 * 0.020 * sizes[1] - others, rel=1e-12)


def test_how_long_uploads_lie_in_the_buffer(tmp_path: Path) -> None:
    """An asynchronous run, in which a client computes, or its upload waits for others of its step."""
    devices = ("0,1ms,,,,,,,,", "1,20ms,,,,,,,,", "2,1ms,,,,,,,,", "3,5ms,,,,,,,,")
    options = ("--participation", "full", "--algo", "fedavg", "--link", file_of(tmp_path, *devices))
    run = launched(tmp_path / "run", *options, "--async", "fedbuff:2", rounds="6")
    of = spent(run)
    together = [b + w for b, w in zip(of["client_seconds"], of["client_waits"], strict=True)]
    assert max(together) <= of["simulated_seconds"] * (1 + 1e-12) and of["client_waits_total"] > 0
    busiest = max(range(4), key=lambda k: together[k])
    assert together[busiest] == pytest.approx(of["simulated_seconds"], rel=1e-9)  # of the last step
    page = tmp_path / "page.html"
    assert CliRunner().invoke(main, ["report", str(run.path), "--out", str(page)]).exit_code == 0
    assert "Uploads lay in the buffer for" in page.read_text()


@pytest.mark.process
def test_it_does_not_depend_on_workers(run: RunFolder, tmp_path: Path) -> None:
    options = (*SMALL, "--rounds", "4", "--link", run.experiment["link"], "--out", str(tmp_path / "run"))
    fedsim("launch", "--workers", "3", *options)
    assert spent(RunFolder.open(tmp_path / "run")) == spent(run)


def test_it_does_not_depend_on_resumes(run: RunFolder, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launched(folder, "--link", run.experiment["link"], rounds="2")
    done = CliRunner().invoke(main, ["resume", str(folder), "--rounds", "4", "--quiet"])
    assert done.exit_code == 0, done.output
    assert spent(RunFolder.open(folder)) == spent(run)


@pytest.mark.parametrize(
    "options",
    [
        ("--participation", "coin:0.5", "--algo", "precond_admm"),
        ("--async", "fedbuff:2", "--participation", "full", "--algo", "fedavg"),
        ("--tree", "2x2", "--participation", "full+gone:0.3+lost:0.3"),
    ],
)
def test_a_plan_is_the_run_where_nothing_is_drawn(options: tuple[str, ...], tmp_path: Path) -> None:
    server = () if "--async" in options else (LINES[-1],)
    server += ("edge,,,1mbit,10mbit,20ms", "edge edge0,,,2mbit") if "--tree" in options else ()
    still = [",".join(c if i not in (2, 6) else "" for i, c in enumerate(x.split(","))) for x in LINES[:-1]]
    options = (*SMALL, "--rounds", "4", *options, "--link", file_of(tmp_path, *still, *server))
    done = CliRunner().invoke(
        main, ["launch", *over(*options), "--workers", "0", "--out", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    measured, plan = spent(RunFolder.open(tmp_path / "run")), planned(*options)
    assert plan["simulated_seconds"] == pytest.approx(measured["simulated_seconds"], rel=1e-9)
    joules = sum(line.get("joules", 0) for line in RunFolder.open(tmp_path / "run").lines)
    assert joules == pytest.approx(measured["client_joules_total"], rel=1e-9)
    for name in ("client_seconds", "client_joules"):
        assert plan[f"{name}_total"] == pytest.approx(measured[f"{name}_total"], rel=1e-9)
        for key, of in (("min", min), ("max", max)):
            assert plan[name][key] == pytest.approx(of(measured[name]), rel=1e-9)


@pytest.mark.parametrize("how", [("--async", "fedbuff:2+damp:0.5"), ()], ids=str)
def test_no_client_of_a_plan_is_busy_for_longer_than_the_run_lasts(
    how: tuple[str, ...], tmp_path: Path
) -> None:
    """Busy seconds were an expectation once, and the duration drawn: 8.5 s, and a client busy for 37.26 s."""
    options = ("--algo", "fedavg", "--model", "logistic", "--set", "epochs=1", "--clients", "4")
    clock = ("--rounds", "3", "--compute", "50ms,noise=1", "--link", "rtt=1s,jitter=2s")
    noisy = (*options, *clock, *how)
    done = CliRunner().invoke(main, ["launch", *noisy, "--workers", "0", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    plan, measured = planned(*noisy), spent(RunFolder.open(tmp_path / "run"))
    assert plan["client_seconds"]["max"] <= plan["simulated_seconds"] * (1 + 1e-12)
    assert plan["simulated_seconds"] == pytest.approx(measured["simulated_seconds"], rel=1e-9)
    assert plan["client_seconds"]["max"] == pytest.approx(max(measured["client_seconds"]), rel=1e-9)
    assert plan["client_seconds_total"] == pytest.approx(measured["client_seconds_total"], rel=1e-9)
