"""Types of hyperparameters that several algorithms or solvers share, each with limits and a description.

A hyperparameter is a field of an algorithm, or of a dataclass in such a field. `fedsim describe` and the
algorithms' pages show the description in the annotation. Users may annotate their own hyperparameters, too:

    shrinkage: Annotated[float, Meta(ge=0, description="weight of the samples' covariance")] = 0.1
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

# ---- local training

Epochs = Annotated[int, Meta(ge=1, description="passes over the client's examples in one local training")]
BatchSize = Annotated[
    int, Meta(ge=1, description="examples per local step; the last batch of a pass may have fewer")
]
DropLast = Annotated[
    bool,
    Meta(description="leave out the last batch of a pass if it has fewer examples and is not the only one"),
]
LearningRate = Annotated[float, Meta(gt=0, description="learning rate of local training, in round 1")]
Decay = Annotated[
    float, Meta(gt=0, le=1, description="factor per round: the learning rate in round r is lr * decay^(r-1)")
]
Momentum = Annotated[
    float,
    Meta(ge=0, lt=1, description="of SGD: v <- momentum v + g, w <- w - lr v; v is 0 when a task begins"),
]
Clip = Annotated[
    float, Meta(ge=0, description="largest norm of a step's gradient, penalties included; 0: no limit")
]
CarryAdam = Annotated[
    bool,
    Meta(
        description="Adam continues with the moments and step count of the client's last task, if the "
        "algorithm keeps them; false: every task begins at zero"
    ),
]

# ---- objectives

PriorPrecision = Annotated[float, Meta(gt=0, description="precision of the prior N(0, I/delta)")]
Tempering = Annotated[float, Meta(gt=0, description="temperature of the loss: clients minimise l_k / tau")]
ProxNorm = Annotated[
    Literal["squared", "unsquared"],
    Meta(description="norm of the proximal term: |w - w_g|^2 (the paper) or |w - w_g| (released code)"),
]
Covariance = Annotated[
    Literal["diagonal", "full"],
    Meta(description="form of the Gaussians' precision: P numbers, or a P x P matrix"),
]
GgnEstimator = Annotated[
    Literal["exact", "sign", "top2_sign"],
    Meta(
        description="diagonal of the GGN: exact, or an unbiased estimate by random signs; top2_sign keeps "
        "the two largest columns exact"
    ),
]
MomentumOfServer = Annotated[
    float, Meta(ge=0, lt=1, description="momentum of the server's statistic: m <- (1-beta) gradient + beta m")
]
