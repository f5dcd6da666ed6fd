"""Models of every kind that torch knows: a run is right, or the model is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import fedsim
from fedsim.errors import UsageError

Shape = tuple[int, ...]


class Plain(nn.Module):
    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 6), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.flatten(1))))


def changed(change: Callable[[Plain], object]) -> Callable[[Shape, int], nn.Module]:
    """A builder of Plain with a change; what the change returns, if anything, is the model."""

    def build(shape: Shape, classes: int) -> nn.Module:
        net = Plain(shape, classes)
        other = change(net)
        return other if isinstance(other, nn.Module) else net

    return build


def another(forward: Callable[[Plain, Tensor], Any], **layers: Callable[[], nn.Module]) -> type[Plain]:
    """A subclass of Plain with another forward and more layers."""

    class Another(Plain):
        def __init__(self, shape: Shape, classes: int) -> None:
            super().__init__(shape, classes)
            for name, layer in layers.items():
                setattr(self, name, layer())

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    return Another


def without_gradients(net: Plain, x: Tensor) -> Tensor:
    with torch.no_grad():
        return Plain.forward(net, x)


def body_without_gradients(net: Plain, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.tanh(net.a(x.flatten(1)))
    return net.b(h)


def compiled(thing: Any) -> Any:
    return torch.compile(thing, backend="eager")


def lazy(net: Plain) -> None:
    """Lazy layers that draw what the plain ones would."""
    net.a, net.b = nn.LazyLinear(6), nn.LazyLinear(10)


LIKE_PLAIN: dict[str, Callable[[Shape, int], nn.Module]] = {
    "compiled": changed(compiled),
    "fx": changed(torch.fx.symbolic_trace),
    "unused layer": another(Plain.forward, unused=lambda: nn.Linear(3, 2)),
}
"""They compute what Plain does."""


def run(model: Any, folder: Path, algo: str = "fedlap_cov") -> Tensor:
    done = fedsim.run(
        algo=algo, model=model, clients=3, rounds=2, workers=0, seed=1, quiet=True, out=str(folder)
    )
    assert done.status == "done"
    return parameters_to_vector(done.model().parameters()).detach()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return run(Plain, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIKE_PLAIN)
def test_a_model_that_computes_the_same_ends_at_the_same_weights(
    name: str, plain: Tensor, tmp_path: Path
) -> None:
    """To 1e-5 of the largest: strides and compilers may order sums in another way."""
    weights = run(LIKE_PLAIN[name], tmp_path / "run")
    if name == "unused layer":
        assert not weights[len(plain) :].eq(0).all()  # it stays at its start
        weights = weights[: len(plain)]
    assert float((weights - plain).abs().max() / plain.abs().max()) < 1e-5


def test_lazy_layers_are_trained(tmp_path: Path) -> None:
    assert run(changed(lazy), tmp_path / "run").numel() == 64 * 6 + 6 + 6 * 10 + 10


@pytest.mark.parametrize("algo", ["fedavg", "fedlap_cov"])
def test_a_body_without_gradients_stays_where_it_is_and_the_head_is_trained(
    algo: str, tmp_path: Path
) -> None:
    """What has no gradient is moved by a prior alone, and FedAvg has none."""
    weights = run(another(body_without_gradients), tmp_path / "run", algo)
    torch.manual_seed(1)
    start = parameters_to_vector(Plain((1, 8, 8), 10).parameters()).detach()
    body = 64 * 6 + 6
    assert not torch.allclose(weights[body:], start[body:].to(weights))
    if algo == "fedavg":
        assert torch.equal(weights[:body], start[:body])
    assert torch.isfinite(weights).all()


REFUSED: dict[str, tuple[Any, str]] = {
    "script": (changed(torch.jit.script), "is TorchScript"),
    "meta inside": (
        another(Plain.forward, c=lambda: nn.Linear(2, 2, device="meta")),
        r"c\.weight has no values.*meta device",
    ),
    "no gradients": (another(without_gradients), "no trained parameter reaches the model's outputs"),
    "distributed": (changed(nn.parallel.DistributedDataParallel), "calling it with shape"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    model, words = REFUSED[name]
    with pytest.raises(UsageError, match=words) as refused:
        run(model, tmp_path / "run")
    assert "\n" not in str(refused.value)


class TiedByReference(Plain):
    """The weight of b stands in a list, too, and is used from there."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__(shape, classes)
        self.kept = [self.b.weight]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.a(x.flatten(1))), self.kept[0], self.b.bias)


def test_a_parameter_that_a_model_holds_twice_is_one_parameter(tmp_path: Path) -> None:
    """It is trained like the same layer called as usual, and not left at its start."""
    weights = run(TiedByReference, tmp_path / "by reference", "fedavg")
    assert torch.equal(weights, run(Plain, tmp_path / "plain", "fedavg"))
