"""Models of libraries, pretrained weights and adapters: what is trained, from where, and its curvature."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsim import model_specs
from fedsim.errors import UsageError
from fedsim.learning.curvature.diagonal_ggn import diagonal_ggn
from fedsim.learning.curvature.full_ggn import full_ggn
from fedsim.learning.frozen import frozen_digest
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Layout
from fedsim.model_specs import Lora, ModelSpec
from launch.runs.folder import RunFolder
from tests.support.commands import fedsim
from tests.support.tolerances import moved

BERT = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "num_labels": 3,
}


def seeded(spec: str, shape: tuple[int, ...], classes: int = 3, likelihood: str = "categorical") -> nn.Module:
    torch.manual_seed(5)
    return build_model(spec, shape, classes, likelihood)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random BERT that classifies sequences into three classes."""
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(3)
    BertForSequenceClassification(BertConfig(**BERT)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTConfig, ViTForImageClassification

    folder = tmp_path_factory.mktemp("models") / "vit"
    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 1, "intermediate_size": 12}
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, **sizes)
    torch.manual_seed(4)
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


# ---- the grammar


def test_a_spec_has_parts() -> None:
    spec = ModelSpec.parse("timm:resnet18,img_size=8+weights:a.safetensors+lora:r=4,target=q/v,also=head")
    assert (spec.library, spec.name, dict(spec.keywords)) == ("timm", "resnet18", {"img_size": "8"})
    assert spec.weights == "a.safetensors"
    assert spec.lora == Lora(4, ("q", "v"), 4.0, 0.0, ("head",))
    assert ModelSpec.parse("mlp").library == ""


@pytest.mark.parametrize(
    "text",
    [
        "mlp+lora:r=0,target=fc1",
        "mlp+lora:r=2",
        "mlp+lora:target=fc1",
        "mlp+lora:r=2,target=fc1,alpha=-1",
        "mlp+lora:r=2,target=fc1,dropout=1",
        "mlp+lora:rank=2",
        "mlp+weights:",
        "mlp+lora:r=2,target=fc1+lora:r=2,target=fc1",
    ],
)
def test_a_wrong_modifier_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"lora|weights"):
        ModelSpec.parse(text)


def test_a_model_is_the_same_wherever_its_files_lie(bert: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / bert.name
    copy.mkdir(parents=True)
    for file in bert.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    one, other = f"hf:{bert}+lora:r=2,target=query", f"hf:{copy}+lora:r=2,target=query"
    assert model_specs.fingerprint(one) == model_specs.fingerprint(other)
    assert model_specs.sources(one) == model_specs.sources(other)
    (copy / "config.json").write_text(json.dumps(BERT | {"model_type": "bert", "hidden_size": 16}))
    assert model_specs.fingerprint(one) != model_specs.fingerprint(other)


# ---- adapters


def test_an_adapter_starts_as_the_model_and_only_it_is_trained() -> None:
    plain = seeded("mlp_small", (1, 8, 8))
    adapted = seeded("mlp_small+lora:r=2,target=fc1,also=out", (1, 8, 8))
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(plain(x), adapted(x))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    adapters = {f"fc1.lora_{part}.default.weight" for part in "AB"}
    assert trained == adapters | {"out.weight", "out.bias"}


@pytest.mark.parametrize(("alpha", "scale"), [("", 1.0), (",alpha=6", 2.0)])
def test_an_adapter_computes_what_the_paper_says(alpha: str, scale: float) -> None:
    adapted = seeded(f"mlp_small+lora:r=3,target=fc1{alpha}", (1, 8, 8)).double()
    parts = dict(adapted.named_parameters())
    with torch.no_grad():
        parts["fc1.lora_B.default.weight"].normal_()
    layer, x = adapted.get_submodule("fc1"), torch.randn(4, 64).double()
    w, b = parts["fc1.base_layer.weight"], parts["fc1.base_layer.bias"]
    low = parts["fc1.lora_B.default.weight"] @ parts["fc1.lora_A.default.weight"]
    expected = x @ (w + scale * low).T + b
    assert (layer(x) - expected).norm() <= 1e-14 * expected.norm()


def brute_force(module: nn.Module, inputs: Tensor) -> Tensor:
    return full_ggn(module.eval(), [inputs]).diagonal()


def test_the_curvature_of_adapters_is_that_of_brute_force() -> None:
    module = seeded("mlp_small+lora:r=2,target=fc1/out", (1, 8, 8)).double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_B" in name:
                p.normal_()
    x = torch.randn(6, 1, 8, 8).double()
    exact = brute_force(module, x)
    assert exact.min() >= 0 < exact.norm()
    assert (diagonal_ggn(module, [x]) - exact).norm() <= 1e-13 * exact.norm()


def test_the_curvature_of_adapters_in_attention_is_that_of_brute_force(bert: Path) -> None:
    spec = f"hf:{bert}+lora:r=2,target=query/value/dense,also=classifier"
    module = seeded(spec, (6,)).double().eval()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "lora_B" in name:
                p.normal_()
    ids = torch.randint(1, 30, (4, 6)).double()
    exact = diagonal_ggn(module, [ids])
    # one backward pass per example and class
    total = torch.zeros_like(exact)
    trained = [p for p in module.parameters() if p.requires_grad]
    for row in ids:
        logits = module(row[None])[0]
        p = logits.softmax(0).detach()
        for c in range(3):
            column = p[c].sqrt() * (torch.eye(3)[c] - p)
            gradients = torch.autograd.grad(logits, trained, column, retain_graph=True)
            total += torch.cat([g.flatten() for g in gradients]).square()
    assert (exact - total).norm() <= 1e-13 * total.norm()


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ("mlp_small+lora:r=2,target=query", "no module's name ends with 'query'; some are .*fc1"),
        ("mlp_small+lora:r=2,target=fc1,also=head", "no module's name ends with 'head'"),
        ("mlp_small+weights:/nowhere.safetensors", "there is no such file"),
        ("mlp_smal+lora:r=2,target=fc1", "did you mean 'mlp_small'"),
        ("hf:/nowhere", "there is no /nowhere/config.json. A run downloads nothing"),
        ("timm:resnet1", "Unknown model"),
        ("timm:resnet18", "--statistics average .they travel."),
    ],
)
def test_a_model_that_cannot_be_is_an_error(spec: str, what: str) -> None:
    from fedsim.learning.params import Net

    with pytest.raises(UsageError, match=what):
        Net(seeded(spec, (1, 8, 8)))


# ---- weights


def test_weights_start_where_names_and_shapes_fit(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    pretrained = seeded("mlp_small", (1, 8, 8), classes=7)
    with torch.no_grad():
        pretrained.get_parameter("fc1.weight").fill_(0.25)
    save_file(dict(pretrained.state_dict()), file)
    module = seeded(f"mlp_small+weights:{file}", (1, 8, 8), classes=3)
    assert module.get_parameter("fc1.weight").unique().tolist() == [0.25]
    assert torch.equal(
        module.get_parameter("out.weight"), seeded("mlp_small", (1, 8, 8)).get_parameter("out.weight")
    )
    with pytest.raises(UsageError, match=r"would be frozen at random ones; .*also=out"):
        seeded(f"mlp_small+weights:{file}+lora:r=2,target=fc1", (1, 8, 8), classes=3)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"other": torch.zeros(3)}, file)
    with pytest.raises(UsageError, match="none of its tensors fits by name and shape; it has other"):
        seeded(f"mlp_small+weights:{file}", (1, 8, 8))
    file.write_bytes(b"no safetensors")
    with pytest.raises(UsageError, match="cannot read it as a safetensors file"):
        seeded(f"mlp_small+weights:{file}", (1, 8, 8))


# ---- transformers and timm


def test_a_pretrained_model_is_read_and_a_new_head_is_not_frozen(bert: Path) -> None:
    from safetensors.torch import load_file

    saved = load_file(bert / "model.safetensors")
    module = seeded(f"hf:{bert}", (6,))
    for name, value in saved.items():
        assert torch.equal(module.get_parameter(f"model.{name}"), value)
    with pytest.raises(UsageError, match=r"no pretrained values .*also=classifier"):
        seeded(f"hf:{bert}+lora:r=2,target=query", (6,), classes=5)
    assert seeded(f"hf:{bert}+lora:r=2,target=query,also=classifier", (6,), classes=5)


def test_padding_is_masked_and_a_row_of_it_is_finite(bert: Path) -> None:
    module = seeded(f"hf:{bert}", (6,)).eval()
    ids = torch.tensor([[4.0, 7, 9, 0, 0, 0]])
    exact, names = deepcopy(module).double(), [name for name, _ in module.named_parameters()]

    def outputs(*values: Tensor) -> Tensor:
        return torch.func.functional_call(exact, dict(zip(names, values, strict=True)), (ids,))  # type: ignore[no-any-return]

    # two layers, each with sums of 8 (five), 12, 3 places and two norms of 8, and some fifty operations
    roundings = 2 * (5 * 8 + 12 + 2 * 3 + 2 * 16 + 50)
    with torch.no_grad():
        error = moved(outputs, *module.parameters(), roundings=roundings)
        assert (module(ids) - module(ids[:, :3])).norm() < 2 * error < 1e-2 * module(ids).norm()
        assert torch.isfinite(module(torch.zeros(1, 6))).all()


def test_the_head_follows_from_the_likelihood(bert: Path) -> None:
    with torch.no_grad():
        assert seeded(f"hf:{bert}", (6,), 4, "token_classes")(torch.ones(2, 6)).shape == (2, 6, 4)
        causal = seeded(f"hf:{bert}+lora:r=2,target=query,also=cls", (6,), 30, "token_classes").eval()
        ids = torch.arange(1.0, 7)[None]
        later = ids.clone()
        later[:, 4:] = 9
        assert torch.equal(causal(ids)[:, :4], causal(later)[:, :4])  # no place sees a later one
    with pytest.raises(UsageError, match="has no head for gaussian targets"):
        seeded(f"hf:{bert}", (6,), 2, "gaussian")


def test_frozen_batch_norm_of_timm_goes_with_adapters() -> None:
    module = seeded("timm:resnet18+lora:r=2,target=conv1,also=fc", (1, 8, 8))
    assert Layout.of(module).size < 50_000
    assert frozen_digest(module) == frozen_digest(
        seeded("timm:resnet18+lora:r=2,target=conv1,also=fc", (1, 8, 8))
    )


# ---- runs


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("algo", "epochs"), [("fedlap_cov", "local.epochs=1"), ("ivon_admm", "epochs=1")])
def test_a_run_with_adapters_sends_what_the_plan_says(
    vit: Path, tmp_path: Path, algo: str, epochs: str
) -> None:
    model = f"hf:{vit}+lora:r=2,target=q_proj/v_proj,also=classifier"
    options = ("--model", model, "--clients", "2", "--rounds", "2", "--algo", algo, "--set", epochs)
    plan = json.loads(fedsim("plan", *options, "--json"))
    digests = set()
    for workers in ("0", "2"):
        out = tmp_path / workers
        fedsim("launch", *options, "--workers", workers, "--out", str(out), "--quiet")
        run = RunFolder.open(out)
        assert run.summary["bytes_down"] == plan["bytes_down"]
        assert run.summary["bytes_up"] == plan["bytes_up"]
        digests.add((run.summary["model_sha256"], run.summary["clients_sha256"]))
    assert len(digests) == 1
    manifest = json.loads((tmp_path / "2" / "manifest.json").read_text())
    assert model_specs.sources(model).items() <= manifest["experiment"]["sources"].items()
