"""`fedsim launch --on kubernetes`: manifests of a coordinator's Job and an Indexed Job of node agents.

The keys are made here, before anything runs: a Secret has the coordinator's, another one the join files, of
which a node agent's container sees its own only (subPathExpr). The Jobs restart what ends: a coordinator that
was moved or killed resumes its run from a PersistentVolumeClaim, and a node agent joins again, at most three
times an index. podReplacementPolicy is Failed, because a key is of one process at a time.

References:
    https://kubernetes.io/docs/concepts/workloads/controllers/job/ (backoffLimitPerIndex, podFailurePolicy)
    https://kubernetes.io/docs/concepts/storage/volumes/#using-subpath-expanded-environment (subPathExpr)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedsim.errors import UsageError
from launch.engines.job import Job, asked
from launch.engines.kubernetes_objects import RUNS, manifests, name_of
from workers.transport.run_keys import RunKeys


@dataclass(frozen=True)
class Kubernetes:
    """launch.engines.job.Engine. Its options are the fields of Options. keys: makes a run's keys."""

    keys: Callable[[int, str], RunKeys] = RunKeys.new

    def plan(self, job: Job) -> str:
        """The manifests, as YAML: kubectl apply takes them. None is read here."""
        try:
            import yaml
        except ImportError:
            raise UsageError("--on kubernetes needs the package PyYAML: pip install pyyaml") from None

        dumper: Any = type("Dumper", (yaml.SafeDumper,), {})  # the library's own stays as it is

        def text(representer: Any, value: str) -> Any:
            """A text of several lines as such."""
            style = "|" if "\n" in value else None
            return representer.represent_scalar("tag:yaml.org,2002:str", value, style=style)

        dumper.add_representer(str, text)
        return str(yaml.dump_all(manifests(job, self.keys), Dumper=dumper, sort_keys=False))

    def submit(self, job: Job) -> str:
        """Apply the manifests with kubectl."""
        text, name = self.plan(job), name_of(job)
        if shutil.which("kubectl") is None:
            raise UsageError(
                "--on kubernetes: there is no kubectl on this machine; --dry-run prints the manifests"
            )
        asked(["kubectl", "apply", "--filename", "-"], text)
        follow = f"kubectl logs --follow job/{name} shows the run"
        return f"{follow}; its folder is {RUNS}/{job.run.name} of its claim"
