"""Uploads that have arrived before their turn: in memory up to a bound, on disk beyond it."""

from __future__ import annotations

from pathlib import Path

from fedsim.wire.letter import Letter
from workers.store import write_atomically

MEMORY_BYTES = 256 * 2**20


class Spool:
    """Letters by client. Only the frames go to disk; headers stay."""

    def __init__(self, folder: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        self.folder, self.room = folder, memory_bytes
        self._letters: dict[int, Letter] = {}
        self._spilled: set[int] = set()

    def put(self, client: int, letter: Letter) -> None:
        size = letter.total_bytes()
        if size > self.room:
            self.folder.mkdir(exist_ok=True)
            write_atomically(self._path(client), letter.frames)
            self._spilled.add(client)
            letter = Letter(letter.header, letter.head, ())
        else:
            self.room -= size
        self._letters[client] = letter

    def take(self, client: int) -> Letter:
        letter = self._letters.pop(client)
        if client not in self._spilled:
            self.room += letter.total_bytes()
            return letter
        self._spilled.discard(client)
        data = memoryview(self._path(client).read_bytes())
        self._path(client).unlink()
        frames, at = [], 0
        for part in (p for f in letter.header.fields for p in f.parts):
            frames.append(data[at : at + part.nbytes])
            at += part.nbytes
        return Letter(letter.header, letter.head, tuple(frames))

    def _path(self, client: int) -> Path:
        return self.folder / f"{client:06d}.upload"
