"""The message trace: each upload as it arrived, in its own file, so that it can be folded again.

RUN/uploads/<round>/<exchange>-<client>.envelope = number of frames (u32) | bytes of each (u64) | the frames,
the header's first. The envelope's own checksums cover the frames. The upload of a repeated task is written
again: its fields have the same bytes, but its header has another epoch and another computing time.
"""

from __future__ import annotations

import struct
from pathlib import Path

from fedsim.errors import DataError, WireError
from fedsim.wire.envelope import Envelope, slices_of, unpack
from workers.storage.atomic_files import disk_errors, write_atomically


def uploads_folder(run: Path) -> Path:
    """Return the folder of a run's uploads."""
    return run / "uploads"


def upload_path(folder: Path, round: int, exchange: int, client: int) -> Path:
    return folder / f"{round:06d}" / f"{exchange}-{client:06d}.envelope"


def keep_upload(folder: Path, envelope: Envelope) -> None:
    """Write an upload's file."""
    h = envelope.header
    path = upload_path(folder, h.round, h.exchange, h.client)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    frames = [envelope.head, *envelope.frames]
    sizes = [memoryview(frame).nbytes for frame in frames]
    write_atomically(path, [struct.pack(f">I{len(sizes)}Q", len(sizes), *sizes), *frames])


def read_upload(path: Path, owner: str) -> Envelope:
    """Read an upload's file. Error messages begin with `owner` and name the file.

    Raises:
        DataError: if the file cannot be read.
        WireError: if the file is damaged.
    """
    record = f"{owner}, {path}"
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{record}: not kept; every start of a run has to be told to --keep-uploads"
        ) from None
    except OSError as e:
        raise DataError(f"{record}: {e.strerror}") from None
    try:
        (count,) = struct.unpack_from(">I", data)
        sizes = struct.unpack_from(f">{count}Q", data, 4)
    except struct.error:
        raise WireError(f"{record}: the file is cut off, or it was damaged") from None
    at = 4 + 8 * count
    if at + sum(sizes) != len(data):
        raise WireError(f"{record}: {len(data)} bytes where {at + sum(sizes)} are due; it was damaged")
    return unpack(slices_of(data[at:], sizes), record)
