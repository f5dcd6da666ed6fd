"""The types of the JSON files of a run, which are compared with them when RunFolder reads the files."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Required, TypedDict, get_args, get_origin, get_type_hints

from msgspec import Meta

from fedsim.experiment import Experiment
from workers.storage.metrics_file import Count, Limits, Number

CURE = "copy the folder again from where it was made"
Clients = Annotated[int, Meta(ge=1, le=10**6)]
LONGEST = 1 << 14
"""The largest length of a setting, which pages and figures show."""
Text = Annotated[str, Meta(pattern="^[^\0\ud800-\udfff]*$", max_length=LONGEST)]
"""A text that may be a path: without NUL and lone surrogates."""
LARGEST = 1 << 17
"""The largest length of all settings together."""
Scalar = Text | Number | bool | None
Other = Scalar | list[Any] | dict[str, Any]
"""A setting that left."""
By = dict[str, dict[str, dict[str, Count]]]
"""Bytes by direction, field and layer."""


class Environment(TypedDict, total=False):
    """What bits depend on; of the start, and of a resume."""

    versions: dict[str, str]
    platform: dict[str, str | list[str] | dict[str, str]]
    commit: str | None
    started: datetime
    command: list[str]


class Manifest(Environment, total=False):
    """The content of manifest.json."""

    run: Required[Text]
    experiment: dict[Text, Any]
    experiment_sha256: str
    execution: dict[str, Scalar]
    resumes: list[Environment]
    drift: list[str]


EXPERIMENT: Mapping[str, Any] = {
    **{
        name: Text if get_origin(kind) is Annotated and get_args(kind)[0] is str else kind
        for name, kind in get_type_hints(Experiment, include_extras=True).items()
    },
    "clients": Clients,
    "params": Annotated[int, Meta(ge=1)],
    "hyperparameters": dict[Text, Scalar],
    "codecs": dict[Text, Text],
    "client_sizes": Annotated[list[Count], Meta(max_length=10**6)],
    "data": Text | None,
    "sources": dict[Text, Text | None],
    "features": list[Text],
}
"""The types of the manifest's experiment; others are Other."""


class Devices(TypedDict, total=False):
    """The simulated costs of a summary (launch.runs.device_costs)."""

    simulated_seconds: Required[Number]
    client_seconds: list[Number]
    client_seconds_total: Number
    client_waits: list[Number]
    client_waits_total: Number
    client_holds: list[Number]
    client_holds_total: Number
    client_joules: list[Number]
    client_joules_total: Number


class Asynchronous(TypedDict):
    """The duration and the staleness of an asynchronous run."""

    simulated_seconds: Number
    staleness: list[Count]
    staleness_mean: Number


class Recorded(TypedDict):
    """The digest of a growing file."""

    rows: Count
    bytes: Count
    sha256: str


class Summary(TypedDict, total=False):
    """The content of summary.json."""

    format: int
    status: str
    error: str | None
    rounds: Count
    params: Count
    until: Number | None
    reached: Count | None
    bytes_to_until: dict[str, Count] | None
    bytes: dict[str, By]
    bytes_down: Count
    bytes_up: Count
    participations: Count
    took_part: list[Count]
    folded: list[Count]
    units_of_p_down: Number
    units_of_p_up: Number
    units_of_p_once_down: Number
    units_of_p_once_up: Number
    kernel_residual: int | dict[str, int] | None
    kernel_retransmitted: int | dict[str, int] | None
    seconds_to_first_round: Number | None
    seconds_imports: Number | None
    seconds_round_median: Number | None
    seconds_clients: Number | None
    dual_mismatch: float | None
    test_accuracy: float | None
    test_nll: float | None
    drift: list[str]
    model_sha256: str | None
    clients_sha256: str | None
    experiment_sha256: str | None
    limits: Limits
    devices: Devices
    asynchronous: Asynchronous
    files: dict[str, Recorded]


class Finished(TypedDict):
    """What the summary of a finished run always has."""

    rounds: Count
    bytes_down: Count
    bytes_up: Count


class Attempt(TypedDict, total=False):
    """What a sweep notes about a run (launch.sweep.pool)."""

    seconds: Number
    error: str
    commit: str
