"""Remote workers: `fedsim launch --remote-workers` and `fedsim worker --join`, as real processes."""

from __future__ import annotations

import json
import signal
import socket
import stat
from html import unescape
from pathlib import Path

import msgspec
import pandas
import pytest
import torch

from launch.runs.folder import RunFolder
from tests.support.commands import fedsim
from tests.support.federation import Federation, ends, eventually, same_bits
from tests.support.relay import Relay
from workers.portable import LEAST
from workers.transport.join_credentials import JoinCredentials, KeyPair

pytestmark = pytest.mark.process

EXPERIMENT = ("--algo", "fedlap_cov", "--clients", "5", "--rounds", "6", "--model", "logistic")
SLOW = ("--algo", "fedlap_cov", "--clients", "4", "--rounds", "6", "--set", "local.epochs=30")
USERS_DATA = """
import os
import numpy as np
from fedsim.data import Dataset

def made() -> Dataset:
    draws = np.random.default_rng(int(os.environ.get("DRAWS", "0")))
    targets = np.arange(60) % 2
    inputs = (draws.normal(size=(60, 4)) + targets[:, None]).astype(np.float32)
    return Dataset("made", inputs, targets, inputs, targets, classes=2)
"""


def answer(*arguments: str, code: int = 2) -> str:
    """What a command printed that is over at once."""
    output = fedsim(*arguments, code=code)
    assert "Traceback" not in output
    return output


def test_two_workers_come_in_and_every_byte_is_known(federation: Federation) -> None:
    """The bits of a run in one process; the relay and the kernel count what the ledger says, CURVE included;
    algorithm rows differ in framing only."""
    launched = federation.launch(*EXPERIMENT, "--verify-bytes")
    eventually(federation.join_credentials.exists, "join.json")
    assert stat.S_IMODE(federation.join_credentials.stat().st_mode) == 0o600
    written_credentials = JoinCredentials.read(federation.join_credentials)
    keys = [key for pair in written_credentials.workers for key in (pair.public, pair.secret)]
    relay = Relay(int(written_credentials.url.rpartition(":")[2]))
    remote_workers = [
        federation.join("--connect", f"tcp://127.0.0.1:{relay.port}", "--worker", str(i)) for i in range(2)
    ]
    argv = [Path(f"/proc/{p.process.pid}/cmdline").read_text() for p in (launched, *remote_workers)]
    output = [ends(launched), *(ends(remote_worker) for remote_worker in remote_workers)]
    assert "residual 0" in output[0]
    assert all("the run is over" in text for text in output[1:])
    relay.close()
    assert not federation.join_credentials.exists(), "keys that open nothing any more"
    left = [p.read_bytes().decode(errors="replace") for p in federation.run.rglob("*") if p.is_file()]
    assert not [text for text in (*argv, *output, *left) for key in keys if key in text]
    run, local = RunFolder.open(federation.run), federation.alone(*EXPERIMENT)
    same_bits(run, local)
    rows = run.ledger
    booked = rows.groupby("direction")["bytes"].sum().to_dict()
    assert relay.bytes == booked
    assert run.summary["kernel_residual"] == {"down": 0, "up": 0}
    key = [c for c in rows.columns if c != "worker"]

    def own(frame: pandas.DataFrame) -> pandas.DataFrame:
        selected = frame[(frame.kind == "algorithm") & (frame.layer != "framing")][key]
        return selected.sort_values(key).reset_index(drop=True)

    assert own(rows).equals(own(local.ledger))
    assert set(rows[rows.message.isin(["state", "draft"])].kind) == {"simulation"}
    drafts = rows[(rows.message == "draft") & (rows.layer == "values")]
    assert len(drafts) == 5 * 6, "one per client and round"
    hosts = json.loads((federation.run / "processes.json").read_text())
    assert [p["role"] for p in hosts] == ["coordinator", "remote worker", "remote worker"]


def test_a_worker_that_is_killed_is_made_good_by_others_and_may_come_again(federation: Federation) -> None:
    """First one of two, then the last one; the bits are those of an undisturbed run, and what was sent twice
    is of kind retry."""
    launched = federation.launch(*SLOW)
    first, second = federation.join("--worker", "0"), federation.join("--worker", "1")
    launched.wait_for("round 1/6")
    first.process.send_signal(signal.SIGKILL)
    launched.wait_for("worker 0 is gone")
    launched.wait_for("round 2/6")
    second.process.send_signal(signal.SIGKILL)
    launched.wait_for("worker 1 is gone")
    third = federation.join()
    ends(launched)
    ends(third)
    run = RunFolder.open(federation.run)
    same_bits(run, federation.alone(*SLOW))
    assert set(run.ledger[run.ledger.kind == "retry"].message) == {"task"}
    own = run.ledger[run.ledger.kind == "algorithm"]
    assert len(own[["round", "client", "direction"]].drop_duplicates()) == 2 * 6 * 4


def test_a_connection_that_is_cut_is_made_anew(federation: Federation) -> None:
    """Cut twice in the middle of rounds: the worker joins again, and the bits are the same."""
    launched = federation.launch(*SLOW, workers=1)
    eventually(federation.join_credentials.exists, "join.json")
    port = int(JoinCredentials.read(federation.join_credentials).url.rpartition(":")[2])
    relay = Relay(port)
    remote_worker = federation.join("--connect", f"tcp://127.0.0.1:{relay.port}")
    for after in ("round 1/6", "round 3/6"):
        launched.wait_for(after)
        relay.cut()
    ends(launched)
    assert ends(remote_worker).count("was lost; joining again") == 2
    relay.close()
    run = RunFolder.open(federation.run)
    same_bits(run, federation.alone(*SLOW))
    assert run.summary["kernel_residual"] is None, "a lost connection took its counters with it"


def test_a_worker_that_was_silent_for_too_long_joins_again(federation: Federation) -> None:
    """Stopped for longer than its lease, and then going on: its connection was open all the time."""
    launched = federation.launch(*SLOW, "--lease", "1.5", workers=1)
    remote_worker = federation.join()
    launched.wait_for("round 1/6")
    remote_worker.process.send_signal(signal.SIGSTOP)
    launched.wait_for("was silent for 1.5 s")
    remote_worker.process.send_signal(signal.SIGCONT)
    ends(launched)
    assert "had given this worker up; joining again" in ends(remote_worker)
    same_bits(RunFolder.open(federation.run), federation.alone(*SLOW))


def test_a_worker_whose_key_is_revoked_is_out_at_once(federation: Federation) -> None:
    """In the middle of a round: the other takes over, the bits are the same, and it does not come back."""
    launched = federation.launch(*SLOW)
    stays = federation.join("--worker", "0")
    good, own = JoinCredentials.read(federation.join_credentials), federation.folder / "own.json"
    msgspec.structs.replace(good, workers=good.workers[1:]).write(own)  # what this machine is given
    goes = federation.join(file=own)
    launched.wait_for("round 1/6")
    assert "has no worker 7; it has workers 0 to 1" in answer("revoke", str(federation.run), "7")
    answer("revoke", str(federation.run), "1", code=0)
    launched.wait_for("worker 1 is gone: its connection was lost")
    notice = ends(goes, 4)
    assert "was lost; joining again" in notice and "does not accept this key" in notice.splitlines()[-1]
    ends(launched)
    ends(stays)
    run = RunFolder.open(federation.run)
    same_bits(run, federation.alone(*SLOW))
    assert set(run.ledger[run.ledger.kind == "retry"].message) <= {"task"}
    assert "is not being run: its keys open nothing" in answer("revoke", str(federation.run), "0")
    assert "has no remote workers" in answer("revoke", str(federation.alone(*SLOW).path), "0")
    assert "is not a run folder" in answer("revoke", str(federation.folder / "nothing"), "0")


def test_a_new_start_has_new_keys(federation: Federation) -> None:
    """After kill -9 the old join.json is there, and which of its keys were revoked; neither counts."""
    slow = ("--algo", "fedlap_cov", "--clients", "2", "--rounds", "4", "--set", "local.epochs=40")
    first = federation.launch(*slow, workers=1)
    remote_worker = federation.join("--patience", "0.5")
    first.wait_for("round 1/4")
    first.kill()
    ends(remote_worker, 1)
    old = federation.join_credentials.read_bytes()
    (federation.run / "revoked.json").write_text('{"format":1,"workers":[0]}')
    second = federation.command((), "resume", str(federation.run))
    federation.await_new_keys(old)
    ends(federation.join())
    ends(second)
    assert not (federation.run / "revoked.json").exists()
    same_bits(RunFolder.open(federation.run), federation.alone(*slow))


def test_who_must_not_come_in_is_told_why(federation: Federation) -> None:
    """A key that is not of the list, a worker that is there already, and other data: exit 4, and the run goes
    on without them: two are expected, and one of three was refused."""
    data = federation.folder / "users.py"
    data.write_text(USERS_DATA)
    launched = federation.launch(
        *("--algo", "fedavg", "--clients", "2", "--rounds", "2", "--model", "logistic"),
        *("--dataset", f"{data}:made", "--partition", "iid"),
    )
    eventually(federation.join_credentials.exists, "join.json")
    good = JoinCredentials.read(federation.join_credentials)
    forged = federation.folder / "forged.json"
    JoinCredentials(good.format, good.run, good.url, good.server_key, good.max_frame, (KeyPair.new(),)).write(
        forged
    )
    assert "does not accept this key" in ends(federation.join(file=forged), 4)
    other = ends(federation.join(DRAWS="1"), 4)
    assert "refused: its partitioned data has the digest" in other and "this run's has" in other
    both = [federation.join(), federation.join()]
    assert ends(launched).count("comes from") == 3
    for sound in both:
        ends(sound)
    assert RunFolder.open(federation.run).summary["status"] == "done"


OTHER_BITS = {"ATEN_CPU_CAPABILITY": "default"}
"""A worker with this in its environment computes other bits where the processor has more."""
needs_more_than_default = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in LEAST,
    reason="this processor has nothing beyond the default instruction set",
)


@needs_more_than_default
def test_a_worker_that_would_compute_other_bits_is_refused(federation: Federation) -> None:
    """Both digests are named, and another worker takes its place: the bits are those of one process."""
    launched = federation.launch(*EXPERIMENT)
    other = ends(federation.join(**OTHER_BITS), 4)
    assert "probe digest (cpu)" in other and "--allow-drift" in other
    sound = [federation.join(), federation.join()]
    output = ends(launched)
    for running in sound:
        ends(running)
    run, alone = RunFolder.open(federation.run), federation.alone(*EXPERIMENT)
    same_bits(run, alone)
    assert alone.manifest["platform"]["probe"]["cpu"] in other
    assert "refused: it computes other bits" in output
    assert not run.drift and "drift" not in run.summary


@needs_more_than_default
def test_with_allow_drift_it_takes_part_and_everybody_says_so(federation: Federation) -> None:
    launched = federation.launch(*EXPERIMENT, "--allow-drift")
    workers = [federation.join(**OTHER_BITS), federation.join()]
    output = ends(launched)
    for running in workers:
        ends(running)
    run, says = RunFolder.open(federation.run), "this run's bits depend on who computed what"
    assert says in output
    name = LEAST[torch.__version__.startswith("2.6.")]
    assert len(run.drift) == 1 and f"processor {name} instead of" in run.drift[0]
    assert run.summary["drift"] == list(run.drift)
    assert says in " ".join(fedsim("compare", str(federation.run), str(federation.run)).split())
    page = federation.folder / "report.html"
    fedsim("report", str(federation.run), "--out", str(page))
    assert says.replace("this", "This") in unescape(page.read_text())


def test_portable_numerics_give_these_bits_whatever_the_workers_environment(federation: Federation) -> None:
    launched = federation.launch(*EXPERIMENT, "--numerics", "portable")
    workers = [federation.join(**OTHER_BITS), federation.join()]
    for running in (launched, *workers):
        ends(running)
    alone = federation.alone(*EXPERIMENT, "--numerics", "portable")
    same_bits(RunFolder.open(federation.run), alone)
    assert "5 tasks compared, 5 identical" in fedsim("verify", str(federation.run))


USERS_ALGORITHM = """
from dataclasses import dataclass
from typing import ClassVar
from protocols.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    name: ClassVar[str] = "mine"
"""


def test_a_users_files_may_lie_anywhere_on_the_other_machine(federation: Federation) -> None:
    """They are gone from where the coordinator has read them, and --algo and --dataset say where they are."""
    there, here_ = federation.folder / "there", federation.folder / "here"
    files = {"algo.py": USERS_ALGORITHM, "data.py": USERS_DATA}
    for folder in (there, here_):
        folder.mkdir()
        for name, source in files.items():
            (folder / name).write_text(source)
    launched = federation.launch(
        *("--algo", f"{there}/algo.py:Mine", "--dataset", f"{there}/data.py:made", "--partition", "iid"),
        *("--clients", "2", "--rounds", "2", "--model", "logistic"),
        workers=1,
    )
    eventually(federation.join_credentials.exists, "join.json")
    launched.wait_for("1 remote worker ")
    for name in files:
        (there / name).unlink()
    joined = federation.join("--algo", str(here_ / "algo.py"), "--dataset", str(here_ / "data.py"))
    assert "the run is over" in ends(joined)
    ends(launched)
    assert RunFolder.open(federation.run).summary["status"] == "done"


def test_a_run_whose_only_worker_is_refused_ends_soon_and_says_why(federation: Federation) -> None:
    """Not after the whole --join-within. The worker and the coordinator give the same reason."""
    there, other = federation.folder / "algo.py", federation.folder / "other.py"
    there.write_text(USERS_ALGORITHM)
    other.write_text("# another\n" + USERS_ALGORITHM)
    launched = federation.launch(
        *("--algo", f"{there}:Mine", "--clients", "2", "--model", "logistic", "--join-within", "600"),
        workers=1,
    )
    eventually(federation.join_credentials.exists, "join.json")
    launched.wait_for("1 remote worker ")
    why = f"its {there} has the sha256"
    assert f"refused: {why}" in ends(federation.join("--algo", str(other)), 4)
    output = ends(launched, 4)
    assert "no missing worker can take part; waiting 10 s for others" in output
    assert "0 of 1 workers can take part; refused: worker 0: " + why in output


@pytest.mark.parametrize("fault", ["cut", "mute"])
def test_a_worker_that_does_not_hear_of_the_end_ends_by_itself(federation: Federation, fault: str) -> None:
    """Behind a network that carries nothing down, or that is cut while the run ends: the worker learns
    nothing of the end, ran for as long as its patience before, and where nothing was cut without end."""
    slow = ("--algo", "fedavg", "--clients", "4", "--rounds", "4", "--set", "local.epochs=30", "--lease", "3")
    launched = federation.launch(*slow)
    eventually(federation.join_credentials.exists, "join.json")
    relay = Relay(int(JoinCredentials.read(federation.join_credentials).url.rpartition(":")[2]))
    deaf = federation.join("--connect", f"tcp://127.0.0.1:{relay.port}", "--patience", "600")
    hears = federation.join()
    launched.wait_for("round 1/4")
    relay.mute("down", 600.0)
    ends(launched)
    if fault == "cut":
        relay.cut()
    output = ends(deaf, 1)
    assert ("was lost" if fault == "cut" else "nothing was received from") in output
    assert "nobody has answered" in output and "the run is over, or its coordinator has ended" in output
    ends(hears)
    relay.close()
    same_bits(RunFolder.open(federation.run), federation.alone(*slow))


def test_a_run_over_ipv6_has_the_same_bits_and_every_byte_is_known(federation: Federation) -> None:
    federation.bind = "tcp://[::1]:*"
    if not _has_ipv6():
        refused = ends(federation.launch(*EXPERIMENT, workers=1), 2)
        assert "--bind tcp://[::1]:*: " in refused and "address of this machine" in refused
        return
    launched = federation.launch(*EXPERIMENT, "--verify-bytes", workers=1)
    eventually(federation.join_credentials.exists, "join.json")
    url = JoinCredentials.read(federation.join_credentials).url
    assert url.startswith("tcp://[::1]:")
    worker = federation.join("--connect", url)
    output = ends(launched)
    assert f"waiting for 1 worker at {url}" in output and "residual 0" in output
    assert "the run is over" in ends(worker)
    same_bits(RunFolder.open(federation.run), federation.alone(*EXPERIMENT))


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_an_interrupted_run_tells_its_workers(federation: Federation) -> None:
    """They would look for its coordinator."""
    slow = ("--algo", "fedavg", "--clients", "4", "--rounds", "50", "--set", "local.epochs=30")
    launched = federation.launch(*slow, workers=1)
    worker = federation.join("--patience", "600")
    launched.wait_for(" 1/50 ")
    launched.process.send_signal(signal.SIGINT)
    ends(launched, 130)
    assert "the run was interrupted; once it is resumed" in ends(worker, 130)


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = answer("launch", "--remote-workers", "2")
    assert "--remote-workers 2 needs an address for them: add --bind tcp://ADDRESS:PORT" in output
    output = answer("launch", "--remote-workers", "2", "--bind", "tcp://192.0.2.1:1")
    assert "--bind tcp://192.0.2.1:1" in output
    output = answer("worker", "--join", "nothing.json")
    assert "nothing.json" in output
    open_file = tmp_path / "open.json"
    open_file.write_text("{}")
    open_file.chmod(0o644)
    output = answer("worker", "--join", str(open_file))
    assert "chmod 600" in output
    bind = ("--bind", "tcp://127.0.0.1:*")
    output = answer("launch", "--remote-workers", "2", *bind, "--join-within", "0.5", code=1)
    assert "0 of 2 workers were ready after 0.5 s; missing: worker 0, worker 1" in output
