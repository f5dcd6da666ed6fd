"""How a run is carried out: nothing here changes a bit of its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True)
class Execution:
    """workers 0: in process. devices: auto, cpu, or a list of cuda:i. out: the run folder.

    verify_bytes: end with an error unless the kernel's count of the streams is the ledger's; tcp only.
    patience: seconds after which a run in which nothing happens stops with an error; longer than the
    longest task.
    """

    workers: Annotated[int, Meta(ge=0)] = 10
    transport: Literal["ipc", "tcp"] = "ipc"
    devices: str = "auto"
    data_dir: str | None = None
    out: str | None = None
    verify_bytes: bool = False
    patience: Annotated[float, Meta(gt=0)] = 3600.0
