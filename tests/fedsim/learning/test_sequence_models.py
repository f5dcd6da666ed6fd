"""Models of sequences: an LSTM on a flat buffer, and what does not fit the likelihood."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedsim.errors import UsageError
from fedsim.learning.likelihoods import likelihood
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.first_order import LocalTraining, minimise
from fedsim.seeds import RandomStream

VOCABULARY = 24


class Words(nn.Module):
    """Embedding - LSTM - dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(ids.long()))
        logits: Tensor = self.out(states)
        return logits


def sentences(n: int = 6, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (n, length + 1), generator=draws)
    targets = ids[:, 1:].clone()
    targets[0, 2:] = -1
    return ids[:, :-1].float(), targets


def word_net() -> Net:
    torch.manual_seed(0)
    return Net(Words(), likelihood=likelihood("token_classes"))


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
    inputs[0, 3:] = 0  # behind the last target
    net.loss_gradient(inputs, targets, 1.0)
    torch.testing.assert_close(net.grads, once)


# ---- what is refused


def test_models_must_suit_the_likelihood() -> None:
    with pytest.raises(UsageError, match=r"'mlp' has one row of outputs per example.*are token_classes"):
        build_model("mlp", (20,), 24, "token_classes")
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
    assert build_model(f"{path}:Good", (5,), 24, "token_classes")(torch.zeros(3, 5)).shape == (3, 5, 24)
    with pytest.raises(UsageError, match=r"shape \(2, 5, 24\); it gave shape \(2, 24\)"):
        build_model(f"{path}:Last", (5,), 24, "token_classes")
    assert build_model(f"{path}:Last", (5,), 24)(torch.zeros(3, 5)).shape == (3, 24)


@pytest.mark.parametrize(
    ("kind", "outputs", "targets"),
    [
        ("bernoulli", (3, 4), (3, 1)),
        ("gaussian", (3, 4), (1, 4)),
        ("token_classes", (3, 4), (3, 2)),
        ("token_classes", (3, 4, 9), (3, 5)),
    ],
)
def test_outputs_of_another_shape_have_no_loss(
    kind: str, outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match="the model gives outputs of shape"):
        likelihood(kind).loss(torch.zeros(outputs), torch.zeros(targets, dtype=torch.long))
