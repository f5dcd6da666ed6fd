"""The keys of remote workers (RUN/join.json) and the list of revoked workers (RUN/revoked.json).

Keys are CURVE keys in ZeroMQ's Z85 text, 40 characters. join.json contains secrets, so its mode is 0600: a
process that can read the file can take part in the run. Neither argv nor a log ever contains keys. `fedsim
revoke` writes revoked.json during a run. The coordinator reads revoked.json at every handshake and, for open
connections, a few times a second.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import zmq
from msgspec import Meta

from fedsim.errors import DataError, UsageError
from fedsim.foreign_files import DOCUMENT, read
from workers.storage.atomic_files import disk_errors, write_atomically

FORMAT, REVOKED_FORMAT = 2, 1
JOIN = "join.json"
JOIN_HERE = "join-here.json"
"""The keys of local workers in a run that also has remote ones."""
REVOKED = "revoked.json"
Key = Annotated[str, Meta(pattern=r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")]


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public: Key
    secret: Key

    @staticmethod
    def new() -> KeyPair:
        public, secret = zmq.curve_keypair()
        return KeyPair(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r}, ...)"


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of keys."""

    format: int

    def write(self, path: Path) -> None:
        """Write the file atomically, because workers wait for it; only its owner may read it.

        Raises:
            DiskError: if the file cannot be written.
        """
        text = msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
        write_atomically(path, (text,), mode=0o600)


K = TypeVar("K", bound=KeyFile)


class JoinCredentials(KeyFile, frozen=True, forbid_unknown_fields=True):
    """The content of a join file. workers: key pairs of the workers `first`, `first` + 1, ... max_frame: the
    largest frame that a peer sends, in bytes. numerics: the run's numerics, which a worker needs before it
    imports torch. lasting: True if a coordinator may start again with this address and keys."""

    run: str
    url: str
    server_key: Key
    max_frame: Annotated[int, Meta(ge=1, le=2**48)]
    workers: Annotated[tuple[KeyPair, ...], Meta(min_length=1, max_length=4096)]
    numerics: str = "native"
    first: Annotated[int, Meta(ge=0)] = 0
    lasting: bool = False

    @property
    def seats(self) -> range:
        """The numbers of the workers whose keys are in the file."""
        return range(self.first, self.first + len(self.workers))

    def pair(self, worker: int) -> KeyPair:
        """Return the keys of one worker."""
        return self.workers[worker - self.first]

    def part(self, seats: range) -> JoinCredentials:
        """Return the credentials of these workers only, for one machine.

        Raises:
            UsageError: if a worker's keys are missing.
        """
        if not seats or seats.start not in self.seats or seats[-1] not in self.seats:
            raise UsageError(
                f"this join file has workers {self.first} to {self.seats[-1]}, not {seats.start} to "
                f"{seats.stop - 1}"
            )
        some = self.workers[seats.start - self.first : seats.stop - self.first]
        return msgspec.structs.replace(self, workers=some, first=seats.start)

    @staticmethod
    def read(path: Path) -> JoinCredentials:
        """Read a join file; raise the errors of read_keys."""
        return read_keys(path, JoinCredentials, FORMAT, "a join.json")


def read_keys(path: Path, kind: type[K], format: int, what: str) -> K:
    """Read a file of keys of this format.

    Raises:
        UsageError: if the file cannot be read, is open to others, or has another format.
        DataError: if the file is damaged.
    """
    try:
        result = msgspec.json.decode(read_private(path), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise DataError(f"{path} is not {what} of fedsim: {e}") from None
    if result.format != format:
        raise UsageError(f"{path} has format {result.format}; this fedsim reads {format}")
    return result


def read_private(path: Path) -> bytes:
    """Return the content of a file of secrets.

    A file that belongs to root and is readable for this user's group is accepted. Kubernetes mounts Secrets
    in this way (fsGroup), and the container has no other users.

    Raises:
        UsageError: if the file cannot be read, or is open to others.
    """
    try:
        data, status = read(path, DOCUMENT, links=True), path.stat()
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from None
    mounted = status.st_uid == 0 != os.geteuid()
    if status.st_mode & (0o037 if mounted else 0o077):
        raise UsageError(f"{path}: others can read its keys; chmod 600 {path}")
    return data


class _Revoked(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    workers: tuple[Annotated[int, Meta(ge=0)], ...]


class Revocations:
    """The list of revoked workers in a file, which is empty while the file does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: frozenset[int] = frozenset()

    def workers(self) -> frozenset[int]:
        """Return the revoked workers, or the result of the last call if the file cannot be read."""
        with suppress(DataError, OSError):
            self._last = self._read()
        return self._last

    def _read(self) -> frozenset[int]:
        """Return the revoked workers in the file; none if it does not exist."""
        try:
            result = msgspec.json.decode(read(self.path, DOCUMENT), type=_Revoked)
        except FileNotFoundError:
            return frozenset()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise DataError(f"{self.path} is damaged: {e}; remove it and revoke again") from None
        if result.format != REVOKED_FORMAT:
            raise DataError(f"{self.path} has format {result.format}; this fedsim reads {REVOKED_FORMAT}")
        return frozenset(result.workers)

    def add(self, workers: Iterable[int]) -> None:
        """Add workers to the file, which is replaced as a whole. A lock serialises concurrent calls.

        Raises:
            DataError: if the file is damaged.
            DiskError: if the disk cannot be read or written.
        """
        temporary = self.path.with_name(f".{self.path.name}")
        with disk_errors(f"cannot write {self.path}"):
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                together = tuple(sorted({*self._read(), *workers}))
                temporary.write_bytes(msgspec.json.encode(_Revoked(REVOKED_FORMAT, together)) + b"\n")
                temporary.rename(self.path)
            finally:
                os.close(folder)

    def clear(self) -> None:
        """Remove the file, because new keys were generated."""
        with disk_errors(f"cannot remove {self.path}"):
            self.path.unlink(missing_ok=True)
