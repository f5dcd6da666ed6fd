"""The options of a run on Kubernetes: `--engine-option NAME=VALUE`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from fedsim.errors import UsageError
from launch.engines.job import Job

MEMORY = "[0-9]+([KMGT]i?)?"
MISSING = "--on kubernetes needs --image IMAGE, which has fedsim (docs/clusters.md says how to make one)"


@dataclass(frozen=True)
class Options:
    """The options of a run on Kubernetes.

    image: a container image that has fedsim. namespace: '' for kubectl's own. claim: a PersistentVolumeClaim
    for run folders, '' for a new one of size `storage`. data: a claim with data files. memory: a limit for
    each worker, and for the coordinator. gpu: the name of the resource.
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
        """Read them.

        Raises:
            UsageError: for an unknown one, or if there is no image.
        """
        try:
            result = Options(**dict(job.options or {}))
        except TypeError:
            known = ", ".join(f.name for f in fields(Options))
            raise UsageError(f"--engine-option: on kubernetes there are {known}") from None
        if not result.image:
            raise UsageError(MISSING)
        if result.memory and not re.fullmatch(MEMORY, result.memory):
            raise UsageError(f"--engine-option memory={result.memory}: give a whole number, such as 900Mi")
        return result
