"""Pretrained weights and low-rank adapters (LoRA) of any model.

A target linear layer with weight W (O, I) becomes W x + (alpha / r) B A x. W is frozen; A (r, I) and B (O, r)
are trained. B is 0 at the start, so training starts from the original model. The peft package defines the
adapters of convolutions and embeddings.

Source: Hu et al. 2021, Sec. 4.1, https://arxiv.org/abs/2106.09685; https://huggingface.co/docs/peft
(inject_adapter_in_model).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedsim.errors import UsageError
from fedsim.extras import needed
from fedsim.model_specs import Lora


def load_weights(module: nn.Module, path: Path) -> frozenset[str]:
    """Load the tensors of a safetensors file by name; return the names of the parameters not loaded.

    A parameter that the file lacks or has in another shape (such as a new head) keeps its value.
    """
    try:
        values = load_file(path)
    except (OSError, SafetensorError) as e:
        raise UsageError(f"model +weights:{path}: cannot read it as a safetensors file ({e})") from None
    missing, fits = set(), 0
    for name, tensor in module.state_dict().items():
        value = values.get(name)
        if value is None or value.shape != tensor.shape:
            missing.add(name)
            continue
        with torch.no_grad():
            tensor.copy_(value)
        fits += 1
    if not fits:
        few = ", ".join(list(values)[:4])
        raise UsageError(
            f"model +weights:{path}: none of its tensors fits by name and shape; it has {few}, the model "
            f"{', '.join(list(module.state_dict())[:4])}"
        )
    return frozenset(missing & {name for name, _ in module.named_parameters()})


def add_lora(module: nn.Module, lora: Lora, missing: Collection[str] | None, owner: str) -> nn.Module:
    """Freeze a model in place, except for lora.also, and add adapters to the layers of lora.target.

    missing: names of parameters without pretrained values; None: the model is not pretrained. A UsageError
    is raised if one of these parameters would be frozen at random values.
    """
    peft = needed("peft", "+lora:")
    names = [name for name, _ in module.named_modules() if name]
    for text in (*lora.target, *lora.also):
        if not any(_ends(name, text) for name in names):
            leaves = dict.fromkeys(
                name for name, m in module.named_modules() if name and not list(m.children())
            )
            few = ", ".join(list(leaves)[:12])
            raise UsageError(f"{owner}: +lora: no module's name ends with {text!r}; some are {few}")
    trained = {
        name
        for name, _ in module.named_parameters()
        if any(_ends(name.rpartition(".")[0], text, inside=True) for text in lora.also)
    }
    known = {name for name, _ in module.named_parameters()}  # lists a tied parameter once
    if left := sorted(known.intersection(missing or ()) - trained):
        heads = "/".join(dict.fromkeys(name.removeprefix("model.").partition(".")[0] for name in left))
        raise UsageError(
            f"{owner}: {', '.join(left[:4])} have no pretrained values and would be frozen at random ones; "
            f"train them beside the adapters: also={heads}"
        )
    config: Any = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.target)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of weights stored as (I, O), and handles them
            adapted: nn.Module = peft.inject_adapter_in_model(config, module)
    except ValueError as e:
        raise UsageError(f"{owner}: +lora: {' '.join(str(e).split())[:300]}") from None
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name or name in trained)
    return adapted


def _ends(name: str, text: str, inside: bool = False) -> bool:
    """Return whether a dotted name ends with the dotted `text` or, with `inside`, contains it."""
    return f".{name}".endswith(f".{text}") or (inside and f".{text}." in f".{name}.")
