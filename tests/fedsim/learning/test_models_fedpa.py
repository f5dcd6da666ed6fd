"""The four models of the FedPA paper: sizes by hand, what they refuse, and the LSTM on a flat buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedsim.data import DATASETS, vocabulary
from fedsim.errors import UsageError
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.models.registry import MODELS, build_model
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.seeds import RandomStream

VOCABULARY = 24


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "dataset", "parameters"),
    [
        # 32 (9 + 1), 64 (9 * 32 + 1), 128 (12 * 12 * 64 + 1), 62 (128 + 1): TFF's 1,206,590
        ("cnn_emnist", "emnist62", 320 + 18_496 + 1_179_776 + 7_998),
        # conv 7 * 7 * 3 * 64 and its norm; then per stage the 3x3 convolutions, the 1x1 shortcut, and the
        # norms (two numbers a channel; the first block of all has one less); the last norm; the dense layer
        (
            "resnet18_gn",
            "cifar100_lda",
            (9_408 + 128)
            + (4 * 36_864 + 3 * 128)
            + (73_728 + 3 * 147_456 + 8_192 + 128 + 4 * 256)
            + (294_912 + 3 * 589_824 + 32_768 + 256 + 4 * 512)
            + (1_179_648 + 3 * 2_359_296 + 131_072 + 512 + 4 * 1_024)
            + 1_024
            + 51_300,
        ),
        # 10004 * 96; 4 gates of 670 (96 + 670 + 1); 96 (670 + 1); 10004 (96 + 1): TFF's 4,050,748
        ("lstm", "stackoverflow_nwp", 960_384 + 2_055_560 + 64_416 + 970_388),
        ("logistic_bias", "stackoverflow_lr", 500 * 10_001),
    ],
)
def test_parameter_counts(name: str, dataset: str, parameters: int) -> None:
    info = DATASETS[dataset]
    assert count(build_model(name, info.shape, info.classes, info.likelihood)) == parameters


def test_totals_are_those_of_the_released_models() -> None:
    assert 320 + 18_496 + 1_179_776 + 7_998 == 1_206_590
    assert 960_384 + 2_055_560 + 64_416 + 970_388 == 4_050_748
    assert count(build_model("resnet18_gn", (3, 32, 32), 100)) == 11_227_812


def test_resnet18_keeps_its_resolution_after_the_first_layers() -> None:
    net = build_model("resnet18_gn", (3, 32, 32), 10)
    seen: list[torch.Size] = []
    for name, module in net.named_children():
        if name.startswith("stage"):
            module.register_forward_hook(lambda _, __, out: seen.append(out.shape[1:]))
    net(torch.rand(2, 3, 32, 32))
    assert seen == [torch.Size((c, 8, 8)) for c in (64, 64, 128, 128, 256, 256, 512, 512)]
    groups = {(m.num_groups, m.eps) for m in net.modules() if isinstance(m, nn.GroupNorm)}
    assert groups == {(2, 1e-3)}


def test_a_block_is_its_shortcut_where_its_last_convolution_is_zero() -> None:
    block = build_model("resnet18_gn", (3, 32, 32), 10).get_submodule("stage2_block2")
    nn.init.zeros_(block.get_submodule("conv2").weight)  # type: ignore[arg-type]
    x = torch.randn(2, 128, 4, 4)
    assert torch.equal(block(x), x)  # no activation behind the sum


# ---- the word model


def sentences(n: int = 6, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY - 3, (n, length + 1), generator=draws)
    ids[:, 0] = vocabulary.bos(VOCABULARY)
    targets = ids[:, 1:].clone()
    targets[0, 2:] = vocabulary.NO_TARGET
    return ids[:, :-1].float(), targets


def word_net() -> Net:
    torch.manual_seed(0)
    return Net(build_model("lstm", (5,), VOCABULARY, "tokens"), likelihood=likelihood("tokens"))


def test_the_lstm_gives_logits_at_every_place_from_what_came_before() -> None:
    net = word_net()
    inputs, _ = sentences()
    with torch.no_grad():
        logits = net.module(inputs)
        changed = inputs.clone()
        changed[:, 3] = 1 + (changed[:, 3] % 5)
        second = net.module(changed)
    assert logits.shape == (6, 5, VOCABULARY)
    assert torch.equal(second[:, :3], logits[:, :3])
    assert not torch.equal(second[:, 3], logits[:, 3])


def test_the_lstm_is_one_with_a_single_bias() -> None:
    """Against PyTorch's own, whose first bias is our last input column and whose second is zero."""
    module = word_net().module
    lstm = module.get_submodule("lstm")
    assert isinstance(lstm, nn.LSTM)
    with torch.no_grad():
        lstm.weight_ih_l0[:, -1] += torch.randn(4 * 670) / 10
        reference = nn.LSTM(96, 670, batch_first=True)
        reference.weight_ih_l0.copy_(lstm.weight_ih_l0[:, :-1])
        reference.weight_hh_l0.copy_(lstm.weight_hh_l0)
        reference.bias_ih_l0.copy_(lstm.weight_ih_l0[:, -1])
        reference.bias_hh_l0.zero_()
        inputs, _ = sentences()
        embedded = module.get_submodule("embed")(inputs.long())
        expected = module.get_submodule("out")(module.get_submodule("dense")(reference(embedded)[0]))
        torch.testing.assert_close(module(inputs), expected)


def test_the_start_of_the_lstm_is_that_of_the_released_model() -> None:
    module = build_model("lstm", (20,), 10_004, "tokens")
    parameters = dict(module.named_parameters())
    assert parameters["embed.weight"].abs().max() <= 0.05
    kernel, recurrent = parameters["lstm.weight_ih_l0"], parameters["lstm.weight_hh_l0"]
    assert kernel[:, :-1].std().item() == pytest.approx((2 / 96) ** 0.5, rel=0.02)
    bias = kernel[:, -1]
    assert (bias[670:1340] == 1).all() and bias.sum() == 670  # forget gates
    torch.testing.assert_close(recurrent.T @ recurrent, torch.eye(670), atol=1e-4, rtol=0)
    assert not parameters["out.bias"].any() and not parameters["dense.bias"].any()


def test_training_changes_every_weight_of_the_lstm_and_load_takes_effect() -> None:
    """nn.LSTM keeps a list of its weights beside its parameters; both must be the views of the buffer."""
    net = word_net()
    inputs, targets = sentences()
    start = net.snapshot()
    before = net.logits(start, inputs)
    loss = net.loss_gradient(inputs, targets, 1.0)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(float(VOCABULARY))).item(), rel=0.1)
    for piece in net.layout.slices:
        part = net.grads[piece.offset : piece.offset + piece.size]
        assert part.any(), piece.name
        if piece.name.startswith("lstm"):
            assert (part != 0).float().mean() > 0.9, piece.name
    shard = Shard(net, inputs.int(), targets, 1.0)
    trained = minimise(
        shard, start, how=LocalTraining(epochs=10, batch_size=3, lr=1e-2), rng=RandomStream(0, "fit"), round=1
    )
    for piece in net.layout.slices:
        moved = trained.weights[piece.offset : piece.offset + piece.size]
        assert not torch.equal(moved, start[piece.offset : piece.offset + piece.size]), piece.name
    after = net.logits(trained.weights, inputs)
    assert not torch.allclose(after, before, atol=1e-3)
    assert net.likelihood.loss(after, targets) < 0.8 * net.likelihood.loss(before, targets)
    assert torch.equal(net.logits(start, inputs), before)
    recurrent = next(s for s in net.layout.slices if s.name == "lstm.weight_hh_l0")
    rejected = start.clone()
    rejected[recurrent.offset : recurrent.offset + recurrent.size] = 0
    assert not torch.equal(net.logits(rejected, inputs)[:, 1:], before[:, 1:])


def test_places_without_a_target_have_no_gradient() -> None:
    net = word_net()
    inputs, targets = sentences()
    net.loss_gradient(inputs, targets, 1.0)
    once = net.grads.clone()
    inputs[0, 3:] = vocabulary.PAD  # behind the last target
    net.loss_gradient(inputs, targets, 1.0)
    torch.testing.assert_close(net.grads, once)


# ---- what is refused


def test_models_must_suit_the_likelihood() -> None:
    with pytest.raises(
        UsageError, match=r"'mlp' has one row of outputs per example.*tokens; choose from: lstm"
    ):
        build_model("mlp", (20,), 24, "tokens")
    for kind in ("categorical", "bernoulli", "gaussian"):
        with pytest.raises(UsageError, match=rf"'lstm' has outputs at every place.*{kind}.*logistic"):
            build_model("lstm", (20,), 24, kind)
    with pytest.raises(UsageError, match=r"'lstm' cannot take inputs of shape \(1, 28, 28\)"):
        build_model("lstm", (1, 28, 28), 24, "tokens")
    assert build_model("logistic_bias", (3,), 1, "gaussian")(torch.rand(2, 3)).shape == (2, 1)


def test_a_users_sequence_model_must_give_one_row_per_place(tmp_path: Path) -> None:
    path = tmp_path / "words.py"
    path.write_text(
        "from torch import nn\n"
        "class Good(nn.Module):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(classes, classes)\n"
        "    def forward(self, x):\n"
        "        return self.table(x.long())\n"
        "class Last(Good):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)[:, -1]\n"
    )
    assert build_model(f"{path}:Good", (5,), 24, "tokens")(torch.zeros(3, 5)).shape == (3, 5, 24)
    with pytest.raises(UsageError, match=r"shape \(2, 5, 24\); it gave shape \(2, 24\)"):
        build_model(f"{path}:Last", (5,), 24, "tokens")
    assert build_model(f"{path}:Last", (5,), 24)(torch.zeros(3, 5)).shape == (3, 24)


@pytest.mark.parametrize(
    ("kind", "outputs", "targets"),
    [
        ("bernoulli", (3, 4), (3, 1)),
        ("gaussian", (3, 4), (1, 4)),
        ("tokens", (3, 4), (3, 2)),
        ("tokens", (3, 4, 9), (3, 5)),
    ],
)
def test_outputs_of_another_shape_have_no_loss(
    kind: str, outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match="the model gives outputs of shape"):
        likelihood(kind).loss(torch.zeros(outputs), torch.zeros(targets, dtype=torch.long))


def test_only_the_word_model_is_a_sequence_model() -> None:
    assert [name for name, info in MODELS.items() if info.sequence] == ["lstm"]
