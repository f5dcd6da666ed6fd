"""`fedsim launch --on kubernetes`: manifests of a coordinator's Job and an Indexed Job of node agents.

The keys are generated here, before any pod runs. One Secret contains the coordinator's keys, another the join
files. The container of a node agent sees only its own join file (subPathExpr). The Jobs restart pods that
end: a coordinator resumes its run from a PersistentVolumeClaim, and a node agent joins again, at most three
times per index. podReplacementPolicy is Failed, because only one process at a time may use a key.

References:
    https://kubernetes.io/docs/concepts/workloads/controllers/job/ (backoffLimitPerIndex, podFailurePolicy)
    https://kubernetes.io/docs/concepts/storage/volumes/#using-subpath-expanded-environment (subPathExpr)
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any

import msgspec

from fedsim.errors import Interrupted, UsageError
from launch.engines.job import JOIN_WITHIN, Job, asked
from workers.transport.run_keys import RunKeys

PORT = 7711
RUNS, DATA, KEYS = "/runs", "/data", "/keys"
"""Folders in a container, for the run, the data set and the keys."""
FINAL = (2, 3, 4, 5)
"""Exit codes after which a restart would also fail."""
USER = 1000
"""The user and group of the image (Dockerfile)."""
OWN_ENDS = ("-keys", "-join", "-node")
"""What follows the run's name in the names of some objects."""
LONGEST_NAME = 52
"""A pod's name has at most 63 characters. Kubernetes appends an index and five characters to this name."""
DIGEST = 8
"""Characters of the digest in the name of a run whose folder's name was changed."""
JOB = "batch.kubernetes.io/job-name"
"""The label that a Job gives its pods."""
MEMORY = "[0-9]+(k|[MGT]|[KMGT]i)?"
MISSING = "--on kubernetes needs --image IMAGE, which has fedsim (docs/clusters.md says how to make one)"
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """The options of a run on Kubernetes, --engine-option NAME=VALUE.

    image: a container image that has fedsim. namespace: '' for kubectl's default. claim: a
    PersistentVolumeClaim for run folders; '' for a new one of size `storage`. data: a claim with data files.
    memory: a limit for each worker, and for the coordinator. gpu: the name of the GPU resource.
    """

    image: str = ""
    namespace: str = ""
    claim: str = ""
    storage: str = "10Gi"
    data: str = ""
    memory: str = ""
    gpu: str = "nvidia.com/gpu"

    @staticmethod
    def of(job: Job) -> Options:
        try:
            result = Options(**job.options)
        except TypeError:
            known = ", ".join(f.name for f in fields(Options))
            raise UsageError(f"--engine-option: on kubernetes there are {known}") from None
        if not result.image:
            raise UsageError(MISSING)
        if result.memory and not re.fullmatch(MEMORY, result.memory):
            raise UsageError(f"--engine-option memory={result.memory}: give a whole number, such as 900Mi")
        return result


@dataclass(frozen=True)
class Kubernetes:
    """An Engine for Kubernetes; its options are the fields of Options. keys: makes a run's keys."""

    keys: Callable[[int, str], RunKeys] = RunKeys.new

    def plan(self, job: Job) -> str:
        """Return the manifests as YAML for kubectl apply."""
        try:
            import yaml
        except ImportError:
            raise UsageError("--on kubernetes needs the package PyYAML: pip install pyyaml") from None

        dumper: Any = type("Dumper", (yaml.SafeDumper,), {})  # a subclass to change

        def text(representer: Any, value: str) -> Any:
            style = "|" if "\n" in value else None
            return representer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

        dumper.add_representer(str, text)
        return str(yaml.dump_all(manifests(job, self.keys), Dumper=dumper, sort_keys=False))

    def submit(self, job: Job) -> str:
        """Apply the manifests with kubectl."""
        text = self.plan(job)
        if shutil.which("kubectl") is None:
            raise UsageError(
                "--on kubernetes: there is no kubectl on this machine; --dry-run prints the manifests"
            )
        asked(["kubectl", "apply", "--filename", "-"], text)
        follow = f"kubectl logs --follow job/{name_of(job)} shows the run"
        return f"{follow}; its folder is {RUNS}/{job.run.name} of its claim"


def name_of(job: Job) -> str:
    """Return the name of a run's objects: the name of its folder, in letters, digits and hyphens.

    A name that is cut or changed, or has one of OWN_ENDS, gets a digest at its end, so that two runs of one
    cluster do not share objects.
    """
    name = f"fedsim-{job.run.name}"
    if len(name) <= LONGEST_NAME and re.fullmatch("[a-z0-9-]*[a-z0-9]", name) and not name.endswith(OWN_ENDS):
        return name
    plain = re.sub("[^a-z0-9]+", "-", name.lower())[: LONGEST_NAME - DIGEST - 1].rstrip("-")
    return f"{plain}-{sha256(job.run.name.encode()).hexdigest()[:DIGEST]}"


def manifests(job: Job, new_keys: Callable[[int, str], RunKeys]) -> list[Manifest]:
    """Return the objects to create, in this order."""
    options, name, k = Options.of(job), name_of(job), job.per_node
    keys = new_keys(job.workers, f"tcp://{name}:{PORT}")
    numerics = str(job.tables.get("experiment", {}).get("numerics", "native"))
    join = keys.join(job.run.name, numerics)
    parts = {f"join-{i}.json": _json(join.part(range(i * k, i * k + k))) for i in range(job.nodes)}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB: name}}
    storage = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": options.storage}}}

    def described(kind: str, suffix: str = "", **content: Any) -> Manifest:
        metadata = {"name": f"{name}{suffix}", "labels": {"app": "fedsim", "fedsim-run": name}}
        metadata |= {"namespace": options.namespace} if options.namespace else {}
        version = "batch/v1" if kind == "Job" else "v1"
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    return [
        described("Secret", "-keys", stringData={"keys.json": _json(keys)}),
        described("Secret", "-join", stringData=parts),
        described("ConfigMap", data={"job.toml": job.toml()}),
        described("Service", spec={**service, "ports": [{"name": "fedsim", "port": PORT}]}),
        *([] if options.claim else [described("PersistentVolumeClaim", spec=storage)]),
        described("Job", spec=_coordinator(job, name, options)),
        described("Job", "-node", spec=_nodes(job, name, options)),
    ]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _coordinator(job: Job, name: str, options: Options) -> Manifest:
    start = job.start_or_resume(shlex.quote(f"{RUNS}/{job.run.name}"), f"{KEYS}/job.toml")
    script = f'{start}\nexec fedsim "$@" --bind tcp://0.0.0.0:{PORT} --keys {KEYS}/keys.json'
    sources = [
        {"secret": {"name": f"{name}-keys"}},
        {"configMap": {"name": name, "items": [{"key": "job.toml", "path": "job.toml"}]}},
    ]
    volumes: dict[str, Manifest] = {
        "keys": {"projected": {"defaultMode": 0o400, "sources": sources}},
        "runs": {"persistentVolumeClaim": {"claimName": options.claim or name}},
    }
    mounts: dict[str, Manifest] = {"keys": {"mountPath": KEYS, "readOnly": True}, "runs": {"mountPath": RUNS}}
    pod = _pod("coordinator", ["/bin/sh", "-c", script], options, volumes, mounts, {"cpu": "1"}, 1)
    return {"backoffLimit": 6, **_pods(pod, "FailJob", grace=90)}


def _nodes(job: Job, name: str, options: Options) -> Manifest:
    command = ["fedsim", *job.agent(f"{KEYS}/join.json", "auto"), "--patience", str(JOIN_WITHIN)]
    limits = {"cpu": str(job.cores)} | ({options.gpu: str(job.gpus)} if job.gpus else {})
    own = {"subPathExpr": "join-$(JOB_COMPLETION_INDEX).json", "readOnly": True}
    volumes = {"keys": {"secret": {"secretName": f"{name}-join", "defaultMode": 0o400}}}
    mounts = {"keys": {"mountPath": f"{KEYS}/join.json", **own}}
    pod = _pod("node", command, options, volumes, mounts, limits, job.per_node)
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    pod["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": {JOB: f"{name}-node"}}}]
    indexed = {"completionMode": "Indexed", "completions": job.nodes, "parallelism": job.nodes}
    return {**indexed, "backoffLimitPerIndex": 3, **_pods(pod, "FailIndex", grace=10)}


def _pods(pod: Manifest, final: str, grace: int) -> Manifest:
    """Return what a Job says of its pods: after FINAL, `final` is done and none restarts. Interruptions and
    moved pods are no failures. grace: seconds between SIGTERM and SIGKILL."""

    def codes(*values: int) -> Manifest:
        return {"containerName": pod["containers"][0]["name"], "operator": "In", "values": [*values]}

    rules = [
        {"action": final, "onExitCodes": codes(*FINAL)},
        {"action": "Ignore", "onExitCodes": codes(Interrupted.exit_code)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": {**pod, "terminationGracePeriodSeconds": grace}},
    }


def _pod(
    container: str,
    command: list[str],
    options: Options,
    volumes: Mapping[str, Manifest],
    mounts: Mapping[str, Manifest],
    limits: Mapping[str, str],
    processes: int,
) -> Manifest:
    """Return a pod with one unprivileged container and no API access. processes: those that need memory."""
    if options.data:
        claim = {"claimName": options.data, "readOnly": True}
        volumes = {**volumes, "data": {"persistentVolumeClaim": claim}}
        mounts = {**mounts, "data": {"mountPath": DATA, "readOnly": True}}
    if options.memory:
        number, unit = re.fullmatch("([0-9]+)(.*)", options.memory).groups()  # type: ignore[union-attr]
        limits = {**limits, "memory": f"{int(number) * processes}{unit}"}
    described = {
        "name": container,
        "image": options.image,
        "command": command,
        "env": [{"name": "FEDSIM_DATA", "value": DATA}] if options.data else [],
        "resources": {"limits": dict(limits), "requests": dict(limits)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": name, **mount} for name, mount in mounts.items()],
    }
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": user,
        "containers": [described],
        "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
    }
