"""The option silent = last: a client outside the round counts as its last q_k.

The server keeps only the product of the z_k = q_k^rho_server t_k, so a client uploads the increment
z_k' / z_k. Both sides take the dual step with the q_k that the server's new z_k implies: the site and z_k
therefore stay consistent under any codec. With q_k = N(w_k, I) it is the incremental form of ADMM's sums.
"""

from __future__ import annotations

from fedsim.learning.gaussian import Gaussian
from protocols._dual_rule import Dual


def increment(dual: Dual, q_k: Gaussian, change: Gaussian, rho_server: float) -> Gaussian:
    """Return z_k' / z_k, the factor to upload. change: the factor by which t_k is multiplied."""
    assert dual.z is not None
    return q_k**rho_server * dual.site * change / dual.z


def implied(
    dual: Dual, sent: Gaussian, q_g: Gaussian, rho_server: float, gamma: float
) -> tuple[Gaussian, Gaussian]:
    """Return z_k' after the decoded increment `sent`, and the q_k that it implies."""
    assert dual.z is not None
    z = dual.z * sent
    return z, (z / dual.site * q_g**gamma) ** (1 / (rho_server + gamma))
