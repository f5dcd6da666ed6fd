"""Models of timm, and weights from a file: what is built, from where, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedsim import model_specs
from fedsim.errors import UsageError
from fedsim.learning.frozen import freeze, frozen_digest
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Layout, Net
from fedsim.model_specs import ModelSpec

IMAGES = (1, 8, 8)


def seeded(spec: str, shape: tuple[int, ...] = IMAGES, classes: int = 3) -> nn.Module:
    torch.manual_seed(5)
    return build_model(spec, shape, classes)


def test_a_spec_has_parts() -> None:
    assert ModelSpec.parse("timm:resnet18+weights:a+b.safetensors") == ModelSpec(
        "timm:resnet18", "a+b.safetensors"
    )
    assert (ModelSpec.parse("timm:resnet18").timm, ModelSpec.parse("mlp").timm) == ("resnet18", None)


def test_a_model_is_the_same_wherever_its_weights_lie(tmp_path: Path) -> None:
    specs = []
    for folder in ("here/run", "there/run"):
        file = tmp_path / folder / "w.safetensors"
        file.parent.mkdir(parents=True)
        save_file({"out.bias": torch.ones(3)}, file)
        specs.append(f"mlp_small+weights:{file}")
    one, other = specs
    assert model_specs.fingerprint(one) == model_specs.fingerprint(other)
    assert model_specs.sources(one) == model_specs.sources(other)
    save_file({"out.bias": torch.zeros(3)}, tmp_path / "here/run/w.safetensors")
    assert model_specs.fingerprint(one) != model_specs.fingerprint(other)
    assert model_specs.fingerprint("mlp_small") == "mlp_small"
    assert model_specs.sources("mlp_small") == {}


def test_weights_start_where_names_and_shapes_fit(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    pretrained = seeded("mlp_small", classes=7)
    with torch.no_grad():
        pretrained.get_parameter("fc1.weight").fill_(0.25)
    save_file(dict(pretrained.state_dict()), file)
    module = seeded(f"mlp_small+weights:{file}")
    assert module.get_parameter("fc1.weight").unique().tolist() == [0.25]
    assert torch.equal(module.get_parameter("out.weight"), seeded("mlp_small").get_parameter("out.weight"))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"other": torch.zeros(3)}, file)
    with pytest.raises(UsageError, match="none of its tensors fits by name and shape; it has other"):
        seeded(f"mlp_small+weights:{file}")
    file.write_bytes(b"no safetensors")
    with pytest.raises(UsageError, match="cannot read it as a safetensors file"):
        seeded(f"mlp_small+weights:{file}")


def test_frozen_batch_norm_of_timm_is_the_same_in_every_process() -> None:
    modules = [seeded("timm:resnet18") for _ in range(2)]
    for module in modules:
        freeze(module, "fc.*", "")
    one, other = modules
    assert Layout.of(one).size == 3 * 513
    assert frozen_digest(one) == frozen_digest(other)


@pytest.mark.parametrize(
    ("spec", "shape", "what"),
    [
        ("mlp_small+weights:/nowhere.safetensors", IMAGES, "there is no such file"),
        ("mlp_small+weights:", IMAGES, "a safetensors file to start from"),
        ("timm:resnet1", IMAGES, r"'timm:resnet1': RuntimeError: Unknown model"),
        ("timm:resnet18", IMAGES, "--statistics average .they travel."),
        ("timm:resnet18", (64,), "takes images .channels, height, width.; these data have"),
        (
            "timm:resnet18,checkpoint_path=w.pth",
            IMAGES,
            r"with arguments .* FILE.py:NAME, as in docs/examples",
        ),
        ("timm:hf-hub:timm/resnet18", IMAGES, "an architecture of timm"),
        ("timm:", IMAGES, "an architecture of timm"),
    ],
)
def test_a_model_that_cannot_be_is_an_error(spec: str, shape: tuple[int, ...], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        Net(seeded(spec, shape))
