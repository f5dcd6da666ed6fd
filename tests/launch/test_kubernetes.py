"""A run on Kubernetes: its manifests against the published schemas, and what its containers run.

There is no cluster here: what a scheduler does with the manifests was never seen.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from fedsim.errors import DataError, UsageError
from launch.engines.job import Job
from launch.engines.kubernetes import LONGEST_NAME, PORT, Kubernetes, name_of
from launch.runs.folder import RunFolder
from tests.launch.test_engines import SLOW, metrics
from tests.support.commands import Command, fedsim
from tests.support.federation import ends, eventually, same_bits
from tests.support.process_tree import left_over
from workers.transport.join_credentials import JoinCredentials, KeyPair, read_private
from workers.transport.run_keys import KEYS_FORMAT, RunKeys

GOLDEN = Path(__file__).parent / "kubernetes.yaml"
VERSIONS = ("1.31", "1.33", "1.37")
"""backoffLimitPerIndex is stable from 1.33 on, and on by default from 1.29."""


def job(**changes: Any) -> Job:
    tables = {"experiment": {"algo": "fedlap_cov", "rounds": 5}, "execution": {"lease": 30.0}}
    options = {"image": "registry.example/fedsim:1"}
    fields = {"run": Path("/home/me/runs/20261122_A run"), "tables": tables, "nodes": 2, "workers": 4}
    return Job(**{**fields, "options": options, **changes})


def fixed_keys(workers: int, url: str) -> RunKeys:
    pairs = [KeyPair(str(i) * 40, "x" * 40) for i in range(workers + 1)]
    return RunKeys(KEYS_FORMAT, url, pairs[-1], tuple(pairs[:-1]))


JOBS = {
    "plain": job(),
    "gpus": job(workers=8, threads=2, gpus_per_worker=0.25),
    "claims": job(
        options={"image": "i", "claim": "runs", "data": "mnist", "namespace": "ml", "memory": "900Mi"}
    ),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_have_the_published_form(name: str, version: str) -> None:
    objects = list(yaml.safe_load_all(Kubernetes().plan(JOBS[name])))
    assert len(objects) == (6 if name == "claims" else 7)
    for described in objects:
        kubernetes_validate.validate(described, version, strict=True)
        assert re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", described["metadata"]["name"])
    wrong = objects[-1] | {"spec": objects[-1]["spec"] | {"backoffLimitPerIndices": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_manifests_are_these() -> None:
    """The golden file changes only with a manifest: read its difference. This module, run, writes it."""
    assert Kubernetes(fixed_keys).plan(JOBS["plain"]) == GOLDEN.read_text()


def test_resources_claims_and_data_stand_where_they_belong() -> None:
    nodes = list(yaml.safe_load_all(Kubernetes().plan(JOBS["gpus"])))[-1]["spec"]["template"]["spec"]
    assert nodes["containers"][0]["resources"]["limits"] == {"cpu": "8", "nvidia.com/gpu": "1"}
    objects = list(yaml.safe_load_all(Kubernetes().plan(JOBS["claims"])))
    assert {o["metadata"]["namespace"] for o in objects} == {"ml"}
    coordinator, nodes = (o["spec"]["template"]["spec"] for o in objects[-2:])
    assert coordinator["volumes"][1]["persistentVolumeClaim"] == {"claimName": "runs"}
    for pod in (coordinator, nodes):
        [container] = pod["containers"]
        assert container["env"] == [{"name": "FEDSIM_DATA", "value": "/data"}]
        assert container["volumeMounts"][-1] == {"name": "data", "mountPath": "/data", "readOnly": True}
    assert nodes["containers"][0]["resources"]["limits"]["memory"] == "1800Mi"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "--image IMAGE"),
        ({"image": "i", "partition": "gpu"}, "image, namespace, claim"),
        ({"image": "i", "memory": "much"}, "900Mi"),
        ({"image": "i", "memory": "900K"}, "900Mi"),
    ],
)
def test_an_option_that_is_wrong_is_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Kubernetes().plan(job(options=options))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fashion-mnist-heterogeneous-fedlap-cov-delta-0.1-seed-0",) * 2,
        ("lr_0.1", "LR-0-1"),
        ("lr_0.1", "lr-0-1"),
        ("a", "a-node"),
        ("ä", "ö"),
    ],
)
def test_two_runs_share_no_object(first: str, second: str) -> None:
    """Also if names are cut, or differ only in characters that an object's name cannot have."""
    second = second.replace("seed-0", "seed-1")
    names = []
    for name in (first, second):
        described = job(run=Path("/runs") / name)
        assert len(name_of(described)) <= LONGEST_NAME
        objects = yaml.safe_load_all(Kubernetes(fixed_keys).plan(described))
        names.append({(o["kind"], o["metadata"]["name"]) for o in objects})
        assert all(re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])", name) for _, name in names[-1])
    assert not names[0] & names[1]


def test_a_name_that_kubernetes_accepts_is_kept_and_any_other_one_stays_the_same() -> None:
    assert name_of(job(run=Path("/runs/20261122-a"))) == "fedsim-20261122-a"
    assert name_of(job()) == name_of(job(run=Path("/elsewhere/20261122_A run"))) != "fedsim-20261122-a-run"


def test_a_node_has_its_own_keys_only() -> None:
    secrets = {o["metadata"]["name"]: o for o in yaml.safe_load_all(Kubernetes().plan(job()))}
    parts = secrets[f"{name_of(job())}-join"]["stringData"]
    read = [msgspec.json.decode(parts[f"join-{i}.json"], type=JoinCredentials) for i in range(2)]
    assert [list(r.seats) for r in read] == [[0, 1], [2, 3]]
    assert not {p.secret for p in read[0].workers} & {p.secret for p in read[1].workers}
    assert {r.url for r in read} == {f"tcp://{name_of(job())}:{PORT}"}


# ---- what the containers run


class Kubelet:
    """Mounts the volumes of a pod and starts its container as a process, as far as a test can."""

    def __init__(self, folder: Path, objects: list[dict[str, Any]], port: int) -> None:
        self.folder = folder
        self.objects = {(o["kind"], o["metadata"]["name"]): o for o in objects}
        self.jobs = [o["spec"] for o in objects if o["kind"] == "Job"]
        self.host, self.port = f"{objects[0]['metadata']['labels']['fedsim-run']}:{PORT}", port
        self.started: list[Command] = []
        (folder / "runs").mkdir(parents=True)

    def start(self, spec: dict[str, Any], index: int | None = None) -> Command:
        pod = spec["template"]["spec"]
        [container] = pod["containers"]
        folder = self.folder / f"{container['name']}-{index}"
        folder.mkdir(exist_ok=True)
        volumes = {v["name"]: v for v in pod["volumes"]}
        places = {}
        for mount in container["volumeMounts"]:
            files = self._files(volumes[mount["name"]])
            if "subPathExpr" in mount:
                own = mount["subPathExpr"].replace("$(JOB_COMPLETION_INDEX)", str(index))
                files = {Path(mount["mountPath"]).name: files[own]}
            for name, text in files.items():
                (folder / name).unlink(missing_ok=True)
                (folder / name).write_text(text.replace(self.host, f"127.0.0.1:{self.port}"))
                (folder / name).chmod(0o400)
            places[mount["mountPath"]] = self.folder / "runs" if mount["mountPath"] == "/runs" else folder
        command = [self._here(word, places) for word in container["command"]]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        env |= {} if index is None else {"JOB_COMPLETION_INDEX": str(index)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
        self.started.append(Command(process))
        return self.started[-1]

    def _here(self, word: str, places: dict[str, Path]) -> str:
        for path, folder in places.items():
            inside = folder / "join.json" if path.endswith(".json") else folder
            word = re.sub(rf"(?<![\w.-]){path}\b", str(inside), word)
        return word.replace(f"0.0.0.0:{PORT}", f"127.0.0.1:{self.port}")

    def _files(self, volume: dict[str, Any]) -> dict[str, str]:
        if "secret" in volume:
            return self.objects["Secret", volume["secret"]["secretName"]]["stringData"]
        if "projected" in volume:
            secret, config = volume["projected"]["sources"]
            return {
                **self.objects["Secret", secret["secret"]["name"]]["stringData"],
                **self.objects["ConfigMap", config["configMap"]["name"]]["data"],
            }
        return {}


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    experiment = {"algo": "fedlap_cov", "clients": 8, "rounds": 6}
    tables = {"experiment": experiment, "hyperparameters": {"local.epochs": 20}}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    described = Kubernetes().plan(job(run=tmp_path / "Some run", tables=tables))
    created = Kubelet(tmp_path / "cluster", list(yaml.safe_load_all(described)), port)
    yield created
    for command in created.started:
        command.kill()


@pytest.mark.process
@pytest.mark.slow
def test_its_containers_carry_the_run_with_the_bits_of_one_process(
    kubelet: Kubelet, tmp_path: Path, undisturbed: Callable[..., RunFolder]
) -> None:
    """Also after the coordinator and a node were killed, and started again as the Jobs do."""
    coordinator, nodes = kubelet.jobs
    run = kubelet.folder / "runs" / "Some run"
    first = kubelet.start(coordinator)
    agents = [kubelet.start(nodes, index) for index in range(2)]
    eventually(lambda: metrics(run) >= 2, "two rounds")
    first.process.send_signal(signal.SIGTERM)  # a node that is drained
    ends(first, 130)
    for agent in agents:
        ends(agent, 130)
    agents = [kubelet.start(nodes, index) for index in range(2)]
    second = kubelet.start(coordinator)
    second.wait_for("continues after round")
    before = metrics(run)
    eventually(lambda: metrics(run) > before, "a round")
    agents[1].kill()
    second.kill()
    agents[1] = kubelet.start(nodes, 1)
    assert "continues after round" in ends(kubelet.start(coordinator))
    for agent in agents:
        ends(agent)
    result = RunFolder.open(run)
    same_bits(result, undisturbed(*SLOW))
    assert not left_over(run)
    rows = [row for row in RunFolder(run).processes if row["role"] == "remote worker"]
    assert {row["engine"] for row in rows} == {"kubernetes"}


# ---- keys that were made before the run


def test_keys_are_of_one_run_and_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(msgspec.json.encode(RunKeys.new(3)))
    with pytest.raises(UsageError, match="chmod 600"):
        RunKeys.read(path, 3)
    path.chmod(0o600)
    assert RunKeys.read(path, 3).join("run", "portable", "tcp://a:1").url == "tcp://a:1"
    with pytest.raises(UsageError, match="keys for 3 workers, this run has 4"):
        RunKeys.read(path, 4)
    path.write_text("{}")
    with pytest.raises(DataError, match="not a file of keys"):
        RunKeys.read(path, 3)
    assert "--bind and --keys" in fedsim("launch", "--keys", str(path), code=2)


@pytest.mark.parametrize(("mode", "opened"), [(0o440, True), (0o400, True), (0o460, False), (0o444, False)])
def test_a_secret_that_root_has_mounted_for_a_group_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, opened: bool
) -> None:
    path = tmp_path / "join.json"
    path.write_text("{}")
    path.chmod(mode)
    of_root = os.stat_result([*path.stat()[:4], 0, *path.stat()[5:]])
    monkeypatch.setattr(Path, "stat", lambda self: of_root)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if opened:
        assert read_private(path) == b"{}"
    else:
        with pytest.raises(UsageError, match="others can read"):
            read_private(path)


# ---- the image


def test_the_image_is_the_readmes_install() -> None:
    root = Path(__file__).parents[2]
    image, readme = (root / "Dockerfile").read_text(), (root / "README.md").read_text()
    assert "pip install -e ." in readme.replace(".venv/bin/", "")
    assert "pip install --no-cache-dir -e /opt/fedsim" in image
    ignored = (root / ".dockerignore").read_text().splitlines()
    for name in ("fedsim", "protocols", "workers", "launch", "setup.cfg", "pyproject.toml", "README.md"):
        assert f"!{name}" in ignored


if __name__ == "__main__":
    GOLDEN.write_text(Kubernetes(fixed_keys).plan(JOBS["plain"]))
