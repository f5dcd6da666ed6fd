"""Initial weights from a file, `+weights:FILE`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedsim.errors import UsageError


def load_weights(module: nn.Module, path: Path) -> None:
    """Load the tensors of a safetensors file whose names and shapes fit.

    A parameter that the file lacks or has in another shape (such as a new head) keeps its value.
    """
    try:
        values = load_file(path)
    except (OSError, SafetensorError) as e:
        raise UsageError(f"model +weights:{path}: cannot read it as a safetensors file ({e})") from None
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
