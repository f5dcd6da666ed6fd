"""Edge servers on other machines: `fedsim edge --join`, as real processes, with workers of their own."""

from __future__ import annotations

import json
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas
import pytest

from fedsim.wire.envelope import Envelope
from launch.runs.folder import RunFolder
from tests.launch.test_remote_workers import Federation, answer, ends, eventually, here
from tests.support.commands import Command, over
from workers import protocol_messages as messages
from workers.coordinator import failures
from workers.coordinator.failures import ProtocolViolation
from workers.coordinator.membership import Membership, Registration, Timeouts, Workers
from workers.edge import remote
from workers.edge.remote import RemoteEdge
from workers.transport.edge_credentials import EdgeCredentials
from workers.transport.join_credentials import KeyPair

pytestmark = pytest.mark.process

MIXED = ("--participation", "coin:0.8+gone:0.1+lost:0.1")
TREE = ("--clients", "6", "--tree", "2x3", *MIXED)
SHORT = ("--algo", "fedlap_cov", "--rounds", "4", "--model", "logistic", "--codec", "up.mean=bf16", *TREE)
LONG = ("--algo", "fedlap_cov", "--rounds", "8", "--set", "local.epochs=60", *TREE)


class Sites(Federation):
    """A root, its edge servers, and the workers behind them. Their files lie in one folder a site."""

    def root(self, *options: str, workers: int = 3) -> Command:
        return self.launch("--edge-processes", *options, workers=workers)

    def site(self, edge: int) -> Path:
        folder = self.folder / f"site{edge}"
        folder.mkdir(exist_ok=True)
        return folder

    def edge(self, edge: int, *options: str, bind: str = "tcp://127.0.0.1:*") -> Command:
        """Copies the root's file to the site, as a person does."""
        source, mine = self.run / "edges" / f"join-{edge:03d}.json", self.site(edge) / "join.json"
        eventually(source.exists, "an edge server's join file")
        shutil.copy(source, mine)
        return self.command((), "edge", "--join", str(mine), "--bind", bind, *options)

    def workers_file(self, edge: int) -> Path:
        return self.site(edge) / f"workers-{edge:03d}.json"

    def worker(self, edge: int, *options: str) -> Command:
        return self.join(*options, file=self.workers_file(edge))


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    created = Sites(tmp_path)
    yield created
    created.close()


def rows(run: RunFolder, kind: str) -> pandas.DataFrame:
    """CURVE has another framing than a worker of the same machine."""
    key = [c for c in run.ledger.columns if c != "worker"]
    selected = run.ledger[(run.ledger.kind == kind) & (run.ledger.layer != "framing")]
    return selected[key].sort_values(key).reset_index(drop=True)


def same(one: RunFolder, other: RunFolder) -> None:
    for key in ("status", "model_sha256", "clients_sha256", "took_part", "folded", "dual_mismatch"):
        assert one.summary[key] == other.summary[key], key
    for kind in ("algorithm", "edge"):
        assert rows(one, kind).equals(rows(other, kind)), kind


def test_two_sites_have_the_bits_of_one_process(sites: Sites) -> None:
    """And every byte of every hop is known. Join files are for their owner alone, and are gone at the end."""
    launched = sites.root(*SHORT, "--verify-bytes")
    edges = [sites.edge(e) for e in range(2)]
    for e in range(2):
        eventually(sites.workers_file(e).exists, "the workers' join file")
        assert stat.S_IMODE(sites.workers_file(e).stat().st_mode) == 0o600
    secrets = [pair.secret for e in range(2) for pair in credentials(sites, e).workers]
    workers = [sites.worker(0), sites.worker(0), sites.worker(1)]
    output = [ends(running) for running in (launched, *edges, *workers)]
    assert all("the run is over" in text for text in output[1:])
    run, alone = RunFolder.open(sites.run), here(sites.folder / "alone", *SHORT)
    same(run, alone)
    assert run.summary["kernel_residual"] == {"down": 0, "up": 0}
    assert run.summary["edge_residuals"] == {name: {"down": 0, "up": 0} for name in ("edge0", "edge1")}
    roles = [p["role"] for p in json.loads((run.path / "processes.json").read_text())]
    assert (roles.count("remote worker"), roles.count("remote edge server")) == (3, 2)
    assert not (run.path / "edges").exists() and not sites.workers_file(0).exists()
    left = [p.read_bytes().decode(errors="replace") for p in run.path.rglob("*") if p.is_file()]
    assert not [secret for secret in secrets for text in (*left, *output) if secret in text]


def credentials(sites: Sites, edge: int) -> EdgeCredentials:
    return EdgeCredentials.read(sites.site(edge) / "join.json")


def begun(sites: Sites, *options: str) -> tuple[Command, list[Command], list[Command]]:
    """A root, two edge servers with ports that stay, and their workers, after round 1."""
    launched = sites.root(*LONG, *options)
    edges = [sites.edge(e) for e in range(2)]
    workers = [sites.worker(0), sites.worker(0), sites.worker(1)]
    everything = over(*LONG, *options)
    launched.wait_for(f" 1/{everything[everything.index('--rounds') + 1]} ")
    return launched, edges, workers


def port_of(sites: Sites, edge: int) -> str:
    return str(json.loads(sites.workers_file(edge).read_text())["url"])


@pytest.mark.slow
def test_an_edge_server_that_is_killed_and_comes_again_changes_nothing(sites: Sites) -> None:
    """Its workers wait for it, and come back to it."""
    launched, edges, workers = begun(sites)
    bind = port_of(sites, 0)
    edges[0].kill()
    launched.wait_for("edge server 0 is gone: its connection was lost")
    edges[0] = sites.edge(0, bind=bind)
    for running in (launched, *edges, *workers):
        ends(running)
    same(RunFolder.open(sites.run), here(sites.folder / "alone", *LONG))


@pytest.mark.slow
def test_an_edge_server_that_hangs_joins_again(sites: Sites) -> None:
    """Stopped for longer than its lease: the root gives it and its workers up, and takes them in again."""
    launched, edges, workers = begun(sites, "--lease", "3")
    edges[0].process.send_signal(signal.SIGSTOP)
    launched.wait_for("edge server 0 is gone: was silent for 3 s")
    launched.wait_for("worker 0 is gone: its edge server has ended")
    edges[0].process.send_signal(signal.SIGCONT)
    output = [ends(running) for running in (launched, *edges, *workers)]
    assert "had given this worker up; joining again" in output[1]
    same(RunFolder.open(sites.run), here(sites.folder / "alone", *LONG))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_made_good_by_another_of_its_site(sites: Sites) -> None:
    launched, edges, workers = begun(sites)
    workers[2].kill()  # the only one behind its edge server
    launched.wait_for("worker 2 is gone: its connection was lost")
    workers[2] = sites.worker(1)
    launched.wait_for("round 3/8")
    workers[0].kill()  # worker 0 or 1: they take the free seats
    for running in (launched, *edges, *workers[1:]):
        ends(running)
    same(RunFolder.open(sites.run), here(sites.folder / "alone", *LONG))


@pytest.mark.slow
def test_a_worker_whose_key_is_revoked_at_the_root_is_out(sites: Sites) -> None:
    """Its edge server does not let it in again either: it ends at once, while the run goes on."""
    many = ("--rounds", "40")
    launched, edges, workers = begun(sites, *many)
    answer("revoke", str(sites.run), "1", code=0)
    launched.wait_for("worker 1 is gone: its connection was lost")
    out = [running for running in workers[:2] if "does not accept this key" in "".join(running.output())]
    assert len(out) == 1
    for running in (launched, *edges, *(running for running in workers if running not in out)):
        ends(running)
    same(RunFolder.open(sites.run), here(sites.folder / "alone", *LONG, *many))


FILE = """
[edges]
north = "0-3"
south = "4-5"
"""


@pytest.mark.slow
def test_a_tree_in_a_file_may_lie_anywhere_but_must_be_the_same(sites: Sites) -> None:
    there, copy, other = (sites.folder / name for name in ("there.toml", "copy.toml", "other.toml"))
    there.write_text(FILE)
    copy.write_text(FILE)
    other.write_text(FILE.replace("0-3", "0-2").replace("4-5", "3-5"))
    options = ("--algo", "fedavg", "--rounds", "2", "--model", "logistic", "--clients", "6")
    launched = sites.root(*options, "--tree", str(there), workers=2)
    launched.wait_for("2 remote workers behind")
    alone = here(sites.folder / "alone", *options, "--tree", str(there))
    there.unlink()
    assert "say where a copy of the run's --tree lies here" in ends(sites.edge(0), 2)
    refused = sites.edge(0, "--tree", str(other))
    assert "its tree of edge servers has the sha256" in ends(refused, 4)
    edges = [sites.edge(e, "--tree", str(copy)) for e in range(2)]
    workers = [sites.worker(e, "--tree", str(copy)) for e in range(2)]
    for running in (launched, *edges, *workers):
        ends(running)
    same(RunFolder.open(sites.run), alone)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--workers", "2", "--remote-workers", "2"), "leave --workers out"),
        (("--remote-workers", "1"), "2 edge servers need --remote-workers 2 at least"),
        (("--remote-workers", "2", "--keys", "keys.json"), "--keys are of a run without edge servers"),
    ],
)
def test_a_mistake_at_the_root_is_one_line(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    how = ("--edge-processes", "--bind", "tcp://127.0.0.1:*", "--out", str(tmp_path / "run"), *options)
    assert says in answer("launch", *SHORT, *how)
    assert not (tmp_path / "run").exists()


PAIR = KeyPair.new()
FAR = (PAIR.public, 1 << 20, 0, 1, PAIR, PAIR, (PAIR,), 0)
"""server_key, max_frame, edge, seat, own, port, workers, first."""


def test_a_mistake_at_an_edge_server_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "join.json"
    bind = ("--bind", "tcp://127.0.0.1:*")
    assert "No such file" in answer("edge", "--join", str(file), *bind)
    file.write_text("{}")
    file.chmod(0o644)
    assert "others can read its keys" in answer("edge", "--join", str(file), *bind)
    file.chmod(0o600)
    assert "is not an edge server's join file of fedsim" in answer("edge", "--join", str(file), *bind)
    EdgeCredentials(1, "run", "tcp://127.0.0.1:1", *FAR).write(file)
    assert "is no tcp://ADDRESS:PORT" in answer("edge", "--join", str(file), "--bind", "127.0.0.1")
    unanswered = answer("edge", "--join", str(file), *bind, "--patience", "0.5", code=1)
    assert "no coordinator with the key of the join file answered at tcp://127.0.0.1:1" in unanswered


class Root:
    """The root's end of a connection: it keeps what an edge server sends."""

    def __init__(self) -> None:
        self.got: list[Envelope] = []

    def send(self, envelope: Envelope) -> None:
        self.got.append(envelope)

    offer = send

    def close(self, linger: float) -> None:
        self.got = [envelope for envelope in self.got if envelope.header.kind != "heartbeat"]


@pytest.mark.parametrize("where", ["Scratch", "build_problem", "announce", "EdgeServer"])
def test_the_root_hears_of_any_error_in_one_line(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an error that fedsim does not foresee; the edge server's own output has its traceback."""

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("seven")

    for name in ("build_problem", "announce"):
        monkeypatch.setattr(remote, name, lambda *_, **__: None)
    monkeypatch.setattr(RemoteEdge, "_described", lambda *_: "")
    monkeypatch.setattr(remote, where, fails)
    credentials = EdgeCredentials(1, "run", "tcp://127.0.0.1:1", *FAR)
    edge = RemoteEdge(credentials, credentials.url, "tcp://127.0.0.1:*", tmp_path / "workers", None, 1.0)
    root, welcome = Root(), messages.welcome("run", messages.WorkerConfig({}))
    with pytest.raises(KeyError):
        edge._take_part(root, welcome, print)  # type: ignore[arg-type]
    [failed] = root.got
    assert failures.reason(failed) == "KeyError: 'seven'"


@pytest.mark.parametrize("ready", [False, True])
def test_a_remote_edge_server_that_fails_may_join_again(ready: bool) -> None:
    """If it was ready, the root gives it up at once and not when its lease is over."""
    notes: list[str] = []
    registration = Registration(messages.WorkerConfig({}), messages.WorkerManifest("", {}), 3)
    registration.ready = {2} if ready else set()
    members = Membership(
        Workers(Mock(), Mock(), registration, Timeouts(60.0, 60.0, 60.0, remote=True), edges=True),
        *(Mock(), Mock(), Mock(left=lambda worker, why: notes.append(why)), Mock()),
    )
    failed = messages.failed("run", KeyError("seven"))
    if ready:
        with pytest.raises(ProtocolViolation, match=r"^failed \(KeyError: 'seven'\)$"):
            members.failed(2, failed)
    else:
        members.failed(2, failed)
        assert notes == ["could not set itself up: KeyError: 'seven'"]
        assert registration.refused == {2: "KeyError: 'seven'"}
