"""How a run is carried out: nothing here changes a bit of its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True)
class Execution:
    """workers 0: in process. devices: auto, cpu, or a list of cuda:i. out: the run folder.

    external_workers: none are started here, so many are waited for on `bind`, a tcp address of this machine,
    for `join_within` seconds; workers is then their number.
    verify_bytes: end with an error unless the kernel's count of the streams is the ledger's; tcp only.
    keep_uploads: leave every accepted upload in RUN/uploads, for fedsim replay.
    lease: seconds after which a worker that computes without a heartbeat is killed and replaced; it
    gives one a second from inside its loop, however slow it is.
    patience: seconds after which a run in which nothing happens stops with an error; longer than the
    longest task.
    """

    workers: Annotated[int, Meta(ge=0)] = 10
    remote_workers: Annotated[int, Meta(ge=0)] = 0
    bind: str = ""
    join_within: Annotated[float, Meta(gt=0)] = 120.0
    transport: Literal["ipc", "tcp"] = "ipc"
    devices: str = "auto"
    data_dir: str | None = None
    out: str | None = None
    verify_bytes: bool = False
    keep_uploads: bool = False
    lease: Annotated[float, Meta(gt=0)] = 120.0
    patience: Annotated[float, Meta(gt=0)] = 3600.0
