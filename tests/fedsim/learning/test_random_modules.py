"""The curvature of random small modules: exact, or refused.

A module is an input, some steps and a head, in float64. A step either leaves the curvature of every layer
exact, or uses a parameter in a way that loses terms (FORBIDDEN). A module without a forbidden step must be
accepted. Brute force is autograd, example by example and column by column; "relative error" is the largest
difference by the largest entry. A sum here has fewer than 1e5 terms, each with the rounding of a backward
pass of some dozen operations, so 1e5 * 12 * 2.2e-16 < 1e-9 bounds it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from fedsim.errors import FedsimError, UsageError
from fedsim.learning.curvature.diagonal_ggn import diagonal_ggn, squared_pullback
from fedsim.learning.curvature.fisher import squared_gradients
from fedsim.learning.curvature.full_ggn import full_ggn
from fedsim.learning.likelihoods import CATEGORICAL

EXACT = 1e-9
MODULES = 500
N, T, D, CLASSES = 4, 3, 4, 3
"""Examples, places of a sequence, features, classes. N is also the side of some sequences: N places."""

Step = Callable[[Tensor], Tensor]


class Built(nn.Module):
    """An input layer, steps and a head; `forbidden` names the steps that may lose terms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.values = nn.ParameterList()
        self.steps: list[Step] = []
        self.used: list[str] = []
        self.forbidden: list[str] = []

    def own(self, layer: nn.Module) -> nn.Module:
        self.layers.append(layer)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def dense(draw: Random) -> nn.Module:
    return nn.Linear(D, D, bias=draw.random() < 0.7)


def affine(draw: Random) -> nn.Module:
    return nn.Linear(D, D)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def attention(draw: Random) -> nn.Module:
    return nn.MultiheadAttention(D, 2, batch_first=True)


Make = Callable[[Random], nn.Module]
NewStep = Callable[[Built, Random], Step]
"""Adds a step (n, ..., D) -> (n, ..., D) to a module."""


def one(step: Callable[[Any, Tensor], Tensor], make: Make = dense) -> NewStep:
    """A step of one layer, which is the first argument of `step`."""

    def new_step(net: Built, draw: Random) -> Step:
        layer = net.own(make(draw))
        return lambda h: step(layer, h)

    return new_step


def several(step: Callable[..., Tensor], *makes: Make) -> NewStep:
    """A step of several layers, which are its first arguments."""

    def new_step(net: Built, draw: Random) -> Step:
        layers = [net.own(make(draw)) for make in makes]
        return lambda h: step(*layers, h)

    return new_step


def rows(h: Tensor) -> Tensor:
    """The same as (n, places, D)."""
    return h.reshape(len(h), -1, D)


# ---- steps that keep the curvature exact


def linear(net: Built, draw: Random) -> Step:
    layer = net.own(dense(draw))
    activation = draw.choice([torch.tanh, torch.relu, torch.sigmoid, F.gelu, nn.Identity()])
    return lambda h: activation(layer(h))


def in_place(net: Built, draw: Random) -> Step:
    layer = net.own(dense(draw))
    change: Step = draw.choice([torch.relu_, torch.tanh_, nn.ReLU(inplace=True), Tensor.sigmoid_])
    return lambda h: change(layer(h).mul_(1.5).add_(0.1))


def in_place_part(layer: nn.Module, h: Tensor) -> Tensor:
    y: Tensor = layer(h)
    y[..., 0] = 0.5
    y[..., 1:].tanh_()
    return y


def residual_in_place(layer: nn.Module, h: Tensor) -> Tensor:
    y: Tensor = layer(torch.tanh(h))
    y += h
    return y


def group_norm(layer: nn.Module, h: Tensor) -> Tensor:
    out: Tensor = layer(h) if h.dim() == 2 else layer(h.transpose(1, -1)).transpose(1, -1)
    return out


def no_grad_branch(layer: nn.Module, h: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.tanh(layer(h))
    return h * y


def constant_input(layer: nn.Module, h: Tensor) -> Tensor:
    return h + layer(torch.ones(len(h), D, dtype=h.dtype)).reshape(len(h), *[1] * (h.dim() - 2), D)


def sorted_inside(layer: nn.Module, h: Tensor) -> Tensor:
    order = h.detach().flatten(1).sum(1).argsort()
    return torch.tanh(layer(h[order]))[order.argsort()]


def watched(net: Built, draw: Random) -> Step:
    layer, seen = net.own(dense(draw)), list[float]()
    layer.register_forward_hook(lambda m, args, out: seen.append(float(out.detach().sum())))
    return lambda h: layer(h)


def frozen_bias(draw: Random) -> nn.Module:
    layer = nn.Linear(D, D)
    layer.bias.requires_grad_(False)
    return layer


def attends(q: nn.Module, k: nn.Module, v: nn.Module, h: Tensor) -> Tensor:
    return h + F.scaled_dot_product_attention(q(h), k(h), v(h)) if h.dim() == 3 else q(h) * k(h)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, d: Tensor) -> Tensor:
        return d / 2


custom_gradient = one(lambda layer, h: Halved.apply(layer(h)))
without_gradients = one(no_grad_branch)
"""A custom gradient beside a call without gradients may hide parameters, so it is tried alone below."""

ALLOWED: dict[str, NewStep] = {
    "linear": linear,
    "in_place": in_place,
    "in_place_part": one(in_place_part),
    "residual": one(lambda layer, h: h + torch.tanh(layer(h))),
    "residual_in_place": one(residual_in_place),
    "norm": one(lambda layer, h: layer(h), lambda draw: nn.LayerNorm(D, bias=draw.random() < 0.5)),
    "group_norm": one(group_norm, lambda draw: nn.GroupNorm(2, D)),
    "detached_branch": one(lambda layer, h: h + torch.tanh(layer(h)).detach()),
    "no_grad_branch": without_gradients,
    "stop_gradient_copy": one(lambda layer, h: 2 * layer(h) - layer(h).detach()),
    "never_called": one(lambda layer, h: h),
    "constant_input": one(constant_input),
    "sorted_inside": one(sorted_inside),
    "watched": watched,
    "by_forward": one(lambda layer, h: torch.tanh(layer.forward(input=h))),
    "frozen_by_hand": one(
        lambda layer, h: torch.tanh(layer(layer(h))) @ layer.weight.t(), lambda draw: frozen(dense(draw))
    ),
    "frozen_bias": one(lambda layer, h: layer(h) + layer.bias, frozen_bias),
    "frozen_attention": one(
        lambda layer, h: h + (layer(h, h, h)[0] if h.dim() == 3 else h), lambda draw: frozen(attention(draw))
    ),
    "stop_gradient_norm": one(lambda layer, h: layer(h) / layer.weight.detach().norm()),
    "low_rank": several(
        lambda base, a, b, h: base(h) + 2.0 * b(a(F.dropout(h, 0.5, base.training))),
        lambda draw: frozen(dense(draw)),
        lambda draw: nn.Linear(D, 2, bias=False),
        lambda draw: nn.Linear(2, D, bias=False),
    ),
    "gate": several(lambda a, b, h: torch.sigmoid(a(h)) * b(h), dense, dense),
    "attention": several(attends, dense, dense, dense),
    "checkpointed": one(lambda layer, h: checkpoint(lambda y: torch.tanh(layer(y)), h, use_reentrant=False)),
}


# ---- steps that lose terms


def own_parameter(net: Built, draw: Random) -> Step:
    net.values.append(nn.Parameter(torch.randn(D)))
    scale = len(net.values) - 1
    return lambda h: h * net.values[scale]


def hooked(draw: Random) -> nn.Module:
    layer = dense(draw)
    layer.register_forward_hook(lambda m, args, out: out * m.weight.norm())
    return layer


def hooked_before(draw: Random) -> nn.Module:
    layer = dense(draw)
    layer.register_forward_pre_hook(lambda m, args: (args[0] + m.weight.mean(),))
    return layer


def held_in_a_list(net: Built, draw: Random) -> Step:
    layer = net.own(dense(draw))
    parts = [layer.weight]
    return lambda h: layer(h) @ parts[0]


def shared(net: Built, draw: Random) -> Step:
    a, b = net.own(dense(draw)), net.own(dense(draw))
    b.weight = a.weight
    return lambda h: b(torch.tanh(a(h)))


def normalised(draw: Random) -> nn.Module:
    change = draw.choice([weight_norm, spectral_norm, nn.utils.weight_norm])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer: nn.Module = change(nn.Linear(D, D))
    return layer


def computed_weight(net: Built, draw: Random) -> Step:
    """The weight of one layer is made of that of another, and is no parameter."""
    layer, source = net.own(dense(draw)), net.own(dense(draw))
    del layer.weight

    def step(h: Tensor) -> Tensor:
        layer.weight = torch.tanh(source.weight)
        return layer(h)

    return step


def in_training_mode(layer: nn.Module, h: Tensor) -> Tensor:
    layer.train(len(h) > 1)
    return layer(rows(h).transpose(1, 2)[..., None]).squeeze(3).transpose(1, 2).reshape(h.shape)


def other_values(layer: nn.Module, h: Tensor) -> Tensor:
    out: Tensor = functional_call(layer, {n: 2 * p for n, p in layer.named_parameters()}, (h,))
    return out


def places_first(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.transpose(0, 1)).transpose(0, 1) if h.dim() == 3 else layer(layer(h))


def folded(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h.reshape(-1, D)).reshape(h.shape) if h.dim() == 3 else layer(layer(h))


FORBIDDEN: dict[str, NewStep] = {
    "transposed": one(lambda layer, h: torch.tanh(layer(h)) @ layer.weight.t()),
    "tied": one(lambda layer, h: F.linear(torch.tanh(layer(h)), layer.weight)),
    "cosine": one(lambda layer, h: layer(h) / layer.weight.norm(dim=1)),
    "bias_again": one(lambda layer, h: torch.tanh(layer(h)) + layer.bias, affine),
    "bias_in_place": one(lambda layer, h: layer(h).add_(layer.bias), affine),
    "twice": one(lambda layer, h: layer(torch.tanh(layer(h)))),
    "forward_and_call": one(lambda layer, h: layer(torch.tanh(layer.forward(h)))),
    "in_its_input": one(lambda layer, h: layer(h + layer.weight.sum())),
    "by_hand_alone": one(lambda layer, h: torch.tanh(h @ layer.weight)),
    "own_parameter": own_parameter,
    "hooked": one(lambda layer, h: layer(h), hooked),
    "hooked_before": one(lambda layer, h: layer(h), hooked_before),
    "held_in_a_list": held_in_a_list,
    "shared": shared,
    "normalised": one(lambda layer, h: layer(h), normalised),
    "computed_weight": computed_weight,
    "other_values": one(other_values),
    "vectorised": one(lambda layer, h: torch.vmap(layer)(h)),
    "in_training_mode": one(in_training_mode, lambda draw: nn.BatchNorm2d(D)),
    "hidden_by_checkpoint": one(
        lambda layer, h: checkpoint(lambda y: torch.tanh(layer(y)), h, use_reentrant=True)
    ),
    "batch_mean": one(lambda layer, h: layer(h - h.mean(0))),
    "neighbours": one(lambda layer, h: h + torch.tanh(layer(h)).roll(1, 0)),
    "places_first": one(places_first),
    "folded": one(folded),
    "recurrent": one(
        lambda layer, h: layer(rows(h))[0].reshape(h.shape),
        lambda draw: draw.choice([nn.LSTM, nn.GRU])(D, D, batch_first=True),
    ),
    "trained_attention": one(lambda layer, h: layer(*[rows(h)] * 3)[0].reshape(h.shape), attention),
    "unknown_layer": one(
        lambda layer, h: layer(h, h) if isinstance(layer, nn.Bilinear) else layer(h),
        lambda draw: draw.choice([nn.PReLU(), nn.RMSNorm(D), nn.Bilinear(D, D, D)]),
    ),
}


# ---- inputs and heads


def vectors(net: Built, draw: Random) -> Tensor:
    layer = net.own(nn.Linear(5, D))
    net.steps.append(lambda x: torch.tanh(layer(x)))
    return torch.randn(N, 5)


def sequences(net: Built, draw: Random) -> Tensor:
    layer, places = net.own(nn.Linear(5, D)), draw.choice([T, N])
    net.steps.append(lambda x: layer(x))
    return torch.randn(N, places, 5)


def words(net: Built, draw: Random) -> Tensor:
    layer = net.own(nn.Embedding(6, D, padding_idx=draw.choice([None, 0, -1])))
    net.steps.append(lambda x: layer(x.long()))
    return torch.randint(6, (N,) if draw.random() < 0.3 else (N, T)).double()


def images(net: Built, draw: Random) -> Tensor:
    conv = net.own(nn.Conv2d(2, D, 3, stride=draw.choice([1, 2]), padding=draw.choice([0, 1, 2])))
    second = net.own(nn.Conv2d(D, D, 1, bias=False))
    between = net.own(draw.choice([nn.GroupNorm(2, D), nn.BatchNorm2d(D)]))
    if isinstance(between, nn.BatchNorm2d):
        between.running_mean, between.running_var = torch.randn(D), torch.rand(D) + 0.5
    net.steps.append(lambda x: second(F.relu(between(conv(x)), inplace=True)).mean(3).transpose(1, 2))
    return torch.randn(N, 2, 5, 5)


def build(seed: int) -> tuple[Built, Tensor, Tensor | None]:
    """A module, its inputs, and which places count, of a module with logits for every place."""
    draw = Random(seed)
    torch.manual_seed(seed)
    net = Built()
    x = draw.choice([vectors, sequences, words, images])(net, draw)
    for _ in range(draw.randint(1, 4)):
        forbidden = draw.random() < 0.15
        name, new_step = draw.choice([*(FORBIDDEN if forbidden else ALLOWED).items()])
        net.steps.append(new_step(net, draw))
        net.used.append(name)
        if forbidden:
            net.forbidden.append(name)
    head = net.own(nn.Linear(D, CLASSES))
    places = None
    if x.dim() > 1 and x.shape[1] == T and draw.random() < 0.4:
        net.steps.append(lambda h: head(h + h.mean(1, keepdim=True)))
        places = torch.rand(N, T) < 0.7
    else:
        net.steps.append(lambda h: head(h if h.dim() == 2 else h.mean(1)))
    return net.double().eval(), x.double(), places


# ---- brute force


def trained(net: nn.Module) -> list[Tensor]:
    return [p for p in net.parameters() if p.requires_grad]


def pulled(net: nn.Module, outputs: Tensor, column: Tensor) -> Tensor:
    slopes = torch.autograd.grad(
        (outputs * column).sum(), trained(net), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([d.flatten() for d in slopes])


def factors(net: nn.Module, x: Tensor, places: Tensor | None) -> Tensor:
    """The rows J_n' s_(n,c), of which the GGN is the sum of squares, of every example alone."""
    rows = []
    for n, example in enumerate(x):
        logits = net(example[None])[0]
        for t, z in enumerate(logits if logits.dim() == 2 else logits[None]):
            if places is None or places[n, t]:
                p = z.detach().softmax(0)
                root = torch.diag(p.sqrt()) - torch.outer(p, p.sqrt())
                rows += [pulled(net, z, root[:, c]) for c in range(CLASSES)]
    return torch.stack(rows) if rows else torch.zeros(1, sum(p.numel() for p in trained(net)), dtype=x.dtype)


def error(result: Tensor, exact: Tensor) -> float:
    scale = float(exact.abs().max())
    apart = float((result - exact).abs().max())
    return apart / scale if scale else apart


def attempt(compute: Callable[[], Tensor], exact: Callable[[], Tensor], what: str) -> float | None:
    """The relative error; None: refused. Nothing but a FedsimError may be raised."""
    refusal = ""
    try:
        result = compute()
    except FedsimError as e:
        refusal = str(e)
    assert "\n" not in refusal, what
    return None if refusal else error(result, exact())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires")
def test_a_random_module_is_exact_or_refused() -> None:
    """At least 40 % are exact, all that have no forbidden step are, and every forbidden step is tried."""
    counts, seen = Counter[str](), Counter[str]()
    worst = 0.0
    for seed in range(MODULES):
        net, x, places = build(seed)
        counted = None if places is None else [places]
        what = f"seed {seed}: {net.used}"
        e = attempt(
            lambda: diagonal_ggn(net, [x], counted=counted),  # noqa: B023
            lambda: factors(net, x, places).square().sum(0),  # noqa: B023
            what,
        )
        seen.update(net.used)
        counts["refused" if e is None else "exact"] += 1
        assert e is not None or net.forbidden, what
        if e is not None:
            assert e < EXACT, f"{what}: relative error {e:.1e}"
            worst = max(worst, e)
            assert "forward" not in {key for m in net.modules() for key in vars(m)}
    print(f"{dict(counts)} of {MODULES}, worst relative error {worst:.1e}")
    assert counts["exact"] >= 0.4 * MODULES
    assert not {*ALLOWED, *FORBIDDEN} - seen.keys()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires")
@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize("kind", [vectors, sequences])
def test_a_forbidden_step_alone_is_refused_or_exact(
    kind: Callable[[Built, Random], Tensor], name: str
) -> None:
    """Also where the step is the first after the input or the last before the head, and for one example."""
    draw, net = Random(1), Built()
    torch.manual_seed(1)
    x = kind(net, draw).double()
    net.steps.append(FORBIDDEN[name](net, draw))
    head = net.own(nn.Linear(D, CLASSES))
    net.steps.append(lambda h: head(h if h.dim() == 2 else h.mean(1)))
    net.double().eval()
    for some in (x, x[:1]):
        e = attempt(
            lambda: diagonal_ggn(net, [some]),  # noqa: B023
            lambda: factors(net, some, None).square().sum(0),  # noqa: B023
            name,
        )
        assert e is None or e < EXACT


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:None of the inputs have requires")
@pytest.mark.parametrize("seed", range(0, MODULES, 5))
def test_the_full_ggn_and_squared_gradients_are_exact_or_refused(seed: int) -> None:
    net, x, places = build(seed)
    if places is not None:
        return
    what = f"seed {seed}: {net.used}"
    e = attempt(lambda: full_ggn(net, [x]), lambda: (m := factors(net, x, None)).T @ m, what)
    assert e is None or e < EXACT, f"{what}: {e}"
    targets = torch.randint(CLASSES, (N,))

    def uphill(outputs: Tensor) -> Tensor:
        return F.one_hot(targets, CLASSES) - outputs.softmax(1)

    def one_by_one() -> Tensor:
        outputs = [net(example[None]) for example in x]
        rows = [pulled(net, z, uphill(z.detach())[n]) for n, z in enumerate(outputs)]
        return torch.stack(rows).square().sum(0)

    e = attempt(lambda: squared_pullback(net, x, uphill), one_by_one, what)
    assert (e is None and net.forbidden) or (e is not None and e < EXACT), f"{what}: {e}"
    stand_in = SimpleNamespace(load=lambda weights: None, eval=net.eval, likelihood=CATEGORICAL, module=net)
    e = attempt(lambda: squared_gradients(stand_in, torch.zeros(0), x, targets), one_by_one, what)
    assert (e is None and net.forbidden) or (e is not None and e < EXACT), f"{what}: {e}"


def test_a_custom_gradient_is_exact() -> None:
    net, draw = Built(), Random(0)
    x = vectors(net, draw).double()
    net.steps += [custom_gradient(net, draw), net.own(nn.Linear(D, CLASSES))]
    net.double().eval()
    assert error(diagonal_ggn(net, [x]), factors(net, x, None).square().sum(0)) < EXACT


def test_a_call_without_gradients_beside_a_custom_gradient_is_refused() -> None:
    """A function of the user's may compute the layer's gradient itself."""
    net, draw = Built(), Random(0)
    x = vectors(net, draw).double()
    net.steps += [without_gradients(net, draw), custom_gradient(net, draw), net.own(nn.Linear(D, CLASSES))]
    net.double().eval()
    with pytest.raises(
        UsageError, match=r"'layers\.1' \(Linear\).*HalvedBackward hides its parameters.*--freeze"
    ):
        diagonal_ggn(net, [x])


def test_a_layer_under_autocast_is_refused() -> None:
    """Its output has another dtype than its parameters."""
    layer = nn.Linear(D, CLASSES)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x).float()

    with pytest.raises(UsageError, match=r"'layer' \(Linear\): its weight reaches the outputs outside"):
        diagonal_ggn(Cast(), [torch.randn(N, D)])
