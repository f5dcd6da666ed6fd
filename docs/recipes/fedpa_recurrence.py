"""FedPA paper, Appendix C: the delta by dynamic programming, one sample at a time (arXiv:2010.05273).

    u_t = x_t - xbar_{t-1} ,   gamma_t = rho (t-1)/t
    v_t = u_t - sum_{k=2}^{t-1} gamma_k <v_k, u_t> / (1 + gamma_k <v_k, u_k>) v_k              (Eq. 25-28)
    D_t = D_{t-1} - [ 1 + gamma_t (t <u_t, D_{t-1}> - <u_t, v_t>) / (1 + gamma_t <u_t, v_t>) ] v_t / t
                                                                                               (Eq. 21-24)
    Delta_t = (1 + (t-1) rho) D_t ,   D_1 = x_0 - x_1

v_t stands for the paper's v_{t-1,t} = Sigma~_{t-1}^-1 u_t. Here for the clock and as a second opinion;
the package computes the same by one matrix product (fedsim.learning.solvers.iasg).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Recurrence:
    """Samples come in one by one, up to `most`; after each, `delta` is that of the samples so far.

    Memory O(l d): the vectors v_2..v_l as rows, so that the sum over k is two matrix-vector products.
    """

    def __init__(self, start: Tensor, rho: float, most: int) -> None:
        self.start, self.rho, self.t = start, rho, 0
        self.mean, self.d = torch.zeros_like(start), torch.zeros_like(start)
        self.v = start.new_zeros(most, len(start))
        self.factors = start.new_zeros(most)
        """gamma_k / (1 + gamma_k <v_k, u_k>)."""

    def add(self, x: Tensor) -> None:
        self.t = t = self.t + 1
        if t == 1:
            self.mean, self.d = x.clone(), self.start - x
            return
        u, gamma = x - self.mean, self.rho * (t - 1) / t
        before = self.v[: t - 2]
        v = u - before.T @ (self.factors[: t - 2] * (before @ u))
        uv = u @ v
        self.d = self.d - (1 + gamma * (t * (u @ self.d) - uv) / (1 + gamma * uv)) * v / t
        self.v[t - 2], self.factors[t - 2] = v, gamma / (1 + gamma * uv)
        self.mean = self.mean + u / t

    @property
    def delta(self) -> Tensor:
        """Sigma_t^-1 (x_0 - xbar_t), with the shrunk covariance of t samples."""
        return (1 + (self.t - 1) * self.rho) * self.d
