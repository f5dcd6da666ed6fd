"""Tensors of a safetensors file: their digest, and initial weights, `+weights:FILE`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.foreign_files import DOCUMENT, json_value, opened, read
from fedsim.wire.codecs import raw_bytes


def read_tensors(path: Path, links: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a file; raise OSError or SafetensorError. links: follow a link to the file."""
    opened(path, links=links).close()  # safetensors calls every file that cannot be opened a missing one
    return load_file(path)


def digest(parts: Iterable[Tensor]) -> str:
    """Return the sha256 of tensors as little-endian float32, in the order given."""
    hashed = sha256()
    for part in parts:
        hashed.update(raw_bytes(part.float().cpu()))
    return hashed.hexdigest()


def load_weights(module: nn.Module, path: Path) -> None:
    """Load the tensors of a safetensors file whose names and shapes fit.

    A parameter that the file lacks or has in another shape (such as a new head) keeps its value.
    """
    try:
        values = read_tensors(path, links=True)
    except (OSError, SafetensorError) as e:
        raise UsageError(f"model +weights:{path}: cannot read it as a safetensors file ({e})") from None
    if _changed(module, path, values):
        raise UsageError(
            f"model +weights:{path}: the file was changed: summary.json beside it has another model_sha256. "
            "Restore the original, or copy the file elsewhere if the change is yours"
        )
    state = module.state_dict()
    fitting = [
        name for name, tensor in state.items() if name in values and values[name].shape == tensor.shape
    ]
    if not fitting:
        raise UsageError(
            f"model +weights:{path}: none of its tensors fits by name and shape; it has "
            f"{', '.join(list(values)[:4])}, the model {', '.join(list(state)[:4])}"
        )
    with torch.no_grad():
        for name in fitting:
            state[name].copy_(values[name])


def _changed(module: nn.Module, path: Path, values: Mapping[str, Tensor]) -> bool:
    """Return whether a run's model differs from the digest in the run's summary (launch.runs.summary).

    Without a summary, or if the run had parameters of other names, whose order is unknown, return False.
    """
    summary = path.with_name("summary.json")
    try:
        recorded = json_value(read(summary, DOCUMENT, links=True))["model_sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    means = [name for name, _ in module.named_parameters() if name in values]
    running = [name for name, _ in module.named_buffers() if name in values]
    whole = [name for name in ("precision", "samples") if name in values]
    spread = whole or [name for mean in means if (name := f"precision.{mean}") in values]
    names = [*means, *spread, *running]
    if path.name != "model.safetensors" or not isinstance(recorded, str) or len(names) != len(values):
        return False
    return digest(values[name] for name in names) != recorded
