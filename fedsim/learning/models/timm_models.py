"""Models of timm by name, `timm:NAME`: image classifiers with random weights; nothing is downloaded.

The package is an optional extra, and imported when a model needs it. Its models with other arguments or
with pretrained weights are a user's own, FILE.py:NAME, as in docs/examples/hub.py.

Source: https://huggingface.co/docs/timm (create_model).
"""

from __future__ import annotations

from torch import nn

from fedsim.errors import UsageError
from fedsim.extras import needed
from fedsim.learning.models.paper_models import Shape


def timm_model(name: str, shape: Shape, classes: int) -> nn.Module:
    """Build a model of timm with as many channels as the data have and one output per class.

    Raises:
        UsageError: If the data are no images, or timm cannot make the model.
    """
    owner = f"model 'timm:{name}'"
    if len(shape) != 3:
        raise UsageError(f"{owner} takes images (channels, height, width); these data have {shape}")
    timm = needed("timm", owner)
    try:
        module: nn.Module = timm.create_model(name, pretrained=False, in_chans=shape[0], num_classes=classes)
    except Exception as e:  # whatever a constructor of the library raises
        text = " ".join(str(e).split())
        raise UsageError(f"{owner}: {type(e).__name__}: {text[:300]}") from e
    return module
