"""Runs on engines: node agents, ranks of torchrun and mpirun, and a real Slurm where its commands exist."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsim.errors import Interrupted, TaskError, UsageError
from fedsim.experiment import Experiment
from launch.configuration.config import Overrides
from launch.configuration.execution import Execution
from launch.engines import ray as ray_engine
from launch.engines.job import Job
from launch.engines.options import ENGINES as NAMES, EngineOptions
from launch.engines.ray import Ray
from launch.engines.slurm import Slurm, array_script
from launch.engines.submit import ENGINES
from launch.processes.node import Node
from launch.results.report import page_of
from launch.runs.folder import RunFolder
from launch.sweep.task import Task, Tasks
from tests.support import slurm_cluster
from tests.support.commands import DEADLINE, Command, fedsim, start
from tests.support.federation import Federation, ends, eventually, same_bits
from tests.support.process_tree import alive, children_of, left_over
from tests.support.ray_cluster import RayCluster
from workers.coordinator.worker_pool import ProcessExit
from workers.transport.eventfd import Wakeup
from workers.transport.join_credentials import JoinCredentials

EXPERIMENT = ("--algo", "fedlap_cov", "--clients", "8", "--rounds", "4", "--model", "logistic")
SWEEP = (
    *("--over", "algo=fedavg,fedlap_cov", "--seeds", "0-2", "--clients", "4", "--rounds", "4"),
    *("--set", "local.epochs=10"),
)
SLOW = ("--algo", "fedlap_cov", "--clients", "8", "--rounds", "6", "--set", "local.epochs=20")


def node(federation: Federation, *options: str, **env: str) -> Command:
    eventually(federation.join_credentials.exists, "join.json")
    return federation.command((), "node", "--join", str(federation.join_credentials), *options, **env)


def workers_of(agent: Command) -> list[int]:
    """The processes below an agent that are no fork server: they have no children."""
    return [pid for pid in children_of(agent.process.pid) if not children_of(pid)]


# ---- workers here and elsewhere


@pytest.mark.process
@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "tcp://0.0.0.0:*"])
def test_workers_here_and_elsewhere_share_a_run(federation: Federation, bind: str) -> None:
    federation.bind = bind
    launched = federation.launch(*EXPERIMENT, "--workers", "2", "--verify-bytes", workers=1)
    eventually(federation.join_credentials.exists, "join.json")
    port = JoinCredentials.read(federation.join_credentials).url.rpartition(":")[2]
    joined = federation.join(
        "--connect", f"tcp://127.0.0.1:{port}", "--seat", "auto", RANK="0", SLURM_JOB_ID="7"
    )
    output = ends(launched)
    assert "residual 0" in output and "2 workers and 1 remote worker" in output
    ends(joined)
    run = RunFolder.open(federation.run)
    same_bits(run, federation.alone(*EXPERIMENT))
    assert set(run.ledger[run.ledger.kind == "algorithm"].worker) == {0, 1, 2}
    rows = [row for row in run.processes if row["role"] == "remote worker"]
    assert {row["index"]: row["engine"] for row in rows} == {0: "slurm job 7", 1: "", 2: ""}
    assert all(row["node"] == platform.node() and row["device"].startswith("cpu ") for row in rows)
    assert not [*run.path.glob("join*.json")] and not left_over(run.path)
    assert "slurm job 7" in page_of(run).html()


@pytest.mark.process
def test_a_mixed_run_goes_on_with_as_many_workers_here_as_before(federation: Federation) -> None:
    launched = federation.launch(*SLOW, "--workers", "1", workers=1)
    federation.join()
    eventually(lambda: metrics(federation.run) >= 2, "a round")
    launched.process.kill()
    launched.process.wait()
    eventually(
        lambda: not [p for p in left_over(federation.run) if "join-here" in p], "the end of its own agent"
    )
    first = federation.join_credentials.read_bytes()
    resumed = federation.command((), "resume", str(federation.run))
    federation.await_new_keys(first)
    federation.join()
    assert "1 worker and 1 remote worker" in ends(resumed)
    same_bits(RunFolder.open(federation.run), federation.alone(*SLOW))


# ---- node agents


@pytest.mark.process
def test_two_node_agents_carry_a_run_with_the_bits_of_one_process(federation: Federation) -> None:
    launched = federation.launch(*EXPERIMENT, "--verify-bytes", workers=4)
    agents = [node(federation, "--workers", "2", "--seat", "auto", RANK=str(i)) for i in range(2)]
    assert "residual 0" in ends(launched)
    for agent in agents:
        assert "2 workers" in ends(agent)
    run = RunFolder.open(federation.run)
    same_bits(run, federation.alone(*EXPERIMENT))
    assert set(run.ledger[run.ledger.kind == "algorithm"].worker) == {0, 1, 2, 3}


@pytest.mark.process
def test_an_agent_starts_a_killed_worker_again_and_ends_with_its_workers(federation: Federation) -> None:
    launched = federation.launch(*SLOW, workers=2)
    agent = node(federation, "--workers", "2")
    eventually(lambda: len(workers_of(agent)) == 2, "two workers")
    eventually((federation.run / "metrics.jsonl").exists, "a round")
    os.kill(workers_of(agent)[0], signal.SIGKILL)
    ends(launched)
    assert "was killed by SIGKILL; it is started again" in ends(agent)
    same_bits(RunFolder.open(federation.run), federation.alone(*SLOW))


def test_an_agent_starts_a_worker_again_three_times_and_then_gives_up(tmp_path: Path) -> None:
    """As docs/clusters.md says, of an agent's workers and of the script's node agents."""
    ended, wakeup = ProcessExit(0, "was killed by SIGKILL", "", status=-9), Wakeup()
    wakeup.set()
    started: list[int] = []
    supervisor = SimpleNamespace(
        fds=lambda: [wakeup.fd],
        check=lambda ready: ended,
        replace=lambda worker, address: started.append(worker),
    )
    with pytest.raises(TaskError, match="worker process 0 was killed by SIGKILL"):
        Node(tmp_path, 1)._watch(supervisor, 1)  # type: ignore[arg-type]
    wakeup.close()
    assert started == [0] * 3 and "for attempt in 0 1 2 3; do" in Slurm().plan(job(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_agent_leaves_no_process(federation: Federation, how: signal.Signals) -> None:
    launched = federation.launch(*SLOW, workers=2)
    agent = node(federation, "--workers", "2")
    eventually(lambda: len(workers_of(agent)) == 2, "two workers")
    below = children_of(agent.process.pid)
    agent.process.send_signal(how)
    agent.process.wait(DEADLINE)
    eventually(lambda: not any(map(alive, below)), "their end")
    second = node(federation, "--workers", "2")
    ends(launched)
    ends(second)


@pytest.mark.process
def test_an_agent_whose_worker_is_refused_says_why_and_ends_with_4(federation: Federation) -> None:
    federation.launch(*EXPERIMENT, workers=2)
    agent = node(federation, "--workers", "1", "--data-dir", str(federation.folder), "--seat", "5")
    assert "not 5 to 5" in ends(agent, 2)
    both = node(federation, "--workers", "3")
    assert "all 2 workers of the run have joined already" in ends(both, 4)


# ---- ranks of other starters


@pytest.mark.process
@pytest.mark.parametrize(
    "starter",
    [
        ["torchrun", "--nproc-per-node", "2", "--no-python"],
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    ],
    ids=lambda starter: str(starter[0]),
)
def test_a_starters_ranks_are_the_workers(federation: Federation, starter: list[str]) -> None:
    program = shutil.which(starter[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, f"{starter[0]} is in torch or in the extra test"
    launched = federation.launch(*EXPERIMENT)
    eventually(federation.join_credentials.exists, "join.json")
    worker = [sys.executable, "-m", "launch", "worker", "--join", str(federation.join_credentials)]
    done = subprocess.run(
        [program, *starter[1:], *worker, "--seat", "auto"], timeout=DEADLINE, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    ends(launched)
    same_bits(RunFolder.open(federation.run), federation.alone(*EXPERIMENT))


# ---- Ray


@pytest.fixture
def ray_cluster() -> Iterator[RayCluster]:
    created = RayCluster()
    yield created
    created.close()


def on_ray(cluster: RayCluster, run: Path, *options: str) -> Command:
    return start(
        *("launch", "--on", "ray", "--nodes", "2", "--workers", "4", "--out", str(run)),
        *("--engine-option", f"address={cluster.address}", *options),
    )


@pytest.mark.process
@pytest.mark.slow
def test_ray(ray_cluster: RayCluster, tmp_path: Path, undisturbed: Callable[..., RunFolder]) -> None:
    """The bits of one process: undisturbed, and after a node with two of four workers is gone."""
    alone = undisturbed(*SLOW)
    for lost in (False, True):
        run = tmp_path / f"run-{lost}"
        carried = on_ray(ray_cluster, run, *SLOW, "--verify-bytes" if not lost else "--quiet")
        if lost:
            eventually(lambda run=run: metrics(run) >= 2, "two rounds")  # type: ignore[misc]
            ray_cluster.tell("remove 0")
        output = ends(carried)
        assert lost or "residual 0" in output
        same_bits(RunFolder.open(run), alone)
        assert not left_over(run)
        rows = [row for row in RunFolder(run).processes if row["role"] == "remote worker"]
        assert {row["engine"] for row in rows} == {"ray"}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_on_ray_that_is_ended_leaves_nothing_and_goes_on(
    ray_cluster: RayCluster, tmp_path: Path, how: signal.Signals, undisturbed: Callable[..., RunFolder]
) -> None:
    run = tmp_path / "run"
    first = on_ray(ray_cluster, run, *SLOW)
    eventually(lambda: metrics(run) >= 2, "two rounds")
    first.process.send_signal(how)
    first.wait()
    first.kill()
    eventually(lambda: not left_over(run), "the end of its processes")
    assert "continues after round" in ends(on_ray(ray_cluster, run, *SLOW))
    same_bits(RunFolder.open(run), undisturbed(*SLOW))


def test_without_a_cluster_or_with_an_unknown_option_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="address=auto"):
        Ray().submit(job(tmp_path, options={"partition": "gpu"}))
    assert "2 x {'CPU': 2, 'GPU': 1.0}" in Ray().plan(job(tmp_path, gpus_per_worker=0.5))
    nowhere = ("--engine-option", "address=127.0.0.1:1")
    assert "no cluster at" in fedsim("launch", "--on", "ray", *nowhere, "--out", str(tmp_path / "r"), code=2)


@pytest.mark.parametrize("deaf", [False, True], ids=["listens", "deaf"])
@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (RuntimeError("the head is gone"), TaskError, "Ray failed (the head is gone)"),
        (KeyError("a defect"), KeyError, "a defect"),
        (KeyboardInterrupt(), Interrupted, "the same command with --out"),
    ],
    ids=["Ray", "a defect", "Ctrl-C"],
)
def test_where_ray_fails_the_coordinator_is_told_to_stop_and_is_killed_if_it_does_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    error: type[BaseException],
    words: str,
    deaf: bool,
) -> None:
    """Unasked, a coordinator waits ten minutes for its workers, or goes on with those that it has."""
    ready = tmp_path / "ready"
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN); " if deaf else ""
    program = f"{ignore}open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(20); sys.exit(7)"
    command = [sys.executable, "-c", f"import os, signal, sys, time; {program}"]

    def fail(*_: object, **__: object) -> None:
        eventually(lambda: ready.exists() and bool(ready.read_text()), "the coordinator")
        raise failure

    fake = SimpleNamespace(
        util=SimpleNamespace(placement_group=fail),
        exceptions=SimpleNamespace(RayError=AssertionError),
        shutdown=lambda: None,
    )
    monkeypatch.setattr(ray_engine, "connected", lambda options: fake)
    monkeypatch.setattr(ray_engine, "STOP", 0.5 if deaf else 15.0)
    monkeypatch.setattr(ray_engine, "_coordinator", lambda *_: command)
    began = time.monotonic()
    with pytest.raises(error, match=re.escape(words)):
        Ray().submit(job(tmp_path))
    assert time.monotonic() - began < 15 and not alive(int(ready.read_text()))


# ---- Slurm


def digests(runs: Path) -> dict[str, tuple[str, str]]:
    """Of the runs of a sweep, by folder."""
    signed = {path.parent.name: RunFolder.open(path.parent).summary for path in runs.glob("*/sweep.json")}
    return {name: (s["model_sha256"], s["clients_sha256"]) for name, s in signed.items()}


def job(folder: Path, **changes: object) -> Job:
    tables = {"experiment": {"algo": "fedavg", "rounds": 2}, "hyperparameters": {"local.lr": 1e-05}}
    return Job(**{"run": folder / "a run", "tables": tables, "nodes": 2, "workers": 4} | changes)  # type: ignore[arg-type]


def test_the_script_is_one_that_bash_reads_and_the_options_come_last(tmp_path: Path) -> None:
    script = Slurm().plan(job(tmp_path, gpus_per_worker=0.5, options={"time": "1:00", "exclusive": ""}))
    (tmp_path / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=True, timeout=DEADLINE)
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives[-2:] == ["#SBATCH --time=1:00", "#SBATCH --exclusive"]
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:TERM@90", "#SBATCH --gres=gpu:1"} <= set(directives)
    assert "--gres=gpu:1 --overlap" in script and "'" + str(tmp_path / "a run") + "'" in script


def read_by_sbatch(script: str) -> list[str]:
    """The options of a script, which has one in a line. In double quotes, sbatch reads what a shell reads."""
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    words = [shlex.split(line, comments=True) for line in lines]
    assert all(len(word) == 1 for word in words), words
    return [word for (word,) in words]


def test_sbatch_reads_each_option_whole(tmp_path: Path) -> None:
    """Also where a path or a value has spaces, quotes and #; %j in a path is no number of a job."""
    folder = tmp_path / 'my "runs" #1'
    run = folder / "it's 50%j \\n"
    options = read_by_sbatch(
        Slurm().plan(job(tmp_path, run=run, options={"comment": "a b", "exclusive": ""}))
    )
    assert f"--output={folder}/it's 50%%j \\n.job/job.log" in options
    assert {f"--job-name=fedsim-{run.name}", "--comment=a b", "--exclusive"} <= set(options)
    tasks = Tasks("pool", Execution(), (Task("0", "run 0", Experiment(threads=1)),))
    script = array_script(tasks, EngineOptions("slurm", options=("comment=a b",)), folder / "x 1.json", None)
    assert {f"--output={folder}/x 1-%a.log", "--comment=a b"} <= set(read_by_sbatch(script))
    (tmp_path / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sh")], check=True, timeout=DEADLINE)


def test_what_the_job_reads_is_what_was_said(tmp_path: Path) -> None:
    asked = job(tmp_path)
    asked.write_config()
    assert tomllib.loads(asked.config.read_text()) == dict(asked.tables)
    overrides = Overrides.of({"config": str(asked.config)})
    assert overrides.experiment["rounds"] == 2 and overrides.hyperparameters == {"local.lr": 1e-05}


def test_a_link_in_the_place_of_a_jobs_file_is_replaced(tmp_path: Path) -> None:
    planned, target = job(tmp_path), tmp_path / "profile"
    planned.folder.mkdir()
    planned.config.symlink_to(target)
    planned.write_config()
    assert not planned.config.is_symlink() and not target.exists()


@pytest.mark.parametrize("options", [{"a\nb": "c"}, {"time": "1\n#SBATCH --x"}])
def test_an_option_cannot_end_its_line(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        Slurm().plan(job(tmp_path, options=options))


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_keeps_the_contract(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What launch.engines.job.Engine promises, of each engine."""
    engine = ENGINES[name]()
    options = {"image": "i"} if name == "kubernetes" else {}
    described = engine.plan(job(tmp_path, options=options))
    assert "--workers 2" in described or "--workers\n        - '2'" in described, "workers of one node"
    assert "remote-workers 4" in described and "join-within 600" in described
    assert not [*tmp_path.iterdir()], "a plan leaves nothing"
    with pytest.raises(UsageError, match="--workers 4 on --nodes 3"):
        engine.plan(job(tmp_path, options=options, nodes=3))
    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch and kubectl
    absent = {"address": "127.0.0.1:1"} if name == "ray" else options
    with pytest.raises(UsageError, match=f"--on {name}: "):
        engine.submit(job(tmp_path, options=absent))
    assert not [*tmp_path.iterdir()], "nor does a submission that is refused"
    assert set(ENGINES) == set(NAMES)


def test_options_of_engines_need_one(tmp_path: Path) -> None:
    for arguments in (
        ("launch", "--nodes", "2"),
        ("launch", "--image", "i"),
        ("launch", "--on", "ray", "--image", "i"),
        ("sweep", "--seeds", "0", "--gpus-per-worker", "1"),
    ):
        assert "goes with --on" in fedsim(*arguments, code=2).replace("go with", "goes with")


def test_without_runs_a_sweep_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch: a submission would be an error
    fedsim("sweep", *SWEEP, "--runs", str(tmp_path / "runs"), "--no-run", "--on", "slurm")
    assert not (tmp_path / "runs" / ".jobs").exists()


def test_an_array_has_an_element_for_each_run(tmp_path: Path) -> None:
    tasks = Tasks(
        "pool", Execution(), tuple(Task(str(i), f"run {i}", Experiment(threads=2)) for i in range(5))
    )
    engine = EngineOptions("slurm", options=("partition=gpu",), gpus_per_worker=0.5)
    script = array_script(tasks, engine, tmp_path / "a b.json", jobs=3)
    assert {"#SBATCH --array=0-4%3", "#SBATCH --cpus-per-task=2", "#SBATCH --gres=gpu:1"} <= set(
        script.splitlines()
    )
    assert "#SBATCH --partition=gpu" in script
    with pytest.raises(UsageError, match="one line"):
        array_script(tasks, EngineOptions("slurm", options=("a\nb",)), tmp_path / "x", None)


@pytest.fixture
def cluster() -> Iterator[slurm_cluster.Cluster]:
    if lacking := slurm_cluster.missing():
        pytest.skip(f"no Slurm here: {', '.join(lacking)}")
    created = slurm_cluster.Cluster(2)
    try:
        created.start()
        yield created
    finally:
        created.stop()


def metrics(run: Path) -> int:
    """Rounds that have been evaluated."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("interruption", ["none", "step", "requeue", "term", "kill"])
def test_slurm(
    cluster: slurm_cluster.Cluster, tmp_path: Path, interruption: str, undisturbed: Callable[..., RunFolder]
) -> None:
    """Two nodes; a step is killed, the job is requeued or told to end, or its coordinator is killed and
    the job submitted again: the bits of one process, and no process is left."""
    run = tmp_path / "run"
    paths = {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")}
    verified = ("--verify-bytes",) if interruption == "none" else ()
    command = ("launch", "--on", "slurm", "--nodes", "2", "--workers", "4", "--out", str(run), *SLOW)
    command += verified
    assert "job 1" in ends(start(*command, **paths))
    log = run.with_name("run.job") / "job.log"
    if interruption != "none":
        eventually(lambda: metrics(run) >= 2, "two rounds")
    if interruption == "step":
        cluster.command("scancel", "--signal=KILL", "1.0")
    if interruption == "kill":
        os.kill(coordinator_of(run), signal.SIGKILL)
        eventually(lambda: not cluster.command("squeue", "--noheader").strip(), "the end of the job")
        eventually(lambda: not left_over(run), "the end of its processes")
        assert "job 2" in ends(start(*command, **paths))
    if interruption in ("requeue", "term"):
        to_the_batch_step = ("scancel", "--batch", "--signal=TERM")
        cluster.command(*(("scontrol", "requeue") if interruption == "requeue" else to_the_batch_step), "1")
        eventually(
            lambda: "BeginTime" in cluster.command("squeue", "--format=%r"), "the job in the queue again"
        )
        until = time.monotonic() + DEADLINE  # Slurm lets a requeued job wait two minutes
        time.sleep(4)  # let it end what it kills: the end of the first batch script would end the second
        while "continues after round" not in log.read_text():
            assert time.monotonic() < until, log.read_text()
            cluster.command("scontrol", "update", "JobId=1", "StartTime=now")
            time.sleep(2)
    eventually(lambda: not cluster.command("squeue", "--noheader").strip(), "the job's end")
    result = RunFolder.open(run)
    assert result.status == "done", log.read_text()
    same_bits(result, undisturbed(*SLOW))
    assert not left_over(run)
    text = log.read_text()
    assert "residual 0" in text if verified else "continues after round" in text or interruption == "step"


def coordinator_of(run: Path) -> int:
    """The process that carries a run out."""
    return next(row["pid"] for row in RunFolder(run).processes if row["role"] == "coordinator")


@pytest.mark.process
@pytest.mark.slow
def test_a_sweep_on_slurm_is_that_of_one_machine(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    runs = ("sweep", *SWEEP, "--runs", str(tmp_path / "there"))
    paths = {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")}
    assert "job 1: 6 runs" in ends(start(*runs, "--on", "slurm", **paths))
    eventually(lambda: not cluster.command("squeue", "--noheader").strip(), "the end of the array")
    table = fedsim(*runs, "--no-run").splitlines()[-3:]
    assert table == fedsim("sweep", *SWEEP, "--runs", str(tmp_path / "here")).splitlines()[-3:]
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
