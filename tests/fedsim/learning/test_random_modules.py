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


def dense(net: Built, draw: Random) -> nn.Module:
    return net.own(nn.Linear(D, D, bias=draw.random() < 0.7))


# ---- steps (n, ..., D) -> (n, ..., D) that keep the curvature exact


def linear(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    activation = draw.choice([torch.tanh, torch.relu, torch.sigmoid, F.gelu, nn.Identity()])
    return lambda h: activation(layer(h))


def in_place(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    change: Step = draw.choice([torch.relu_, torch.tanh_, nn.ReLU(inplace=True), Tensor.sigmoid_])

    def step(h: Tensor) -> Tensor:
        y = layer(h)
        return change(y.mul_(1.5).add_(0.1))

    return step


def in_place_part(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)

    def step(h: Tensor) -> Tensor:
        y = layer(h)
        y[..., 0] = 0.5
        y[..., 1:].tanh_()
        return y

    return step


def residual(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: h + torch.tanh(layer(h))


def residual_in_place(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)

    def step(h: Tensor) -> Tensor:
        y = layer(torch.tanh(h))
        y += h
        return y

    return step


def norm(net: Built, draw: Random) -> Step:
    layer = net.own(nn.LayerNorm(D, bias=draw.random() < 0.5))
    return lambda h: layer(h)


def group_norm(net: Built, draw: Random) -> Step:
    layer = net.own(nn.GroupNorm(2, D))
    return lambda h: layer(h) if h.dim() == 2 else layer(h.transpose(1, -1)).transpose(1, -1)


def detached_branch(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: h + torch.tanh(layer(h)).detach()


def no_grad_branch(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)

    def step(h: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.tanh(layer(h))
        return h * y

    return step


def stop_gradient_copy(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: 2 * layer(h) - layer(h).detach()


def never_called(net: Built, draw: Random) -> Step:
    dense(net, draw)
    return lambda h: h


def constant_input(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: h + layer(torch.ones(len(h), D, dtype=h.dtype)).reshape(len(h), *[1] * (h.dim() - 2), D)


def sorted_inside(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)

    def step(h: Tensor) -> Tensor:
        order = h.detach().flatten(1).sum(1).argsort()
        return torch.tanh(layer(h[order]))[order.argsort()]

    return step


def watched(net: Built, draw: Random) -> Step:
    layer, seen = dense(net, draw), list[float]()
    layer.register_forward_hook(lambda m, args, out: seen.append(float(out.detach().sum())))
    return lambda h: layer(h)


def by_forward(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: torch.tanh(layer.forward(input=h))


def frozen_by_hand(net: Built, draw: Random) -> Step:
    layer = dense(net, draw).requires_grad_(False)
    return lambda h: torch.tanh(layer(layer(h))) @ layer.weight.t()


def frozen_bias(net: Built, draw: Random) -> Step:
    layer = net.own(nn.Linear(D, D))
    layer.bias.requires_grad_(False)
    return lambda h: layer(h) + layer.bias


def frozen_attention(net: Built, draw: Random) -> Step:
    layer = net.own(nn.MultiheadAttention(D, 2, batch_first=True)).requires_grad_(False)
    return lambda h: h + (layer(h, h, h)[0] if h.dim() == 3 else h)


def stop_gradient_norm(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: layer(h) / layer.weight.detach().norm()


def low_rank(net: Built, draw: Random) -> Step:
    base, a, b = (
        dense(net, draw).requires_grad_(False),
        nn.Linear(D, 2, bias=False),
        nn.Linear(2, D, bias=False),
    )
    net.own(a), net.own(b)
    return lambda h: base(h) + 2.0 * b(a(F.dropout(h, 0.5, net.training)))


def gate(net: Built, draw: Random) -> Step:
    a, b = dense(net, draw), dense(net, draw)
    return lambda h: torch.sigmoid(a(h)) * b(h)


def attention(net: Built, draw: Random) -> Step:
    q, k, v = (dense(net, draw) for _ in range(3))
    return lambda h: h + F.scaled_dot_product_attention(q(h), k(h), v(h)) if h.dim() == 3 else q(h) * k(h)


def checkpointed(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: checkpoint(lambda y: torch.tanh(layer(y)), h, use_reentrant=False)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, d: Tensor) -> Tensor:
        return d / 2


def custom_gradient(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: Halved.apply(layer(h))


ALLOWED = [
    *(linear, in_place, in_place_part, residual, residual_in_place, norm, group_norm),
    *(detached_branch, no_grad_branch, stop_gradient_copy, never_called, constant_input, sorted_inside),
    *(watched, by_forward, frozen_by_hand, frozen_bias, frozen_attention, stop_gradient_norm),
    *(low_rank, gate, attention, checkpointed),
]
# A custom gradient beside a call without gradients may hide parameters, so it is tried alone below.


# ---- steps that lose terms


def transposed(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: torch.tanh(layer(h)) @ layer.weight.t()


def tied(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: F.linear(torch.tanh(layer(h)), layer.weight)


def cosine(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: layer(h) / layer.weight.norm(dim=1)


def bias_again(net: Built, draw: Random) -> Step:
    layer = net.own(nn.Linear(D, D))
    return lambda h: torch.tanh(layer(h)) + layer.bias


def bias_in_place(net: Built, draw: Random) -> Step:
    layer = net.own(nn.Linear(D, D))
    return lambda h: layer(h).add_(layer.bias)


def twice(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: layer(torch.tanh(layer(h)))


def forward_and_call(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: layer(torch.tanh(layer.forward(h)))


def in_its_input(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: layer(h + layer.weight.sum())


def by_hand_alone(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: torch.tanh(h @ layer.weight)


def own_parameter(net: Built, draw: Random) -> Step:
    net.values.append(nn.Parameter(torch.randn(D)))
    scale = len(net.values) - 1
    return lambda h: h * net.values[scale]


def hooked(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    layer.register_forward_hook(lambda m, args, out: out * m.weight.norm())
    return lambda h: layer(h)


def hooked_before(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    layer.register_forward_pre_hook(lambda m, args: (args[0] + m.weight.mean(),))
    return lambda h: layer(h)


def held_in_a_list(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    kept = [layer.weight]
    return lambda h: layer(h) @ kept[0]


def shared(net: Built, draw: Random) -> Step:
    a, b = dense(net, draw), dense(net, draw)
    b.weight = a.weight
    return lambda h: b(torch.tanh(a(h)))


def normalised(net: Built, draw: Random) -> Step:
    change = draw.choice([weight_norm, spectral_norm, nn.utils.weight_norm])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = net.own(change(nn.Linear(D, D)))
    return lambda h: layer(h)


def computed_weight(net: Built, draw: Random) -> Step:
    """The weight of one layer is made of that of another, and is no parameter."""
    layer, source = dense(net, draw), dense(net, draw)
    del layer.weight

    def step(h: Tensor) -> Tensor:
        layer.weight = torch.tanh(source.weight)
        return layer(h)

    return step


def other_values(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: functional_call(layer, {n: 2 * p for n, p in layer.named_parameters()}, (h,))


def vectorised(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: torch.vmap(layer)(h)


def in_training_mode(net: Built, draw: Random) -> Step:
    layer = net.own(nn.BatchNorm2d(D))

    def step(h: Tensor) -> Tensor:
        layer.train(len(h) > 1)
        return (
            layer(h.reshape(len(h), -1, D).transpose(1, 2)[..., None])
            .squeeze(3)
            .transpose(1, 2)
            .reshape(h.shape)
        )

    return step


def hidden_by_checkpoint(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: checkpoint(lambda y: torch.tanh(layer(y)), h, use_reentrant=True)


def batch_mean(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: layer(h - h.mean(0))


def neighbours(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: h + torch.tanh(layer(h)).roll(1, 0)


def places_first(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: layer(h.transpose(0, 1)).transpose(0, 1) if h.dim() == 3 else layer(layer(h))


def folded(net: Built, draw: Random) -> Step:
    layer = dense(net, draw)
    return lambda h: layer(h.reshape(-1, D)).reshape(h.shape) if h.dim() == 3 else layer(layer(h))


def recurrent(net: Built, draw: Random) -> Step:
    layer = net.own(draw.choice([nn.LSTM, nn.GRU])(D, D, batch_first=True))
    return lambda h: layer(h.reshape(len(h), -1, D))[0].reshape(h.shape)


def trained_attention(net: Built, draw: Random) -> Step:
    layer = net.own(nn.MultiheadAttention(D, 2, batch_first=True))
    return lambda h: layer(*[h.reshape(len(h), -1, D)] * 3)[0].reshape(h.shape)


def unknown_layer(net: Built, draw: Random) -> Step:
    layer = net.own(draw.choice([nn.PReLU(), nn.RMSNorm(D), nn.Bilinear(D, D, D)]))
    return lambda h: layer(h, h) if isinstance(layer, nn.Bilinear) else layer(h)


FORBIDDEN = [
    *(transposed, tied, cosine, bias_again, bias_in_place, twice, forward_and_call, in_its_input),
    *(
        by_hand_alone,
        own_parameter,
        hooked,
        hooked_before,
        held_in_a_list,
        shared,
        normalised,
        computed_weight,
    ),
    *(other_values, vectorised, in_training_mode, hidden_by_checkpoint, batch_mean, neighbours),
    *(places_first, folded, recurrent, trained_attention, unknown_layer),
]


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
        new_step = draw.choice(FORBIDDEN if forbidden else ALLOWED)
        net.steps.append(new_step(net, draw))
        net.used.append(new_step.__name__)
        if forbidden:
            net.forbidden.append(new_step.__name__)
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
    assert not {new_step.__name__ for new_step in (*ALLOWED, *FORBIDDEN)} - seen.keys()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires")
@pytest.mark.parametrize("new_step", FORBIDDEN, ids=lambda new_step: new_step.__name__)
@pytest.mark.parametrize("kind", [vectors, sequences])
def test_a_forbidden_step_alone_is_refused_or_exact(
    kind: Callable[[Built, Random], Tensor], new_step: Callable[[Built, Random], Step]
) -> None:
    """Also where the step is the first after the input or the last before the head, and for one example."""
    draw, net = Random(1), Built()
    torch.manual_seed(1)
    x = kind(net, draw).double()
    net.steps.append(new_step(net, draw))
    head = net.own(nn.Linear(D, CLASSES))
    net.steps.append(lambda h: head(h if h.dim() == 2 else h.mean(1)))
    net.double().eval()
    for rows in (x, x[:1]):
        e = attempt(
            lambda: diagonal_ggn(net, [rows]),  # noqa: B023
            lambda: factors(net, rows, None).square().sum(0),  # noqa: B023
            new_step.__name__,
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
    net.steps += [no_grad_branch(net, draw), custom_gradient(net, draw), net.own(nn.Linear(D, CLASSES))]
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
