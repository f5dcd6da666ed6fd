"""FedPA paper, Figures 3 and 4: bias and variance of client deltas; effective size of IASG's samples
(Al-Shedivat et al. 2021, Appendix A; docs/references/published-numbers.md#fedpa).

    python docs/recipes/fedpa_figures_3_4.py    4 minutes; writes a section of docs/results/fedpa.md

The exact delta of a client is Sigma_k^-1 (x_0 - mu_k), which for least squares is its full gradient at x_0,
up to a factor that the server's learning rate absorbs. So bias and spread are parts of the mean delta's
length along that gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from fedpa_problems import LeastSquares, client
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from report import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION, Page, figure, options, table
from sklearn.datasets import make_regression
from torch import Tensor, nn

from fedsim.learning.likelihoods import likelihood
from fedsim.learning.params import Net
from fedsim.learning.shards import Shard
from fedsim.learning.solvers.iasg import Sampling, iasg, posterior_delta
from fedsim.seeds import RandomStream

ROWS, NOISE = 500, 50.0
CHAIN = Sampling(100, 50, 50, 10, 0.1, momentum=0.0)
"""The paper's burn-in, steps per sample and batch; 50 samples for Figure 4."""


@dataclass(frozen=True)
class Study:
    """Of one dimension, with the paper's learning rate and shrinkage.

    steps: where the deltas are looked at, and FedAvg's also during the burn-in; the last is that of the
    shrinkage plots. plain and scaled: how many problems with features as they come, and scaled.
    """

    dims: int
    lr: float
    shrinkage: float
    steps: tuple[int, ...]
    rates: tuple[float, ...]
    scaled: int
    plain: int
    sized: int
    starts: int
    repeats: int = 4
    steps_per_sample: tuple[int, ...] = (5, 10, 25, 50, 100, 200)
    burn_ins: tuple[int, ...] = (10, 30, 100, 300, 1000)


STEPS = (150, 250, 500, 1000, 2000, 5000, 10_000)
STUDIES = (
    Study(10, 0.1, 0.01, STEPS[:6], (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), 10, 10, 3, starts=10),
    Study(100, 0.1, 0.005, STEPS, (0.001, 0.003, 0.01, 0.03, 0.1), 10, 10, 3, starts=10),
    Study(1000, 0.01, 0.001, STEPS, (0.001, 0.003, 0.01), 5, 2, 2, starts=4),
)
WALK = (10, 30, 100)
SHRINKAGES = (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0)


class Lines(nn.Module):
    """C linear models side by side: inputs (B, C, d) to (B, C)."""

    def __init__(self, chains: int, dims: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(chains, dims))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("bcd,cd->bc", inputs, self.weight)


@dataclass(frozen=True)
class Chains(LeastSquares):
    """One client's data under C chains, each with batches of its own (drawn with replacement), so that one
    call of iasg runs them all: their gradients do not mix, because the loss is a sum over chains."""

    chains: int = 1

    @staticmethod
    def of(inputs: Tensor, targets: Tensor, chains: int) -> Chains:
        net = Net(Lines(chains, inputs.shape[1]), likelihood=likelihood("gaussian"))
        return Chains(net, inputs, targets[:, None], 1.0, chains)

    def batches(self, size: int, order: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.size // size):
            rows = torch.randint(self.size, (size, self.chains), generator=order)
            yield self.inputs[rows], self.targets[rows, 0]

    def sample(self, start: Tensor, how: Sampling, rng: RandomStream) -> tuple[Tensor, Tensor]:
        """Samples (l, C, d) and last iterates (C, d) from start (C, d)."""
        chain = iasg(self, start.reshape(-1), how=how, rng=rng, round=1).solution
        return chain.samples.reshape(-1, *start.shape), chain.last.reshape(start.shape)


def problem(dims: int, index: int, scaled: bool) -> tuple[Tensor, Tensor]:
    """X (500, d) ~ N(0, 1) and y = X w + noise; ten entries of w are not 0.

    scaled: the features' variances are 1 to 1/10, in random order. Without that the curvature is nearly the
    identity where d is much less than 500, and FedAvg's delta has next to no bias to mend.
    """
    x, y = make_regression(ROWS, dims, n_informative=min(10, dims), random_state=index)
    draws = np.random.default_rng(index)
    y = y + NOISE * draws.standard_normal(ROWS)
    if scaled:
        x = x * draws.permutation(np.logspace(0, -0.5, dims))
    return torch.from_numpy(x).float(), torch.from_numpy(y).float()


def starts(targets: Tensor, dims: int, count: int, seed: int) -> Tensor:
    """x_0 ~ N(0, s^2 I), about as long as the solution."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(count, dims, generator=draws) * targets.std() / dims**0.5


@dataclass(frozen=True)
class Deltas:
    """Deltas (starts, repeats, d) by what is varied, and the exact ones (starts, d)."""

    exact: Tensor
    fedavg: Mapping[int, Tensor]
    fedpa: Mapping[int, Tensor]
    shrunk: Mapping[float, Tensor]


def deltas(study: Study, index: int, scaled: bool) -> Deltas:
    """One chain per start and repeat serves every number of steps: without momentum, a chain that goes on
    from its last iterate is one chain."""
    x, y = problem(study.dims, index, scaled)
    origin = starts(y, study.dims, study.starts, index)
    shard = Chains.of(x, y, study.starts * study.repeats)
    start = at = origin.repeat_interleave(study.repeats, 0)
    samples: list[Tensor] = []
    fedavg, fedpa, done = {}, {}, 0

    def apart(result: Tensor) -> Tensor:
        return result.unflatten(0, (study.starts, study.repeats))

    def folded(rho: float) -> Tensor:
        drawn = torch.cat(samples)
        return apart(torch.stack([posterior_delta(start[c], drawn[:, c], rho) for c in range(len(start))]))

    for steps in (*WALK, *study.steps):
        walking = steps <= CHAIN.burn_in
        length = steps - done if walking else CHAIN.steps_per_sample
        how = replace(
            CHAIN, lr=study.lr, burn_in=0, steps_per_sample=length, samples=(steps - done) // length
        )
        drawn, at = shard.sample(at, how, RandomStream(index, "chain", steps))
        fedavg[steps] = apart((start - at).double())
        if not walking:
            samples.append(drawn)
            fedpa[steps] = folded(study.shrinkage)
        done = steps
    matrix, linear = shard.quadratic
    return Deltas(origin.double() @ matrix - linear, fedavg, fedpa, {r: folded(r) for r in SHRINKAGES})


def bias_and_spread(result: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Root mean squares over problems and starts, as parts of the mean delta's length along the exact one:
    how far the mean delta is off the exact one's line, and how far deltas are from their mean.

    found: (deltas (starts, repeats, d), exact (starts, d)) by problem. The mean over few repeats has a
    variance of its own, which is taken off the squared bias.
    """
    squares, variances = [], []
    for several, exact in result:
        line = exact / exact.norm(dim=-1, keepdim=True)
        mean = several.mean(1)
        along = (mean * line).sum(-1)
        off = several - (several * line[:, None]).sum(-1, keepdim=True) * line[:, None]
        own = off.var(1).sum(-1) / several.shape[1]
        squares.append((off.mean(1).square().sum(-1) - own) / along**2)
        variances.append(several.var(1).sum(-1) / along**2)
    bias = float(torch.cat(squares).mean().clamp(min=0))
    return bias**0.5, float(torch.cat(variances).mean()) ** 0.5


def effective(shard: Chains, samples: Tensor) -> tuple[Tensor, Tensor]:
    """(sum w)^2 / sum w^2 of each chain, as a part of its samples (l, C, d): (C,), twice.

    w is the posterior density, exp(-n f / noise^2); and with the MEAN loss in the exponent, as in the code.
    """
    matrix, linear = shard.quadratic
    x = samples.double()
    loss = ((x @ matrix) * x).sum(-1) / 2 - x @ linear
    result = []
    for weight in (shard.size, 1.0):
        log = -weight * loss / NOISE**2
        result.append((2 * log.logsumexp(0) - (2 * log).logsumexp(0)).exp() / len(samples))
    return result[0], result[1]


def sizes(study: Study, hows: Mapping[float, Sampling]) -> dict[float, tuple[float, float]]:
    """Mean effective sizes over problems and starts, by what is varied."""
    result: dict[float, list[Tensor]] = {value: [] for value in hows}
    for index in range(study.sized):
        x, y = problem(study.dims, index, True)
        shard = Chains.of(x, y, study.starts)
        origin = starts(y, study.dims, study.starts, index)
        for value, how in hows.items():
            samples, _ = shard.sample(origin, how, RandomStream(index, "size"))
            result[value].append(torch.stack(effective(shard, samples)))
    means = {value: torch.cat(parts, 1).mean(1) for value, parts in result.items()}
    return {value: (float(mean[0]), float(mean[1])) for value, mean in means.items()}


def shuffled_and_independent(steps: int, samples: int) -> tuple[float, float]:
    """The covariance of samples over sigma^2 A^-1 / (steps * batch), which it is for long averages of
    independent batches: mean over directions; for an experiment's shard and for independent batches."""
    x, y = problem(10, 0, False)
    independent = client(x, y)
    epochs = Shard(independent.net, independent.inputs, independent.targets, 1.0)
    matrix, linear = independent.quadratic
    start = torch.linalg.solve(matrix, linear)
    variance = float((x.double() @ start - y.double()).var())
    how = replace(CHAIN, lr=0.1, steps_per_sample=steps, samples=samples, batches="epochs")
    result = []
    for shard in (epochs, independent):
        drawn = iasg(
            shard, start.float(), how=how, rng=RandomStream(0, "shuffled"), round=1
        ).solution.samples.double()
        ratio = torch.cov(drawn.T) @ matrix * steps * how.batch_size / variance
        result.append(float(ratio.diagonal().mean()))
    return result[0], result[1]


def exact_size(dims: int, length: int) -> float:
    """That of exact samples of a Gaussian posterior: log w = -|z|^2 / 2 with z ~ N(0, I)."""
    log = -np.random.default_rng(0).chisquare(dims, (2000, length)) / 2
    w = np.exp(log - log.max(1, keepdims=True))
    return float((w.sum(1) ** 2 / (w**2).sum(1)).mean() / length)


@dataclass(frozen=True)
class Seen:
    """What one study found: (bias, spread) by steps and by shrinkage, effective sizes by what is varied."""

    fedavg: Mapping[int, tuple[float, float]]
    fedpa: Mapping[int, tuple[float, float]]
    shrunk: Mapping[float, tuple[float, float]]
    plain: tuple[tuple[float, float], tuple[float, float]]
    """FedAvg's and FedPA's after all steps, with features as they come."""
    sizes: Mapping[str, Mapping[float, tuple[float, float]]]


def look(study: Study) -> Seen:
    result = [deltas(study, index, True) for index in range(study.scaled)]
    plain = [deltas(study, index, False) for index in range(study.plain)]
    last = study.steps[-1]
    base = replace(CHAIN, lr=study.lr)
    return Seen(
        {n: bias_and_spread([(d.fedavg[n], d.exact) for d in result]) for n in result[0].fedavg},
        {n: bias_and_spread([(d.fedpa[n], d.exact) for d in result]) for n in result[0].fedpa},
        {r: bias_and_spread([(d.shrunk[r], d.exact) for d in result]) for r in SHRINKAGES},
        (
            bias_and_spread([(d.fedavg[last], d.exact) for d in plain]),
            bias_and_spread([(d.fedpa[last], d.exact) for d in plain]),
        ),
        {
            "learning rate": sizes(study, {v: replace(base, lr=v) for v in study.rates}),
            "steps per sample": sizes(
                study, {v: replace(base, steps_per_sample=v) for v in study.steps_per_sample}
            ),
            "burn-in steps": sizes(study, {v: replace(base, burn_in=v) for v in study.burn_ins}),
        },
    )


def curves(axes: Axes, result: Mapping[float, tuple[float, float]], colour: str, name: str) -> None:
    for part, (label, dashes) in enumerate((("bias", "o-"), ("spread", "s--"))):
        values = [pair[part] for pair in result.values()]
        axes.plot(list(result), values, dashes, color=colour, label=f"{name}, {label}")


def draw(studies: Sequence[Study], seen: Sequence[Seen], page: Page) -> None:
    drawn, grid = figure(11, 9.5, 3, 3)
    for column, (study, one) in enumerate(zip(studies, seen, strict=True)):
        top, middle = grid[0][column], grid[1][column]
        curves(top, one.fedavg, BLUE, "FedAvg")
        curves(top, one.fedpa, VERMILION, "FedPA")
        top.set(title=f"d = {study.dims:,}, shrinkage {study.shrinkage:g}", xlabel="local steps")
        curves(middle, one.shrunk, VERMILION, "FedPA")
        middle.axhline(one.fedavg[study.steps[-1]][0], color=BLUE, label="FedAvg, bias")
        middle.set(title=f"d = {study.dims:,}, {study.steps[-1]:,} steps", xlabel="shrinkage ρ")
        for axes in (top, middle):
            axes.set(xscale="log", ylim=(0, 1.4))
        for axes in (top, middle):
            if not column:
                axes.set_ylabel("part of the delta along\nthe exact direction")
                axes.legend(loc="upper left", fontsize=8, ncols=2)
    for column, varied in enumerate(seen[0].sizes):
        axes = grid[2][column]
        for study, one, colour in zip(studies, seen, (GREEN, ORANGE, PURPLE), strict=False):
            result = one.sizes[varied]
            for part, dashes in enumerate(("o-", "s:")):
                axes.plot(list(result), [pair[part] for pair in result.values()], dashes, color=colour)
            if study.dims < ROWS:
                exact = exact_size(study.dims, CHAIN.samples)
                axes.axhline(exact, color=colour, linewidth=1, linestyle="--")
        axes.set(xscale="log", ylim=(0, 1.05), xlabel=varied, title=f"samples, by {varied}")
    grid[2][0].set_ylabel("effective size / samples")
    colours = [
        Line2D([], [], color=colour, label=f"d = {study.dims:,}")
        for study, colour in zip(studies, (GREEN, ORANGE, PURPLE), strict=False)
    ]
    kinds = [
        Line2D([], [], color=BLACK, marker=marker, linestyle=dashes, label=label)
        for marker, dashes, label in (
            ("o", "-", "posterior density"),
            ("s", ":", "mean loss, as released"),
            (None, "--", "exact samples"),
        )
    ]
    drawn.legend(handles=[*colours, *kinds], loc="outside lower center", ncols=6)
    page.picture(drawn, "bias and spread of deltas; effective sample size")


def pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.2f} / {values[1]:.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    selected = options(__doc__.splitlines()[0], argv)
    title = "FedPA, Figures 3 and 4: bias and variance of deltas, effective sample size"
    page = Page("fedpa_figures_3_4", title, selected, section_of="fedpa")
    studies = STUDIES
    if selected.quick:
        studies = (Study(10, 0.1, 0.01, (150, 250), (0.1,), 1, 1, 1, 2, 2, (5, 10), (10, 30)),)
    seen = [look(study) for study in studies]
    page.add(TEXT)
    draw(studies, seen, page)
    page.add("## Bias / spread of deltas")
    rows = []
    for study, one in zip(studies, seen, strict=True):
        for name, result in (("FedAvg", one.fedavg), ("FedPA", one.fedpa)):
            cells = [pair(result[n]) if n in result else "-" for n in (*WALK, *STUDIES[-1].steps)]
            rows.append([f"{study.dims:,}, {name}", *cells])
    page.add(table(["d, steps", *(f"{n:,}" for n in (*WALK, *STUDIES[-1].steps))], rows))
    rows = [
        [f"{s.dims:,}", *(pair(one.shrunk[r]) for r in SHRINKAGES)]
        for s, one in zip(studies, seen, strict=True)
    ]
    page.add(table(["d, FedPA after all steps, by shrinkage", *(f"{r:g}" for r in SHRINKAGES)], rows))
    page.add("Features as they come (not scaled), after all steps:")
    rows = [
        [f"{s.dims:,}", pair(one.plain[0]), pair(one.plain[1])] for s, one in zip(studies, seen, strict=True)
    ]
    page.add(table(["d", "FedAvg", "FedPA"], rows))
    page.add(
        "## Effective size / number of samples: posterior density, and mean loss as in the released code"
    )
    for varied in seen[0].sizes:
        values = sorted({value for one in seen for value in one.sizes[varied]})
        rows = [
            [f"{s.dims:,}", *(pair(one.sizes[varied][v]) if v in one.sizes[varied] else "-" for v in values)]
            for s, one in zip(studies, seen, strict=True)
        ]
        page.add(table([f"d, {varied}", *(f"{v:g}" for v in values)], rows))
    page.add(SEEN)
    page.add(SHUFFLED)
    lengths, samples = ((10,), 5) if selected.quick else ((10, 25, 50, 100), 200)
    rows = []
    for steps in lengths:
        epochs, independent = shuffled_and_independent(steps, samples)
        rows.append([f"{steps} ({steps / 50:g})", f"{epochs:.2f}", f"{independent:.2f}"])
    page.add(table(["steps per sample (epochs)", "shuffled epochs", "independent batches"], rows))
    page.write()


TEXT = """
**The paper** (Al-Shedivat et al. 2021, Appendix A): synthetic least squares (make_regression) with 10,
100 and 1,000 dimensions, 10 problems of 500 points, 10 start points each; shrinkage 0.01, 0.005 and
0.001. The bias of FedAvg's deltas grows with local steps and their variance falls; the bias of FedPA's
falls, while their variance rises at first. The effective size of IASG's samples depends on the learning
rate more than on anything else.

**Here.** `iasg` and `posterior_delta` of the package on a linear layer with the Gaussian likelihood;
batch 10, learning rate 0.1 (d = 10, 100) or 0.01 (d = 1,000), burn-in 100, then means of 50 iterates, as
in the paper. Everything is relative to the length of the mean delta along the exact one, Σ_k⁻¹ (x_0 −
μ_k), which for least squares is the full gradient at x_0: **bias** is how far the mean delta is off that
line, **spread** the root mean square distance of deltas from their mean; root mean squares over problems
and starts, 4 chains per start. **Effective size** is (Σ w)² / Σ w², with w the posterior density of a
sample, exp(−n f / σ²); and, dotted, with the mean loss in the exponent, exp(−f / σ²), as the authors'
library has it. 50 samples.
"""
SEEN = """
**What we see, deltas.** What the paper says, where the client's curvature is not nearly the identity.
FedAvg's bias grows with local steps up to that of its limit x_0 − μ_k, and its spread falls. (0.00 after
10 steps at d = 1,000 is within the noise: the spread is 1.8 there.) FedPA starts as FedAvg does (one
sample, 150 steps); then its bias falls, after all steps to half of FedAvg's at d = 10 and 100 and to a
quarter at d = 1,000. Its spread rises with the samples and, at d = 10, falls again once there are many
more samples than dimensions. More shrinkage parameter ρ means less shrinkage towards the identity: less
bias and more spread, until nothing more is gained.

- FedPA's bias does not go to 0: at learning rate 0.1 and 50 steps per sample the chain is too short to
  forget its past in flat directions, so the covariance is too small there; gradient noise is not exactly
  proportional to A_k either.
- With features as they come (independent, of unit variance), 500 rows leave hardly any bias to mend at d
  = 10, and FedPA mends none; see the table.
- At d = 1,000 there are more features than rows and the least squares fit is exact: gradient noise dies
  out on the way, later samples are all the same, and FedPA's delta does not change any more.

**What we see, samples.** By the posterior density the effective size is small for small learning rates,
where the chain is still on its way, best at 0.03 for d = 10 and 100, and smaller again above; it grows
with the steps per sample. The burn-in matters at d = 1,000 only. By the mean loss, as released, every
chain that has arrived scores 1, whatever it samples.

The number wants care. Exact samples of the posterior score 0.27 at d = 10 and 0.04 at d = 100 (dashed
lines), and a chain scores MORE when its samples vary too little: all at the mode would be 1. So "above
the dashed line" means too concentrated, not good.

**Differs from the paper.** Fewer problems and starts at d = 1,000: 5 problems with 4 starts, 2 where
features are not scaled; 3 problems (2 at d = 1,000) for the effective size; at most 10,000 local steps
(paper: up to 50,000). Features have variances from 1 to 1/10, noise of standard deviation 50 is added:
the paper's noise and its definitions of bias and variance are not known to us. Starts are random with the
length of the targets' standard deviation. Batches are drawn with replacement, independently, so that many
chains of one client run in one call.
"""

SHUFFLED = """
## Shuffled epochs

The package's shards go through the data in shuffled epochs, so the gradient noise of an epoch nearly
cancels. A sample that averages whole epochs then varies much less than the theory of iterate averaging
says, and FedPA sees less covariance than there is. (In the authors' benchmark code one sample is the mean
of one epoch.) Variance of 200 samples at d = 10 (500 rows, batch 10: an epoch is 50 steps; learning rate
0.1) over σ² A⁻¹ / (steps × batch), mean over directions:
"""

if __name__ == "__main__":
    main()
