"""Decoded data sets, stored once per machine as plain .npy files that every process maps.

One folder per data set and content of its source files, however many copies of them there are:

    CACHE/<name>-v<FORMAT>-<digest of the bytes of every source>/<array>.npy
    CACHE/<name>-v<FORMAT>-<digest ...>/from-<digest of the state of every source>

The state of a source is its path, device, inode, size, and the times of its last change of content (mtime)
and of anything (ctime). mtime and size alone are not enough: tar, cp -p and rsync -t restore an mtime. The
second file is empty. It records that these sources, in this state, have this content, so that they are read
only once. For sources with more than LARGEST bytes together, the digest is that of their state.

CACHE is $FEDSIM_CACHE, else $XDG_CACHE_HOME/fedsim, else ~/.cache/fedsim. A folder is filled under
a temporary name beside its final one and renamed, so that a reader sees all of it or nothing and
processes may race: the first rename wins and the others use its folder. Nothing here is precious;
the whole cache may be deleted whenever no run is using it.
"""

from __future__ import annotations

import hashlib
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

# Raise it when what a reader makes of the same source files changes.
FORMAT = 3
LARGEST = 1 << 30
"""Bytes that are read to know a content: about a second."""
FROM = "from-"

_LOG = logging.getLogger(__name__)


def cache_root() -> Path:
    """The folder that holds all cached data sets; it need not exist yet."""
    own = os.environ.get("FEDSIM_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedsim"


def cached(name: str, sources: Sequence[Path], build: Callable[[], Arrays]) -> Arrays:
    """The arrays of `build()`, read-only: memory-mapped from the cache, built at the first call.

    Where the cache cannot be written (read-only home, full disk) the arrays stay in memory.
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
    """The digest of the sources' paths, identities, sizes and times of change."""
    digest = hashlib.sha256()
    for path in sources:
        s = path.stat()
        state = (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        digest.update(os.fsencode(path.resolve()) + f"\0{state}\0".encode())
    return digest.hexdigest()[:16]


def _known(root: Path, name: str, state: str) -> Path | None:
    """The folder of sources in this state, if they were read before."""
    marks = root.glob(f"{escape(name)}-v{FORMAT}-*/{FROM}{state}")
    return next((mark.parent for mark in marks), None)


def _content(sources: Sequence[Path], state: str) -> str:
    """The digest of the sources' bytes, or of their state if they are very large."""
    if sum(path.stat().st_size for path in sources) > LARGEST:
        return state
    digest = hashlib.sha256()
    for path in sources:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _open(folder: Path) -> Arrays | None:
    """The arrays of a complete folder; None if it is absent or damaged (then it is removed)."""
    if not folder.is_dir():
        return None
    try:
        arrays: Arrays = {}
        for path in folder.glob("*.npy"):
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            # A plain view: np.memmap as a subclass makes every later slice slower.
            arrays[path.stem] = mapped.view(np.ndarray)
        if all(key in arrays for key in REQUIRED):
            return arrays
    except (OSError, ValueError, EOFError):
        pass  # cut short by a full disk or a power cut
    _LOG.warning("%s is damaged; it is made again", folder)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _store(folder: Path, arrays: Arrays) -> None:
    """Write all arrays under a temporary name, then rename. OSError if that is not possible."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        for key, array in arrays.items():
            np.save(draft / f"{key}.npy", array, allow_pickle=False)
        try:
            draft.rename(folder)
        except OSError:
            # A folder with files in it is never replaced: another process was first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
