"""The settings of a run that leave its results unchanged, from which options are generated.

This module does not import torch, because options are resolved before the fork server starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from fedsim.experiment import option

AUTO = -1
"""The value of `workers` and `lanes` that stands for `auto` (launch.configuration.worker_count)."""


@dataclass(frozen=True)
class Execution:
    """The settings of a run that leave every bit of its results unchanged; only `allow_drift` gives that up.

    `workers` includes the workers on other machines. The option --workers counts only this machine's.
    """

    workers: Annotated[
        int,
        option(
            "Worker processes; 0: in process; auto: as cores and memory allow.",
            "K|auto",
            "execution usual resume",
            default="one a GPU; without one 10, or as many as clients if these are fewer",
            ge=AUTO,
        ),
    ] = 10
    lanes: Annotated[
        int,
        option(
            "Clients that a worker on a GPU computes at once, each on a stream of its own.",
            "L|auto",
            "execution resume",
            default="auto: 10 a GPU, or as many as clients a worker; 1 from 4 million parameters on",
            ge=AUTO,
            le=16,
        ),
    ] = AUTO
    remote_workers: Annotated[
        int,
        option("Workers of other machines to wait for (--bind).", "K", "execution resume", default="", ge=0),
    ] = 0
    bind: Annotated[
        str,
        option(
            "Address for remote workers: tcp://ADDRESS:PORT of this machine.",
            "URL",
            "execution resume",
            default="",
        ),
    ] = ""
    keys: Annotated[
        str | None,
        option(
            "Their keys, made before the run by --on kubernetes.",
            "FILE",
            "execution resume",
            default="new ones",
        ),
    ] = None
    join_within: Annotated[
        float,
        option("Stop if workers are still missing after this long.", "SECONDS", "execution resume", gt=0),
    ] = 120.0
    transport: Annotated[Literal["ipc", "tcp"], option("How frames travel.", "", "wire resume")] = "ipc"
    devices: Annotated[
        str, option("auto, cpu, or cuda:0,cuda:1 (worker i on device i mod n).", "LIST", "execution resume")
    ] = "auto"
    data_dir: Annotated[
        str | None,
        option("Folder of the data files.", "DIR", "data usual plan resume", default="FEDSIM_DATA"),
    ] = None
    out: Annotated[
        str | None, option("Run folder.", "DIR", "output usual", default="RUNS/<time>-<algo>-<seed>")
    ] = None
    runs: Annotated[str, option("Folder of run folders.", "DIR", "output usual")] = "runs"
    verify_bytes: Annotated[
        bool, option("Compare the ledger with the kernel's count of the streams (tcp).", "", "wire resume")
    ] = False
    """A difference ends the run with an error."""
    track: Annotated[
        str,
        option(
            "Log rounds to tensorboard, mlflow, wandb, trackio (offline), such as tensorboard,mlflow.",
            "NAMES",
            "output resume",
            default="none",
        ),
    ] = ""
    allow_drift: Annotated[
        bool, option("Admit workers and machines that compute other bits.", "", "execution resume")
    ] = False
    """The manifest, summary and report name these workers, because the results then depend on them."""
    durability: Annotated[
        Literal["", "process", "power"],
        option(
            "What a round survives: kill -9 (process), or also a power cut (power).",
            "",
            "execution resume",
            default="power; process from 4 million parameters on",
        ),
    ] = ""
    """power: a round's files are synced before the round is committed. process: the kernel decides when."""
    lease: Annotated[
        float,
        option("Replace a worker that has been silent for this long.", "SECONDS", "execution resume", gt=0),
    ] = 120.0
    """A worker that computes sends heartbeats, too: before forward passes, at most one a second."""
    patience: Annotated[
        float, option("Stop if nothing happens for this long.", "SECONDS", "execution resume", gt=0)
    ] = 3600.0
    """This must exceed the time of the longest task."""

    @property
    def local_workers(self) -> int:
        """The number of worker processes that the run starts on this machine."""
        return self.workers - self.remote_workers


EXECUTION = tuple(f.name for f in fields(Execution))
