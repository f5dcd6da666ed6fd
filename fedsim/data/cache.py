"""Decoded data sets, stored once per machine as plain .npy files that every process maps.

There is one folder per data set and content of its source files, even if several copies of the files exist:

    CACHE/<name>-v<FORMAT>-<digest of the bytes of every source>/<array>.npy
    CACHE/<name>-v<FORMAT>-<digest of the bytes of every source>/digests.json
    CACHE/<name>-v<FORMAT>-<digest ...>/from-<digest of the state of every source>

The state of a source is its path, device, inode, size, and the times of its last change of content (mtime)
and of any kind (ctime). mtime and size alone are not enough: tar, cp -p and rsync -t restore an mtime. The
empty file from-... records that sources in this state have this content, so that they are read only once. If
the sources have more than LARGEST bytes in total, the digest in the folder's name is that of their state.

digests.json has the SHA-256 of every array's file. A process compares it when it first opens the file, which
takes 0.15 s for the 55 MB of MNIST; a folder with other bytes is made again from its sources.

CACHE is $FEDSIM_CACHE, else $XDG_CACHE_HOME/fedsim, else ~/.cache/fedsim. A folder is written under a
temporary name next to its final one and then renamed, so that a reader finds a complete folder or none. If
several processes write at once, the first rename succeeds and all use that folder. The whole cache may be
deleted while no run uses it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path

import numpy as np

from fedsim.data.arrays import REQUIRED, Arrays
from fedsim.foreign_files import sha256

# Increase FORMAT when a reader's output for the same source files changes.
FORMAT = 5
LARGEST = 1 << 30
"""Largest total size of sources whose content is hashed, in bytes; hashing takes about a second."""
FROM = "from-"
DIGESTS = "digests.json"

_intact: set[tuple[Path, tuple[int, ...], str]] = set()
"""The files, with their states and digests, that this process has compared."""

_LOG = logging.getLogger(__name__)


def cache_root() -> Path:
    """Return the folder of all cached data sets, which may not exist yet."""
    own = os.environ.get("FEDSIM_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedsim"


def cached(name: str, sources: Sequence[Path], build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of `build()`, memory-mapped read-only from the cache; only the first call builds.

    If the cache cannot be written (read-only home, full disk), the arrays stay in memory.
    """
    try:
        root = cache_root()
    except RuntimeError:  # Path.home() of a user without a home
        return build()
    state = _state(sources)
    folder = _known(root, name, state) or root / f"{name}-v{FORMAT}-{_content(sources, state)}"
    arrays = _open(folder)
    if arrays is None:
        arrays = build()
        if _state(sources) != state:
            _LOG.warning("%s: its files changed while they were read", name)
            return arrays
        try:
            _store(folder, arrays)
        except OSError as error:
            _LOG.warning(
                "%s: decoded data cannot be kept in %s (%s); every process holds its own copy. "
                "FEDSIM_CACHE names another folder",
                name,
                root,
                error,
            )
            return arrays
        arrays = _open(folder) or arrays
    with suppress(OSError):  # a cache that this user can only read
        (folder / f"{FROM}{state}").touch()
    return arrays


def _state(sources: Sequence[Path]) -> str:
    """Return the digest of the sources' paths, devices, inodes, sizes and times of change."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(os.fsencode(path.resolve()) + f"\0{_state_of(path)}\0".encode())
    return digest.hexdigest()[:16]


def _state_of(path: Path) -> tuple[int, ...]:
    """Return a file's device, inode, size and times of change."""
    s = path.stat()
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _known(root: Path, name: str, state: str) -> Path | None:
    """Return the folder of sources in this state, or None if they were not read before."""
    marks = root.glob(f"{escape(name)}-v{FORMAT}-*/{FROM}{state}")
    return next((mark.parent for mark in marks), None)


def _content(sources: Sequence[Path], state: str) -> str:
    """Return the digest of the sources' bytes, or `state` if the sources are very large."""
    if sum(path.stat().st_size for path in sources) > LARGEST:
        return state
    digest = hashlib.sha256()
    for path in sources:
        digest.update(bytes.fromhex(sha256(path, most=None)))
    return digest.hexdigest()[:16]


def _open(folder: Path) -> Arrays | None:
    """Open the arrays of a folder; return None if it is absent or damaged. Remove a damaged folder."""
    if not folder.is_dir():
        return None
    why = "it lacks files"
    try:
        arrays: Arrays = {}
        digests = json.loads((folder / DIGESTS).read_bytes())
        for path in (folder / f"{name}.npy" for name in digests):
            _compare(path, digests[path.stem])
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            # Use a plain view, because every slice of an np.memmap is slower.
            arrays[path.stem] = mapped.view(np.ndarray)
        if all(key in arrays for key in REQUIRED):
            return arrays
    except (OSError, ValueError, EOFError, TypeError) as error:  # a full disk, a power failure, a flipped bit
        why = str(error)
    _LOG.warning("%s is damaged (%s); it is made again", folder, why)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _compare(path: Path, digest: str) -> None:
    """Compare a file with its digest, once per process; ValueError if its bytes have changed."""
    checked = (path, _state_of(path), digest)
    if checked not in _intact:
        if sha256(path, most=None) != digest:
            raise ValueError(f"{path.name} is not as it was written")
        _intact.add(checked)


def _store(folder: Path, arrays: Arrays) -> None:
    """Write all arrays under a temporary name, then rename their folder; OSError if that fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        for key, array in arrays.items():
            np.save(draft / f"{key}.npy", array, allow_pickle=False)
        digests = {key: sha256(draft / f"{key}.npy", most=None) for key in arrays}
        (draft / DIGESTS).write_text(json.dumps(digests) + "\n", encoding="utf-8")
        try:
            draft.rename(folder)
        except OSError:
            # rename does not replace a folder with files; another process wrote it first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
