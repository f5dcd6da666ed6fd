"""fedsim worker: this process is a worker of a run elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import click

from launch.processes.server import ENVIRONMENT


def join(file: str, *, url: str | None, data_dir: str | None, worker: int | None, patience: float) -> None:
    """Take part until the run is over.

    Raises:
        FedsimError: any FedsimError.
    """
    os.environ.update(ENVIRONMENT)  # before torch is imported
    from fedsim.errors import Interrupted
    from workers.transport.join_credentials import JoinCredentials
    from workers.worker.remote import RemoteWorker

    join_credentials = JoinCredentials.read(Path(file))
    folder = Path(data_dir).resolve() if data_dir else None
    remote_worker = RemoteWorker(join_credentials, url or join_credentials.url, folder, patience, worker)
    try:
        remote_worker.run(click.echo)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the run goes on without this worker") from None
