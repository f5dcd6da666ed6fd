"""Answers to a run's tasks from the uploads that the run has kept."""

from __future__ import annotations

from pathlib import Path

from fedsim.errors import WireError
from fedsim.wire.envelope import Envelope, Header
from workers.protocol_messages import absent
from workers.storage.upload_archive import read_upload, upload_path, uploads_folder


class RecordedUploads:
    """A worker that answers a task with the upload that a run has kept, instead of computing it."""

    def __init__(self, run: Path) -> None:
        self.folder, self.read = uploads_folder(run), 0

    def handle(self, envelope: Envelope) -> Envelope | None:
        """Return the upload that the run has kept for a task, or 'absent' for a dropout.

        Raises:
            DataError: if data is missing or damaged.
            WireError: if the file belongs to another task; the error names the file.
        """
        h = envelope.header
        if h.kind == "gone":
            return absent(h)
        if h.kind == "last":
            return None
        path = upload_path(self.folder, h.round, h.exchange, h.client)
        result = read_upload(path, f"the upload of client {h.client} in round {h.round}")
        record, due = _description(result.header), _description(h)
        if result.header.kind != "upload" or record != due:
            raise WireError(f"{path} is not what this task gave: it is of {record}, and {due} is due")
        self.read += 1
        return result


def _description(h: Header) -> str:
    return f"run {h.run}, round {h.round}, exchange {h.exchange}, client {h.client}, base {h.base}"
