"""Decoded data sets, stored once per machine as plain .npy files that every process maps.

One folder per data set and state of its source files:

    CACHE/<name>-v<FORMAT>-<digest of (path, size, mtime_ns) of every source>/<array>.npy

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
from pathlib import Path

import numpy as np

from fedsim.data.arrays import REQUIRED, Arrays

# Raise it when what a reader makes of the same source files changes.
FORMAT = 1

_LOG = logging.getLogger(__name__)


def cache_root() -> Path:
    """The folder that holds all cached data sets; it need not exist yet."""
    own = os.environ.get("FEDSIM_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedsim"


def cache_folder(name: str, sources: Sequence[Path]) -> Path:
    """Where the arrays made from `sources` (existing files), in their present state, belong."""
    digest = hashlib.sha256()
    for path in sources:
        stat = path.stat()
        digest.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return cache_root() / f"{name}-v{FORMAT}-{digest.hexdigest()[:16]}"


def cached(name: str, sources: Sequence[Path], build: Callable[[], Arrays]) -> Arrays:
    """The arrays of `build()`, read-only: memory-mapped from the cache, built at the first call.

    Where the cache cannot be written (read-only home, full disk) the arrays stay in memory.
    """
    try:
        folder = cache_folder(name, sources)
    except RuntimeError:  # Path.home() of a user without a home
        return build()
    result = _open(folder)
    if result is not None:
        return result
    arrays = build()
    try:
        _store(folder, arrays)
    except OSError as error:
        _LOG.warning(
            "%s: decoded data cannot be kept in %s (%s); every process holds its own copy. "
            "FEDSIM_CACHE names another folder",
            name,
            folder.parent,
            error,
        )
        return arrays
    return _open(folder) or arrays


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
