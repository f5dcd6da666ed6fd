"""diagonal_ggn against brute force, the true Hessian, and the cases it must refuse.

Identity 13 of docs/references/equations.md#identity-13. "Relative error" is |found - exact| / |exact|.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from fedsim.errors import UsageError
from fedsim.learning.curvature import diagonal_ggn as of_diagonal
from fedsim.learning.curvature.diagonal_ggn import COLUMNS, best_chunk, diagonal_ggn, example_bytes

EXACT = 1e-12  # float64; measured 1e-16 .. 2e-16


class Residual(nn.Module):
    """conv - norm - relu - conv - norm plus the input, pooled, dense."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3, padding=1)
        self.conv1, self.norm1 = nn.Conv2d(2, 2, 3, padding=1, bias=False), norm()
        self.conv2, self.norm2 = nn.Conv2d(2, 2, 3, padding=1, bias=False), norm()
        self.out = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.out(torch.relu(h + x).mean((2, 3)))
        return out


class Tokens(nn.Module):
    """Dense layers and LayerNorm on sequences (n, 3, 4): parameters shared along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)
        self.last, self.out = nn.LayerNorm((3, 3), bias=False), nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(input=self.inner(x)))
        out: Tensor = self.out(self.last(h).mean(1))
        return out


def relu_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(1, 2)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def relu_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sigmoid_mlp": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3)),
        (2, 3),
    ),
    "relu_mlp": (relu_mlp, (5,)),
    "relu_cnn": (relu_cnn, (2, 5, 6)),
    "residual_gn": (lambda: Residual(lambda: nn.GroupNorm(2, 2)), (1, 4, 4)),
    "residual_bn": (lambda: Residual(lambda: nn.BatchNorm2d(2)), (1, 4, 4)),
    "mlp_bn": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "layer_norm": (Tokens, (3, 4)),
}


def make(name: str, n: int = 7, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """A net with generic parameters and running statistics, in training mode, and n inputs."""
    torch.manual_seed(3)
    build, shape = NETS[name]
    net = build().to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.5 * torch.randn_like(p))
        for m in net.modules():
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
                m.running_mean = torch.randn(m.num_features, dtype=dtype)
                m.running_var = torch.rand(m.num_features, dtype=dtype) + 0.5
    return net, torch.randn(n, *shape, dtype=dtype)


def brute_force(net: nn.Module, x: Tensor) -> Tensor:
    """sum_n diag(J_n' H_n J_n) from the dense Jacobian of every example, in eval mode."""
    net.eval()
    parameters = list(net.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=x.dtype)
    for example in x:
        z = net(example[None])[0]
        rows = [torch.autograd.grad(z_c, parameters, retain_graph=True) for z_c in z]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        p = z.detach().softmax(0)
        hessian = torch.diag(p) - torch.outer(p, p)
        total += torch.einsum("cp,cd,dp->p", jacobian, hessian, jacobian)
    return total


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", NETS)
def test_equals_brute_force(name: str) -> None:
    net, x = make(name)
    assert error(diagonal_ggn(net, [x]), brute_force(net, x)) < EXACT


@pytest.mark.parametrize("name", NETS)
def test_does_not_depend_on_the_chunks(name: str) -> None:
    net, x = make(name)
    whole = diagonal_ggn(net, [x])
    for size in (1, 3):
        assert error(diagonal_ggn(net, torch.split(x, size)), whole) < EXACT
    assert error(diagonal_ggn(net, iter([x[:0], x])), whole) < EXACT


def test_no_examples_have_no_curvature() -> None:
    net, _ = make("relu_mlp")
    assert not diagonal_ggn(net, []).any()


def test_float32_of_a_confident_model() -> None:
    """p (1 - p) for 1 - p of about 1e-9, where 1 - p is 0 in float32: the columns do not cancel."""
    net = nn.Linear(1, 3)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor([20.0, 0.0, -1.0]))
    p = torch.tensor([20.0, 0.0, -1.0], dtype=torch.float64).softmax(0)
    bias = diagonal_ggn(net, [torch.ones(1, 1)])[3:]
    assert error(bias, p * (p[1] + p[2] + p[0] - p)) < 1e-5


def test_columns_are_in_parameter_order_and_row_major() -> None:
    """One example, one dense layer: weight (c, i) has p_c (1 - p_c) x_i^2, bias p_c (1 - p_c)."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).double(), torch.randn(1, 4, dtype=torch.float64)
    p = net(x).detach()[0].softmax(0)
    h = p * (1 - p)
    exact = torch.cat([torch.outer(h, x[0] ** 2).flatten(), h])
    assert error(diagonal_ggn(net, [x]), exact) < EXACT


@pytest.mark.parametrize("columns", ["sign", "top2_sign"])
@pytest.mark.parametrize("name", ["relu_mlp", "relu_cnn", "layer_norm"])
def test_sketches_are_unbiased(name: str, columns: str) -> None:
    """The mean of 4000 draws is within 3 %, and 10 times closer than one draw (theory: 63)."""
    net, x = make(name, n=2)
    draws, exact = 4000, brute_force(net, x)
    copies = x.repeat(draws, *(1 for _ in x.shape[1:]))
    generator = torch.Generator().manual_seed(5)
    total = diagonal_ggn(net, torch.split(copies, 1000), columns=columns, generator=generator)
    one = diagonal_ggn(net, [x], columns=columns, generator=generator)
    assert error(total / draws, exact) < min(0.03, error(one, exact) / 10)


def test_sketch_is_seeded_and_does_not_depend_on_the_chunks() -> None:
    net, x = make("relu_mlp", n=40)

    def draw(seed: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return diagonal_ggn(net, torch.split(x, size), columns="sign", generator=generator)

    assert error(draw(1, 40), draw(1, 9)) < EXACT
    assert error(draw(2, 40), draw(1, 40)) > 1e-3


@pytest.mark.parametrize("classes", [2, 3])
def test_top2_sign_is_exact_for_few_classes(classes: int) -> None:
    """Two columns are all of two; of three, the sketch of the one that is left is exact."""
    torch.manual_seed(0)
    net = nn.Linear(4, classes).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    result = diagonal_ggn(net, [x], columns="top2_sign", generator=generator)
    assert error(result, brute_force(net, x)) < EXACT


def test_top2_sign_is_closer_than_sign() -> None:
    net, x = make("relu_cnn", n=200)
    exact = brute_force(net, x)
    errors = {}
    for columns in ("sign", "top2_sign"):
        generator = torch.Generator().manual_seed(0)
        result = diagonal_ggn(net, [x], columns=columns, generator=generator)
        errors[columns] = error(result, exact)
    assert errors["top2_sign"] < errors["sign"] < 0.5


class Branches(nn.Module):
    """Two dense layers on 4 features and whatever the test does with them."""

    def __init__(self, forward: Callable[[Branches, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def two_layers(change: Callable[[Any, Any], object]) -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    change(first, second)
    return nn.Sequential(first, second)


class MyLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).square()


def branches(forward: Callable[[Branches, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Branches(forward)


def conv(**keywords: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(2, 4, 3, **keywords)


def share(first: nn.Linear, second: nn.Linear) -> None:
    second.weight = first.weight


def fold(net: Branches, x: Tensor) -> Tensor:
    out: Tensor = net.a(x.flatten(0, 1)).unflatten(0, (3, -1)).sum(1) + net.b(x.sum(1))
    return out


VEC, IMAGE = (4,), (2, 4, 4)
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "called twice": (branches(lambda net, x: net.a(net.a(x))), VEC, r"'a' \(Linear\):.*twice"),
    "shared parameter": (lambda: two_layers(share), VEC, r"'1'.*shared with '0\.weight'"),
    "circular padding": (conv(padding=1, padding_mode="circular"), IMAGE, r"itself \(Conv2d\).*zero"),
    "string padding": (conv(padding="same"), IMAGE, "only padding by a number of zeros"),
    "grouped": (conv(groups=2), IMAGE, "grouped convolutions"),
    "unknown type": (lambda: nn.Sequential(nn.PReLU(), nn.Linear(4, 3)), VEC, r"'0' \(PReLU\)"),
    "subclass": (lambda: MyLinear(4, 3), VEC, r"MyLinear\): parameters \['bias', 'weight'\]"),
    "parametrised": (lambda: weight_norm(nn.Linear(4, 3)), VEC, "ParametrizedLinear"),
    "batch statistics": (
        lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False),
        VEC,
        "mixes the examples",
    ),
    "all frozen": (
        lambda: two_layers(lambda a, b: (a.requires_grad_(False), b.requires_grad_(False))),
        VEC,
        "it has no trained parameters",
    ),
    "used elsewhere": (
        branches(lambda net, x: net.a(x) @ net.b.weight),
        VEC,
        r"'b' \(Linear\): its weight reaches the outputs outside.*--freeze",
    ),
    "used again": (
        branches(lambda net, x: net.b(net.a(x)) + net.a.bias),
        VEC,
        r"'a' \(Linear\): its bias also reaches the outputs outside.*--freeze",
    ),
    "examples folded": (branches(fold), (2, 4), "'a'.*first axis"),
    "changed input": (branches(lambda net, x: net.b(net.a(x)) + x.relu_()), VEC, "'a'.*in place"),
    "not logits": (lambda: nn.Linear(4, 3), (2, 4), r"must return logits \(3, classes\)"),
    "no parameters": (nn.ReLU, VEC, "it has no trained parameters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_would_be_wrong(case: str) -> None:
    build, shape, message = REFUSED[case]
    net = build()
    with pytest.raises(UsageError, match=message):
        diagonal_ggn(net, [torch.randn(3, *shape)])


def test_refuses_bad_arguments() -> None:
    with pytest.raises(UsageError, match="did you mean 'sign'"):
        diagonal_ggn(nn.Linear(2, 2), [], columns="signs")
    for columns in ("sign", "top2_sign"):
        with pytest.raises(UsageError, match="pass a generator"):
            diagonal_ggn(nn.Linear(2, 2), [], columns=columns)


@pytest.mark.parametrize("columns", COLUMNS)
def test_leaves_the_module_as_it_was(columns: str) -> None:
    """Modes of every submodule, statistics, hooks, parameters, and gradients that are views."""
    net, x = make("residual_bn")
    net.get_submodule("norm1").eval()
    sizes = [p.numel() for p in net.parameters()]
    flat = torch.randn(sum(sizes), dtype=x.dtype)
    for p, g in zip(net.parameters(), torch.split(flat, sizes), strict=True):
        p.grad = g.view_as(p)
    gradients, before = [p.grad for p in net.parameters()], flat.clone()
    state = {k: v.clone() for k, v in net.state_dict().items()}

    diagonal_ggn(net, [x], columns=columns, generator=torch.Generator().manual_seed(0))

    assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
    assert torch.equal(flat, before)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert [name for name, m in net.named_modules() if not m.training] == ["norm1"]
    assert not any(m._forward_hooks for m in net.modules())


def test_restores_the_mode_after_an_exception() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    net.get_submodule("1").eval()
    with pytest.raises(RuntimeError):
        diagonal_ggn(net, [torch.randn(2, 5)])
    assert [m.training for m in net.modules()] == [True, True, False, True]
    assert not any(m._forward_hooks for m in net.modules())


def test_parameters_that_are_views_of_one_buffer() -> None:
    net, x = make("relu_mlp")
    exact = brute_force(net, x)
    parameters = list(net.named_parameters())
    flat, offset = torch.cat([p.detach().flatten() for _, p in parameters]), 0
    for name, p in parameters:
        owner, _, key = name.rpartition(".")
        view = nn.Parameter(flat[offset : offset + p.numel()].view(p.shape))
        setattr(net.get_submodule(owner), key, view)
        offset += p.numel()
    with torch.no_grad():
        assert error(diagonal_ggn(net, [x]), exact) < EXACT


def test_chunks_on_a_cpu() -> None:
    assert best_chunk(relu_cnn(), torch.zeros(1)) == 32
    assert best_chunk(relu_mlp(), torch.zeros(1)) == 512


def test_the_memory_of_an_example() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 10)).train()
    convolution = 3 * 9 * 36 + 2 * 4 * 36 + 2 * (3 * 9 * 4 + 4)
    dense = 144 + 2 * 10 + 2 * (144 * 10 + 10)
    assert example_bytes(net, torch.zeros(1, 3, 8, 8)) == 4 * (convolution + dense)
    assert net.training and not net[0]._forward_hooks


@pytest.mark.parametrize(("memory", "chunk"), [(1, 32), (100 << 10, 64), (150 << 10, 128), (1 << 40, 1024)])
def test_chunks_of_a_gpu_fill_its_memory(memory: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(total_memory=memory * of_diagonal.SHARE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(of_diagonal, "example_bytes", lambda module, example: 1 << 10)
    monkeypatch.setattr(of_diagonal, "_of_gpus", {})
    example = SimpleNamespace(device=torch.device("cuda"))
    assert best_chunk(relu_cnn(), example) == chunk  # type: ignore[arg-type]
