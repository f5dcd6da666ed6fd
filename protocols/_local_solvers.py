"""The local solvers that several algorithms share. Each computes q_k from a client's problem.

to_the_mode        fixed precision: gradient steps to the mode of q_k   fedadmm, feddyn, ama, precond_admm,
                                                                        iso_bayes_admm (smoothed loss)
by_von             learned precision, full or diagonal: VON             bayes_admm, bregman_admm, pvi
by_ivon            learned precision, diagonal: IVON                    ivon_admm, ivon_pvi, fedgvi
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedsim.learning.gaussian import Gaussian, Penalty
from fedsim.learning.robust_losses import LossName, RobustLoss, robust_loss
from fedsim.learning.solvers.first_order import LocalTraining, Moments, Smoothing
from fedsim.learning.solvers.ivon import IvonMoments, IvonTraining, ivon
from fedsim.learning.solvers.von import VonTraining, check_samples as check_samples, von
from protocols._dual_rule import ClippedCavity, clipped_cavity, restored
from protocols._site_algorithm import LocalProblem, SiteFit

__all__ = [
    "IvonMoments",
    "IvonTraining",
    "LocalTraining",
    "LossName",
    "Smoothing",
    "VonTraining",
    "by_ivon",
    "by_von",
    "check_samples",
    "robust_loss",
    "to_the_mode",
]

KEEP = 0.5
"""Where rho S_g - V_k < (KEEP / 5) rho S_g, VON's clipping raises it to KEEP rho S_g, because VON needs a
positive definite matrix. With a small KEEP, the mean's steps would be 1/KEEP times too long for weights that
no data determine (dead pixels)."""


def to_the_mode(
    problem: LocalProblem,
    cavity: Gaussian | tuple[Penalty, ...],
    how: LocalTraining,
    *,
    sum_loss: bool,
    smoothing: Smoothing | None = None,
    tolerance: float = 0.0,
) -> SiteFit:
    """Find the mode of q_k by gradient steps.

    sum_loss: True for the summed loss l_k, False for the mean loss l_k / N_k. smoothing: settings for
    training on E_q[l_k]; None trains on l_k(m) (the delta method). tolerance: as in minimise.
    """
    client, shard, task = problem.client, problem.shard, problem.task
    assert client.moments is None or isinstance(client.moments, Moments)
    fit = task.minimise(
        shard,
        how,
        problem.start,
        weight=shard.size if sum_loss else 1.0,
        penalties=(cavity,) if isinstance(cavity, Gaussian) else cavity,
        moments=client.moments,
        smoothing=smoothing,
        tolerance=tolerance,
    )
    return SiteFit(Gaussian.at(fit.weights, client.precision), fit.loss, fit.carried, fit.info)


def by_von(
    problem: LocalProblem, cavity: Gaussian, how: VonTraining, *, penalty: float, cap_dual: bool
) -> SiteFit:
    """Solve the client's problem by VON at temperature rho = `penalty`, with a learned precision.

    cap_dual: True to clip the dual for VON, and to undo the clipping in q_k.
    """
    q = problem.q
    clipped = clipped_cavity(cavity, q, problem.site, penalty, KEEP)
    factor = clipped.factor if cap_dual else cavity
    rng = problem.task.rng
    fit = von(problem.shard, problem.start, how=how, rng=rng, cavity=factor, temperature=penalty)
    local = restored(fit.q, clipped, q, penalty) if cap_dual else fit.q
    return SiteFit(local, fit.loss, None, {"dual_slack": clipped.slack, "capped": float(clipped.capped)})


def by_ivon(
    problem: LocalProblem,
    cavity: Callable[[], Gaussian],
    how: IvonTraining,
    *,
    penalty: float,
    cap_dual: bool,
    tau: float,
    loss: RobustLoss | None = None,
    alpha: float = 1.0,
) -> SiteFit:
    """Solve the client's problem by IVON in the units of Algorithm 2 (Moellenhoff et al. v2, App. D.4).

    IVON gets the mean loss, the effective sample size N_k / (rho tau), and the dual to the power tau / N_k.
    tau: the tempering of the likelihood. loss, alpha: as in ivon.
    The cavity and the values derived from it are eight float64 vectors of size P. They are computed twice,
    before and after training, so that they need no memory during training.
    """
    client, q, shard, task = problem.client, problem.q, problem.shard, problem.task
    assert client.moments is None or isinstance(client.moments, IvonMoments)

    def clipped() -> ClippedCavity:
        return clipped_cavity(cavity(), q, problem.site, penalty)

    def dual_and_info() -> tuple[list[Gaussian], dict[str, float]]:
        bounded = clipped()
        dual = q**penalty / bounded.factor if cap_dual else problem.site
        return [dual ** (tau / shard.size)], {"dual_slack": bounded.slack, "capped": float(bounded.capped)}

    dual, info = dual_and_info()
    fit = ivon(
        shard,
        problem.start,
        how=how,
        rng=task.rng,
        round=task.round,
        prior_mean=q.mean,
        prior_precision=torch.as_tensor(q.precision),
        ess=shard.size / (penalty * tau),
        dual=dual.pop(),  # the solver gets the only reference and can free it
        h0=None if problem.task.started else how.h0,
        moments=client.moments,
        loss=loss,
        alpha=alpha,
    )
    local = Gaussian.at(fit.solution.mean, fit.solution.precision)
    if cap_dual:
        local = restored(local, clipped(), q, penalty, fit.info["moved"])
    return SiteFit(local, fit.loss, fit.carried, info)
