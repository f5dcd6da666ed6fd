"""sz:EB for comparison in `fedsim codecs`: SZ3 with an error of at most EB times the range of the values.

No run may use it: the library's decoder does not check what it reads, and weights are noise to a compressor
of smooth fields. It needs the package pysz (pip install 'fedsim-wire[sz]').

Source: SZ3, Liang et al. 2023, https://github.com/szcompressor/SZ3; APPFL and FedSZ have it for uploads.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import numpy as np
from torch import Tensor

from fedsim.wire.codecs.base import Bound, Codec, Part, Spec, flat32, tensor_of


def available() -> bool:
    """Return whether the package is here."""
    return find_spec("pysz") is not None


def sz(bound: float) -> Codec:
    return Codec(
        f"sz:{bound!r}",
        partial(_pack, bound),
        _unpack,
        lambda spec: (Bound("values", 0, 2 * spec.dense_bytes + 4096),),
        lossy=True,
        entropy=lambda data, spec: 8.0 * len(data),
    )


def _pack(bound: float, x: Tensor, spec: Spec, ref: Tensor | None) -> tuple[Part, ...] | None:
    from pysz import sz as library, szConfig, szErrorBoundMode

    values = flat32(x).copy()
    if not np.isfinite(values).all() or not len(values):
        return None
    config = szConfig(len(values))
    config.errorBoundMode, config.relErrorBound = szErrorBoundMode.REL, bound
    compressed, _ = library.compress(values, config)
    return (("values", memoryview(compressed.tobytes())),)


def _unpack(parts: tuple[memoryview, ...], spec: Spec, ref: Tensor | None) -> Tensor:
    from pysz import sz as library

    compressed = np.frombuffer(bytes(parts[0]), dtype=np.uint8)
    values, _ = library.decompress(compressed, np.float32, (spec.count,))
    return tensor_of(np.asarray(values).reshape(-1), spec)
