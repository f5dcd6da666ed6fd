"""FedLap-Cov and IVON-ADMM a second time, from the papers, without a line of fedsim.

    python tests/independent/federated.py ALGORITHM PROBLEM.npz CURVE.csv ROUNDS '{"delta": 0.01}'

This file imports no package of the repository. torch is only its array library: derivatives, Adam, the
diagonal of the Gauss-Newton matrix, IVON, duals and servers are written out, for linear layers with sigmoids
between them and softmax cross-entropy. docs/recipes/table_twice.py compares the two.

Symbols are the papers': l_k is the SUM of the losses of client k, N_k the number of its examples, P that of
parameters; v_k w - u_k w^2 / 2, with V_k for u_k in FedLap-Cov, is added to l_k for each parameter.

Where the papers leave something open or differ from their release (team-approx-bayes/bayes-admm, bd80f94):
  1. The first local training starts at the network's random weights. The prior of round 1 is N(0, I/delta),
     as in the papers; the released FedLap-Cov has precision 0 in round 1.
  2. Adam's moments and IVON's momentum live as long as the client, and their debiasing counts all steps
     since round 1, as released. The papers are silent; Algorithm 2 prints no debiasing.
  3. IVON's curvature starts at h0 in round 1 and at 0 afterwards, as released; Algorithm 2 prints h0.
  4. Nothing is clipped or floored.

References:
    Swaroop, Khan, Doshi-Velez 2025, Connecting Federated ADMM to Bayes, arXiv:2501.17325, Eq. 21.
    Moellenhoff, Swaroop, Doshi-Velez, Khan 2026, Federated ADMM from Bayesian Duality, arXiv:2506.13150.
    Kingma, Ba 2015, Adam, arXiv:1412.6980, Algorithm 1.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Examples = tuple[Tensor, Tensor]
"""Inputs (N, D) and labels (N,)."""


@dataclass(frozen=True)
class Problem:
    """start: weight (O, I) and bias (O,) of each layer, from the inputs on. seed: of all random numbers."""

    clients: Sequence[Examples]
    test: Examples
    start: Sequence[tuple[Tensor, Tensor]]
    seed: int

    @classmethod
    def read(cls, path: Path, dtype: torch.dtype = torch.float32) -> Problem:
        """Read an .npz with X_0, y_0, X_1, ..., X_test, y_test, weight_0, bias_0, weight_1, ... and seed."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file}
        clients, layers = (sum(name.startswith(part) for name in arrays) for part in ("y_", "weight_"))
        return cls(
            [(arrays[f"X_{k}"].to(dtype), arrays[f"y_{k}"].long()) for k in range(clients - 1)],
            (arrays["X_test"].to(dtype), arrays["y_test"].long()),
            [(arrays[f"weight_{i}"].to(dtype), arrays[f"bias_{i}"].to(dtype)) for i in range(layers)],
            int(arrays["seed"]),
        )


class Draws:
    """Minibatch orders and normal variables of one client in one round; streams are independent."""

    def __init__(self, seed: int, client: int, round_number: int) -> None:
        words = np.random.SeedSequence([seed, client, round_number]).generate_state(1, np.uint64)
        self.orders = self.normals = torch.Generator().manual_seed(int(words[0] >> 1))

    def order(self, examples: int) -> Tensor:
        """A random permutation of the examples' numbers."""
        return torch.randperm(examples, generator=self.orders)

    def normal(self, like: Tensor) -> Tensor:
        """Independent N(0, 1) variables in the shape and dtype of `like`."""
        return torch.empty_like(like).normal_(generator=self.normals)


Streams = Callable[[int, int, int], Draws]  # of seed, client and round


class Network:
    """The weights are one vector (P,): weight, row by row, and bias of each layer."""

    def __init__(self, start: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.shapes = [tuple(weight.shape) for weight, _ in start]
        self.start = torch.cat([part.reshape(-1) for layer in start for part in layer])

    def layers(self, w: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of a vector (P,) as weight and bias of each layer."""
        views, first = [], 0
        for outputs, inputs in self.shapes:
            last = first + outputs * inputs
            views.append((w[first:last].view(outputs, inputs), w[last : last + outputs]))
            first = last + outputs
        return views

    def forward(self, w: Tensor, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """The inputs of every layer, and the logits (N, C)."""
        layers, inputs = self.layers(w), [x]
        for weight, bias in layers[:-1]:
            inputs.append(torch.sigmoid(torch.addmm(bias, inputs[-1], weight.T)))
        return inputs, torch.addmm(layers[-1][1], inputs[-1], layers[-1][0].T)

    def gradient(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The gradient (P,) of the MEAN cross-entropy."""
        inputs, logits = self.forward(w, x)
        back = torch.softmax(logits, 1)
        back[torch.arange(len(y)), y] -= 1.0
        back /= len(y)
        gradient = torch.empty_like(w)
        layers, slots = self.layers(w), self.layers(gradient)
        for i in reversed(range(len(layers))):
            torch.mm(back.T, inputs[i], out=slots[i][0])
            torch.sum(back, 0, out=slots[i][1])
            if i:
                back = (back @ layers[i][0]) * inputs[i] * (1.0 - inputs[i])
        return gradient

    def gauss_newton(self, w: Tensor, x: Tensor) -> Tensor:
        """The diagonal (P,) of the Gauss-Newton matrix of the SUMMED cross-entropy.

        The loss's Hessian in the logits is diag(p) - p p'. So an example's entry for a weight is the variance
        of d logit_c / d weight over classes c that are drawn from p.
        """
        total = torch.zeros_like(w)
        layers, slots = self.layers(w), self.layers(total)
        for piece in x.split(256):
            inputs, logits = self.forward(w, piece)
            p = torch.softmax(logits, 1).unsqueeze(2)
            # d logit_c / d (output o of the layer before its sigmoid): (N, C, O)
            jacobian = torch.eye(logits.shape[1], dtype=w.dtype).expand(len(piece), -1, -1)
            for i in reversed(range(len(layers))):
                mean = (p * jacobian).sum(1, keepdim=True)
                variance = (p * (jacobian - mean).square()).sum(1)
                slots[i][0].addmm_(variance.T, inputs[i].square())
                slots[i][1].add_(variance.sum(0))
                if i:
                    jacobian = (jacobian @ layers[i][0]) * (inputs[i] * (1.0 - inputs[i])).unsqueeze(1)
        return total

    def scores(self, w: Tensor, test: Examples) -> tuple[float, float]:
        """Accuracy and mean negative log-likelihood in nats."""
        logits, y = self.forward(w, test[0])[1].double(), test[1]
        nll = -torch.log_softmax(logits, 1)[torch.arange(len(y)), y].mean()
        return float((logits.argmax(1) == y).double().mean()), float(nll)


def minibatches(of: Examples, draws: Draws, epochs: int, size: int) -> Iterator[Examples]:
    """A new random order for each epoch; the last batch of an epoch may have fewer examples."""
    for _ in range(epochs):
        for rows in draws.order(len(of[1])).split(size):
            yield of[0][rows], of[1][rows]


class Adam:
    """Adam of one client, with beta1 0.9, beta2 0.999 and eps 1e-8; its state stays between rounds."""

    def __init__(self, like: Tensor, lr: float) -> None:
        self.first, self.second, self.steps, self.lr = torch.zeros_like(like), torch.zeros_like(like), 0, lr

    def step(self, w: Tensor, gradient: Tensor) -> None:
        """Change w in place."""
        self.steps += 1
        self.first.mul_(0.9).add_(gradient, alpha=0.1)
        self.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (self.second / (1.0 - 0.999**self.steps)).sqrt_().add_(1e-8)
        w.addcdiv_(self.first, scale, value=-self.lr / (1.0 - 0.9**self.steps))


@dataclass(frozen=True)
class FedLapCov:
    """FedLap-Cov with diagonal precisions and rho = 1/K."""

    delta: float = 0.01
    lr: float = 1e-3
    epochs: int = 10
    batch_size: int = 32

    def means(self, problem: Problem, streams: Streams = Draws) -> Iterator[Tensor]:
        """The server's w_g (P,) at the start and after each round, without end."""
        net, K = Network(problem.start), len(problem.clients)
        zeros = torch.zeros_like(net.start, dtype=torch.float64)
        v, V, adams = [zeros] * K, [zeros] * K, [Adam(net.start, self.lr) for _ in range(K)]
        w_g, S_g, start = zeros, zeros + self.delta, net.start
        for round_number in count(1):
            yield start
            for k, client in enumerate(problem.clients):
                draws = streams(problem.seed, k, round_number)
                w_k = self.train(net, adams[k], start, client, draws, (v[k], V[k], w_g, S_g))
                S_k = net.gauss_newton(w_k, client[0]).double() - V[k] + S_g
                v[k] = v[k] + (S_k * w_k.double() - S_g * w_g) / K
                V[k] = V[k] + (S_k - S_g) / K
            S_g = self.delta + sum(V, zeros)
            start = (sum(v, zeros) / S_g).to(start.dtype)
            w_g = start.double()

    def train(
        self, net: Network, adam: Adam, start: Tensor, client: Examples, draws: Draws, terms: Sequence[Tensor]
    ) -> Tensor:
        """Minimise l_k(w) + v w - V w^2 / 2 + S_g (w - w_g)^2 / 2; terms: v, V, w_g, S_g, float64."""
        v, V, w_g, S_g = terms
        # The terms' gradient is (S_g - V) (w - w_g) + (v - V w_g): so no large numbers cancel in float32.
        slope, shift, centre = ((S_g - V).to(start), (v - V * w_g).to(start), w_g.to(start))
        w = start.clone()
        for inputs, labels in minibatches(client, draws, self.epochs, self.batch_size):
            gradient = net.gradient(w, inputs, labels).mul_(len(client[1]))
            adam.step(w, gradient.add_(shift).addcmul_(slope, w - centre))
        return w


@dataclass(frozen=True)
class IvonADMM:
    """IVON-ADMM at temperature tau; gamma is the factor of the dual step, rho the penalty."""

    delta: float = 1.0
    rho: float = 0.2
    gamma: float = 2e-4
    tau: float = 1e-3
    lr: float = 5e-5
    h0: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.9998
    epochs: int = 10
    batch_size: int = 32
    cosine_rounds: int = 50

    def means(self, problem: Problem, streams: Streams = Draws) -> Iterator[Tensor]:
        """The server's m_g (P,) at the start and after each round, until s_g is not positive."""
        net, K = Network(problem.start), len(problem.clients)
        alpha, zeros = 1.0 / (1.0 + self.rho * K), torch.zeros_like(net.start, dtype=torch.float64)
        v, u, steps = [zeros] * K, [zeros] * K, [0] * K
        momenta = [torch.zeros_like(net.start) for _ in range(K)]
        m_g, s_g, start = zeros, zeros + self.delta, net.start
        for round_number in count(1):
            yield start
            lr = self.lr
            if self.cosine_rounds:
                lr *= 0.5 * (1.0 + math.cos(math.pi * min((round_number - 1) / self.cosine_rounds, 1.0)))
            shifts, precisions = zeros, zeros
            for k, client in enumerate(problem.clients):
                draws, N_k = streams(problem.seed, k, round_number), len(client[1])
                # App. D.4: mean loss, lambda = N_k / (rho tau), tau / N_k of the dual, prior N(m_g, 1/s_g)
                scale, tempered = N_k / (self.rho * self.tau), self.tau / N_k
                terms = [t.to(start) for t in (v[k] * tempered, u[k] * tempered, m_g, s_g / scale)]
                m, h = start.clone(), torch.full_like(start, self.h0 if round_number == 1 else 0.0)
                for batch in minibatches(client, draws, self.epochs, self.batch_size):
                    steps[k] += 1
                    self.step(net, (m, h, momenta[k]), batch, draws, terms, scale, lr, steps[k])
                m_k, s_k = m.double(), scale * h.double() + s_g
                v[k] = v[k] + self.gamma * (s_k * m_k - s_g * m_g)
                u[k] = u[k] + self.gamma * (s_k - s_g)
                shifts, precisions = shifts + s_k * m_k / K, precisions + s_k / K
            s_g = (1.0 - alpha) * precisions + alpha * (self.delta + sum(u, zeros))
            if not bool((s_g > 0).all()):
                raise FloatingPointError(f"round {round_number}: the server's precision is not positive")
            start = (((1.0 - alpha) * shifts + alpha * sum(v, zeros)) / s_g).to(start.dtype)
            m_g = start.double()

    def step(
        self, net: Network, state: Sequence[Tensor], batch: Examples, draws: Draws,
        terms: Sequence[Tensor], scale: float, lr: float, steps: int,
    ) -> None:  # fmt: skip
        """Change the state m, h, momentum in place; terms: v, u, m_p, d = s_p / lambda; scale: lambda."""
        (m, h, momentum), (v, u, m_p, d) = state, terms
        root = (h + d).mul_(scale).sqrt_()  # 1 / sigma
        noise = draws.normal(m)
        gradient = net.gradient(noise / root + m, *batch)
        h_hat = noise.mul_(root).mul_(gradient).sub_(u)  # gradient (theta - m) / sigma^2 - u
        momentum.mul_(self.beta1).add_(gradient, alpha=1.0 - self.beta1)
        correction = (h - h_hat).square_().div_(h + d)
        h.mul_(self.beta2).add_(h_hat, alpha=1.0 - self.beta2)
        h.add_(correction, alpha=0.5 * (1.0 - self.beta2) ** 2)
        change = (momentum / (1.0 - self.beta1**steps)).add_(v).addcmul_(u, m, value=-1.0)
        m.addcdiv_(change.addcmul_(d, m - m_p), h + d, value=-lr)


ALGORITHMS: dict[str, type[FedLapCov] | type[IvonADMM]] = {"fedlap_cov": FedLapCov, "ivon_admm": IvonADMM}


def main(name: str, problem: str, curve: str, rounds: str, settings: str = "{}") -> None:
    """Write round, test_accuracy and test_nll, a line for the start and for each round."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # squares of tiny gradients would be denormal, and slow
    federation = Problem.read(Path(problem))
    net, means = Network(federation.start), ALGORITHMS[name](**json.loads(settings)).means(federation)
    with Path(curve).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["round", "test_accuracy", "test_nll"])
        table.writerows([r, *net.scores(next(means), federation.test)] for r in range(int(rounds) + 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
