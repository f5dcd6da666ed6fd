"""Frozen parameters: they are no part of the vector, stay as they are, and curvature goes through them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim.errors import UsageError
from fedsim.learning.frozen import freeze, frozen_digest
from fedsim.learning.params import Net
from launch.api import Run
from launch.runs.folder import RunFolder
from tests.support.commands import fedsim

FILE = """
import torch
from torch import nn

def with_batch_norm(shape, classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())
    body[2].running_mean.normal_()
    net = nn.Sequential()
    net.add_module("body", body)
    net.add_module("head", nn.Linear(12, classes))
    return net
"""


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


INPUTS = torch.randn(7, 4, generator=torch.Generator().manual_seed(2)).double()


def test_the_layout_has_trained_parameters_only_and_the_others_stay() -> None:
    module = network().float()
    freeze(module, freeze="0.*,3.*")
    before = {name: p.clone() for name, p in module.named_parameters()}
    net = Net(module)
    assert [s.name for s in net.layout.slices] == ["2.weight", "2.bias", "5.weight", "5.bias"]
    net.loss_gradient(INPUTS.float(), torch.arange(7) % 3, 1.0)
    net.weights.add_(net.grads)
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name]) is name.startswith(("0.", "3.")), name
    assert all(p.grad is None for name, p in module.named_parameters() if name.startswith("0."))


def test_the_digest_is_of_what_is_frozen() -> None:
    module = network()
    assert frozen_digest(module) == ""
    freeze(module, "5.*")
    digest = frozen_digest(module)
    with torch.no_grad():
        module[5].weight.add_(1)
    assert frozen_digest(module) == digest
    with torch.no_grad():
        module[0].weight[0, 0] += 1e-9
    assert frozen_digest(module) != digest


@pytest.mark.parametrize(
    ("train", "frozen", "words"),
    [
        ("head.*", "", "--train 'head.*' fits no parameter of the model; it has 0.weight"),
        ("", "0.*,none", "--freeze 'none' fits no parameter"),
        ("0.*", "*", "no parameter of the model is left to train"),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused(train: str, frozen: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        freeze(network(), train, frozen)
    assert words in str(caught.value)


def test_train_names_what_the_model_has_frozen_itself() -> None:
    module = network().requires_grad_(False)
    freeze(module, "5.bias")
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["5.bias"]


def test_running_statistics_are_kept_where_frozen() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(UsageError, match="in 1, which would be state outside the parameter vector"):
        Net(module)
    freeze(module, freeze="1.*")
    net = Net(module)
    net.train()
    assert module.training
    assert not module[1].training
    net.loss_gradient(INPUTS.float(), torch.arange(7) % 3, 1.0)
    assert float(module[1].running_mean.abs().max()) == 0.0


def test_tied_parameters_may_be_frozen() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    module[1].weight = module[0].weight
    freeze(module, "2.*")
    assert Net(module).layout.size == 8
    freeze(module, "*", "1.weight")  # by its second name
    assert [s.name for s in Net(module).layout.slices] == ["2.weight", "2.bias"]


# ---- runs


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("algo", ["fedlap_cov", "mime"])
def test_a_run_sends_the_trained_part_and_its_plan_is_exact(algo: str, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(FILE)
    options = (
        *("--algo", algo, "--model", f"{tmp_path / 'nets.py'}:with_batch_norm", "--train", "head.*"),
        *("--clients", "3", "--rounds", "2", "--set", "local.epochs=1"),
    )
    options = options if algo != "mime" else options[:-2]
    plan = json.loads(fedsim("plan", *options, "--json"))
    digests = set()
    for workers in ("0", "2"):
        out = tmp_path / workers
        fedsim("launch", *options, "--workers", workers, "--out", str(out), "--quiet")
        run = RunFolder.open(out)
        assert run.summary["params"] == 12 * 10 + 10
        assert run.summary["bytes_down"] == plan["bytes_down"]
        assert run.summary["bytes_up"] == plan["bytes_up"]
        digests.add((run.summary["model_sha256"], run.summary["clients_sha256"]))
    assert len(digests) == 1
    manifest = json.loads((tmp_path / "2" / "manifest.json").read_text())
    assert len(manifest["experiment"]["frozen"]) == 64
    module = Run.open(out).model()
    assert not module.body[2].weight.requires_grad
    assert float(module.body[2].running_mean.abs().max()) > 0


@pytest.mark.process
def test_describe_shows_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(FILE)
    options = ("--model", f"{tmp_path / 'nets.py'}:with_batch_norm", "--freeze", "body.*")
    text = fedsim("describe", *options)
    assert "head.weight" in text
    assert "P = 130" in text
    document = json.loads(fedsim("describe", *options, "--json"))
    assert document["params"] == 130
    assert document["frozen"] == 64 * 12 + 12 + 2 * 12 + 2 * 12 + 1
    assert {p["name"]: p["trained"] for p in document["parameters"]}["body.2.running_mean"] is False
    assert "name an algorithm" in fedsim("describe", code=2)
