"""Bayesian-ADMM paper, v2 Figure 5b (v1 Figure 3a): logistic regression on MNIST, two digits per client.

    python docs/recipes/digit_pairs.py --data-dir DIR   6 minutes; a section of docs/results/bayesian_admm.md

The variational objective -ELBO(q_g) = E_q[sum_k l_k] + KL(q_g || N(0, I/delta)) by round. Settings:
Moellenhoff et al. v2, App. E.3, and main_elbo.py of their release (arXiv:2506.13150).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from illustrations import Federation, first_images, options
from matplotlib.axes import Axes
from report import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION, Page, figure, table
from torch import Tensor

from fedsim.algorithm import Algorithm
from fedsim.errors import TaskError
from fedsim.hyperparameters import Covariance
from fedsim.learning.gaussian import Gaussian, identity, is_full
from fedsim.learning.models.registry import build_model
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.von import VonTraining, von
from fedsim.seeds import RandomStream
from protocols.bayes_admm import BayesADMM
from protocols.bregman_admm import BregmanADMM
from protocols.pvi import PVI


@dataclass(frozen=True)
class Study:
    """One covariance family. draws: samples of q_g that the loss is averaged over, the same every round."""

    covariance: Covariance
    images: int
    side: int
    rounds: int
    delta: float = 10.0
    local: VonTraining = VonTraining()
    joint: VonTraining = VonTraining(steps=100, samples=16)
    draws: int = 20
    top: float = 4.2
    """The picture ends at that many times the least objective."""


DIAGONAL = Study("diagonal", images=5000, side=14, rounds=25)
"""As in the release."""
FULL = Study("full", images=2000, side=7, rounds=15, top=1.75)
"""As the paper's text says, smaller."""


@dataclass(frozen=True)
class Digits:
    """All data, and the five clients' shares of it; 10 classes, no bias."""

    all: Shard
    clients: tuple[Shard, ...]

    @property
    def size(self) -> int:
        """P."""
        return self.all.net.layout.size


def digits(images: Tensor, labels: Tensor) -> Digits:
    net, x = Net(build_model("logistic", tuple(images.shape[1:]), 10)), images.float()
    pairs = [labels // 2 == k for k in range(5)]
    return Digits(Shard(net, x, labels, 1.0), tuple(Shard(net, x[p], labels[p], 1.0) for p in pairs))


def objective(q: Gaussian, data: Digits, study: Study) -> float:
    """-ELBO in nats."""
    S, m, prior = torch.as_tensor(q.precision).double(), q.mean.double(), study.delta
    logdet = torch.logdet(S) if is_full(S) else S.log().sum()
    covariance = torch.linalg.inv(S).diagonal() if is_full(S) else 1 / S
    kl = (prior * (covariance.sum() + m @ m) + logdet) / 2 - constant(data.size, prior)
    loss = 0.0
    for weights in Gaussian.at(m, S).samples(study.draws, torch.Generator().manual_seed(1)):
        logits = data.all.net.logits(weights.float(), data.all.inputs)
        loss += float(F.cross_entropy(logits, data.all.targets, reduction="sum")) / study.draws
    return loss + float(kl)


def constant(size: int, delta: float) -> float:
    """P/2 (1 + log delta), which the release leaves out of its objective."""
    return size / 2 * (1 + float(torch.tensor(delta).log()))


def joint(data: Digits, study: Study) -> Gaussian:
    """q* of all data in one place."""
    zero = torch.zeros(data.size).double()
    prior = Gaussian(zero, identity(zero, study.delta, full=study.covariance == "full"))
    rng = RandomStream(0, "joint", 1, 0)
    return von(data.all, zero.float(), how=study.joint, rng=rng, cavity=prior, temperature=1.0).q


@dataclass(frozen=True)
class Method:
    name: str
    setting: str
    algorithm: Algorithm[Any, Any, Any, Any]


def methods(study: Study) -> list[Method]:
    common = {"covariance": study.covariance, "delta": study.delta, "local": study.local}
    result = [
        Method("PVI", "undamped", PVI(damping=1.0, **common)),
        Method("PVI, damped", "1/K", PVI(damping="1/K", **common)),
        Method(
            "BregmanADMM",
            "ρ = 1, damping 0.2, released dual",
            BregmanADMM(rho=1.0, damping=0.2, dual="release", **common),
        ),
        Method(
            "BregmanADMM, paper's dual",
            "ρ = 1, damping 0.2, the dual of v2 C.2",
            BregmanADMM(rho=1.0, damping=0.2, dual="paper", **common),
        ),
        Method("Bayesian-ADMM", "ρ = 1", BayesADMM(rho=1.0, **common)),
        Method(
            "Bayesian-ADMM, literal", "ρ = 1, dual not held", BayesADMM(rho=1.0, cap_dual=False, **common)
        ),
    ]
    if study.covariance == "full":
        literal = BregmanADMM(rho=1.0, damping=0.2, dual="release", cap_dual=False, **common)
        result.append(Method("BregmanADMM, literal", "ρ = 1, damping 0.2, dual not held", literal))
        result.append(Method("Bayesian-ADMM, ρ = 1/K", "ρ = 1/K", BayesADMM(rho="1/K", **common)))
    return result


@dataclass(frozen=True)
class Path:
    """-ELBO by round, from the prior; held: of each round, dual coordinates (or eigenvalues) of all clients
    that exceed the pull; end: why it stopped early."""

    values: list[float]
    held: list[int]
    end: str = ""

    def first(self, most: float) -> int | None:
        return next((r for r, value in enumerate(self.values) if value <= most), None)


def play(method: Method, data: Digits, study: Study) -> Path:
    federation = Federation(method.algorithm, data.clients, torch.zeros(data.size))
    values, held, end = [objective(federation.server.q, data, study)], [], ""
    for _ in range(study.rounds):
        try:
            q = federation.play()
        except TaskError as stopped:
            end = f"stops in round {federation.round}: {str(stopped).split(':')[1].strip()}"
            break
        assert isinstance(q, Gaussian)
        values.append(objective(q, data, study))
        held.append(sum(int(up.info.capped) for up in federation.ups.values()))
    return Path(values, held, end)


STYLES = {
    "PVI": (VERMILION, "v"),
    "PVI, damped": (ORANGE, "D"),
    "BregmanADMM": (GREEN, "s"),
    "Bayesian-ADMM": (BLACK, "o"),
    "Bayesian-ADMM, ρ = 1/K": (SKY, "^"),
}


TICKS = (100, 200, 300, 500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 5000, 6000, 8000, 10000, 12000)


def draw(axes: Axes, paths: dict[Method, Path], least: float, study: Study) -> None:
    for method, path in paths.items():
        if method.name in STYLES:
            colour, marker = STYLES[method.name]
            axes.plot(
                range(1, len(path.values)),
                path.values[1:],
                color=colour,
                marker=marker,
                markerfacecolor="white",
                label=method.name,
            )
    axes.axhline(least, color=BLUE, linestyle=":", linewidth=1.5, label="all data in one place")
    low, high = 0.96 * least, study.top * least
    axes.set(xlabel="round", xlim=(0.6, study.rounds + 0.4), ylim=(low, high), yscale="log")
    ticks = [t for t in TICKS if low < t < high]
    axes.set_yticks(ticks, [f"{t:,}" for t in ticks])
    axes.minorticks_off()
    axes.xaxis.get_major_locator().set_params(integer=True)


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    selected = options(__doc__.splitlines()[0], argv)
    page = Page(
        "digit_pairs", "Logistic regression, two digits per client", selected, section_of="bayesian_admm"
    )
    studies = (DIAGONAL, FULL)
    if selected.quick:
        few = VonTraining(steps=3, samples=2)
        studies = (
            Study("diagonal", 100, 4, 3, local=few, joint=few, draws=2),
            Study("full", 100, 4, 2, local=few, joint=few, draws=2),
        )
    drawn, panels = figure(10.5, 4.4, 1, 2)
    parts: list[str] = []
    for study, axes in zip(studies, panels, strict=True):
        data = digits(*first_images(study.images, study.side, selected))
        least = objective(joint(data, study), data, study)
        paths = {method: play(method, data, study) for method in methods(study)}
        draw(axes, paths, least, study)
        axes.set_title(f"{study.covariance} covariance, P = {data.size:,}")
        shift = constant(data.size, study.delta)
        parts.append(
            HEAD.format(study=study, name=study.covariance.capitalize(), least=least, shifted=least + shift)
        )
        parts.append(rows(paths, study, least))
    panels[0].set_ylabel("− ELBO of the server's posterior, nats")
    panels[1].legend()
    page.add(TEXT.format(study=studies[0]))
    page.picture(drawn, "the variational objective by round, for a diagonal and a full covariance")
    for part in parts:
        page.add(part)
    page.add(SEEN.format(study=studies[0]))
    page.write()


def rows(paths: dict[Method, Path], study: Study, least: float) -> str:
    """A table of one study."""
    at = [r for r in (1, 2, 5, 10, 15, 25) if r <= study.rounds]
    lines: list[list[object]] = []
    for method, path in paths.items():
        values = [f"{path.values[r]:,.0f}" if r < len(path.values) else "" for r in at]
        near = path.first(1.05 * least)
        reached = str(near) if near is not None else "" if path.end else f"> {study.rounds}"
        reached = ", ".join(part for part in (reached, path.end) if part)
        lines.append([method.name, method.setting, *values, reached, max(path.held, default=0)])
    return table(["−ELBO after round", "setting", *(str(r) for r in at), "rounds to 5 %", "held"], lines)


HEAD = """## {name} covariance: {study.images:,} images of {study.side}×{study.side} pixels

The least −ELBO is {least:,.0f} nats ({shifted:,.0f} without the constant that the release leaves out)."""
TEXT = """The first images of MNIST, every second pixel for the diagonal covariance, every fourth for the
full one; ten classes, no bias; five clients with the digits (0, 1), (2, 3), .. (8, 9); δ = {study.delta:g};
all clients in every round. Clients solve their problem by VON with {study.local.samples} samples, new ones
each round. Messages are rounded to float32, as on the wire, but no process or socket takes part. Dotted:
VON on all data in one place, with {study.joint.samples} samples."""
SEEN = """Rounds to 5 %: until −ELBO is within 5 % of the least. Held: of the worst round, coordinates (full
covariance: eigenvalues) of the five clients' duals that exceed the pull ρ S_g, so that docs/decisions/009
applies.

**The paper** (v2 Fig. 5b) shows PVI diverging without damping and slow with damping 1/K, BregmanADMM slow
too, and Bayesian-ADMM with ρ = 1 ahead of all.

**What we see.** With a diagonal covariance the same order: undamped PVI is ahead in round 1 and then
diverges, BregmanADMM stalls near twice the optimum, damped PVI is slow, Bayesian-ADMM is within 1 % after
{study.rounds} rounds. But:

- The divergence of PVI belongs to the diagonal family. With a full covariance undamped PVI is the fastest,
  damping only slows it, and Bayesian-ADMM needs ρ = 1/K to keep up. The paper's text says that its figure
  has full covariances; the released code has diagonal ones.
- Bayesian-ADMM as printed does not get through: in round 2 some client's problem has no minimum and the
  solver says so. What works is Bayesian-ADMM with our bound on the dual (docs/decisions/009).
- BregmanADMM with the released dual and a full covariance gets worse after three rounds. Without the
  bound its solver stops, with the bound it settles far off. With a diagonal covariance nothing had to
  be held.
- With the paper's dual BregmanADMM is little better for a diagonal covariance (5,579 after 25 rounds in
  the place of 6,059). For a full one it is within 0.3 % of the optimum after 8 rounds, where the released
  dual stays 61 % off, and then diverges: 4,656 in round 12, 35,860 in round 14, and in round 15 it stops.

All methods of one family send the same: 2P numbers each way for a diagonal covariance, P + P(P+1)/2 for a
full one.

**Deviations.** The release has IVON where we have VON: 1,250 full-batch steps a round with one new sample
each. Its Hessian is a running mean with β₂ = .9995, which goes less than half of its way in a round (by
arithmetic); that may be why the release gets through without a bound. It takes 100 new samples for each
objective where we keep {study.draws} for all rounds. Its plot shows every second state from the start on and
numbers them 0, 1, 2, ..; its reference line, 2312, lies outside its own axis (6,000 to 20,000), to which our
numbers without the constant belong. The full covariance has fewer and smaller images than the paper's,
because a step is O(P²) per image."""

if __name__ == "__main__":
    main()
