"""Models of timm (by name) and transformers (from a local folder); nothing is downloaded.

    hf:FOLDER   config.json defines the model. *.safetensors in the folder are its pretrained weights; without
                them its weights start at random. The head depends on the data and the likelihood:

        targets         inputs         head                            outputs
        classes         images         image classification            (n, C)
        classes         ids (T,)       sequence classification         (n, C)
        token_classes   ids (T,)       causal language model, if C is the size of the vocabulary; else token
                                       classification                  (n, T, C)

    timm:NAME   an image classifier with C outputs and as many channels as the data have.

Ids equal to the configuration's padding id are masked. The first position is never masked, so a row of only
padding has finite outputs. Pickled files are never read, and code in a folder is never executed
(fedsim.hub_folders). Both packages are optional extras and are imported when a model needs them.

Source: https://huggingface.co/docs/transformers (auto classes), https://huggingface.co/docs/timm
(create_model).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedsim.errors import FedsimError, UsageError
from fedsim.extras import needed
from fedsim.learning.models.paper_models import Shape
from fedsim.model_specs import ModelSpec


class TextModel(nn.Module):
    """A transformers model that maps ids (n, T) to logits (n, C) or (n, T, C)."""

    def __init__(self, model: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.model, self._padding = model, padding

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids.long()
        mask = None
        if self._padding is not None:
            mask = (rows != self._padding).long()
            mask[:, 0] = 1
        logits: Tensor = self.model(input_ids=rows, attention_mask=mask).logits
        return logits


class ImageModel(nn.Module):
    """A transformers model that maps images (n, channels, height, width) to logits (n, C)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images).logits
        return logits


def library_model(
    spec: ModelSpec, shape: Shape, classes: int, likelihood: str
) -> tuple[nn.Module, frozenset[str] | None]:
    """Build a library's model; also return its parameters without pretrained values by name (None: all)."""
    with _complaints(spec.base):
        return (_timm if spec.library == "timm" else _transformers)(spec, shape, classes, likelihood)


@contextmanager
def _complaints(owner: str) -> Iterator[None]:
    """Turn a library's exception for a wrong name, keyword or file into a UsageError."""
    try:
        yield
    except FedsimError:
        raise
    except Exception as e:
        text = " ".join(str(e).split())
        raise UsageError(f"model {owner!r}: {type(e).__name__}: {text[:300]}") from e


def _timm(spec: ModelSpec, shape: Shape, classes: int, likelihood: str) -> tuple[nn.Module, None]:
    if len(shape) != 3:
        raise UsageError(
            f"model {spec.base!r} takes images (channels, height, width); these data have {shape}"
        )
    timm = needed("timm", f"model {spec.base!r}")
    keywords = spec.architecture()
    module: nn.Module = timm.create_model(
        spec.name, pretrained=False, in_chans=shape[0], num_classes=classes, **keywords
    )
    return module, None


def _transformers(
    spec: ModelSpec, shape: Shape, classes: int, likelihood: str
) -> tuple[nn.Module, frozenset[str] | None]:
    config_file, *weights = ModelSpec(spec.base).files()
    transformers = needed("transformers", f"model {spec.base!r}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(
        config_file.parent, local_files_only=True, trust_remote_code=False
    )
    if likelihood in ("categorical", "bernoulli") and len(shape) == 3:
        kind = "AutoModelForImageClassification"
    elif likelihood in ("categorical", "bernoulli") and len(shape) == 1:
        kind = "AutoModelForSequenceClassification"
    elif likelihood == "token_classes" and len(shape) == 1:
        same = getattr(config, "vocab_size", None) == classes
        kind = "AutoModelForCausalLM" if same else "AutoModelForTokenClassification"
    else:
        raise UsageError(f"model {spec.base!r} has no head for {likelihood} targets of inputs {shape}")
    if kind != "AutoModelForCausalLM":
        config.num_labels = classes
    if getattr(config, "is_decoder", None) is False and kind == "AutoModelForCausalLM":
        config.is_decoder = True
    config.use_cache = False
    auto, missing = getattr(transformers, kind), None
    if weights:
        module, info = auto.from_pretrained(
            config_file.parent,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        missing = frozenset(info["missing_keys"]) | {key for key, *_ in info["mismatched_keys"]}
    else:
        module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    padding = getattr(config, "pad_token_id", None)
    wrapped = ImageModel(module) if len(shape) == 3 else TextModel(module, padding)
    return wrapped, None if missing is None else frozenset(f"model.{name}" for name in missing)
