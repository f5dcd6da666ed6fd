# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Notebook: write SCAFFOLD in an hour
#
# The paper's box ([Karimireddy et al. 2020](https://arxiv.org/abs/1910.06378), Algorithm 1, option II),
# with S the participants, K all clients, T_k local steps:
#
# ```text
# client:  y ← x, then T_k times  y ← y − η (∇ℓ_k(y) − c_k + c)          ℓ_k: MEAN loss
#          c_k ← c_k + Δ_k,  Δ_k = (x − y) / (T_k η) − c
#          send y − x and Δ_k
# server:  x ← x + η_g · mean over S of (y − x)
#          c ← c + (1/K) Σ_S Δ_k
# ```
#
# ## Four questions
#
# What does the server keep? x, and the sum of all c_k. What does a client keep? c_k. What crosses the wire?
# x and c down, and only y up: Δ_k follows from y, the broadcast and T_k, which both sides know. Each answer
# is a class.

# %%
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import fedsim
from fedsim import Arrival, Context, Gaussian, Gradient, LocalTraining, Mean, Point, Scalar, Shard, Task


@dataclass(frozen=True)
class Server:
    mean: Tensor  # x (P,) float64
    controls: Tensor  # the sum of all c_k (P,) float64


@dataclass(frozen=True)
class Client:
    control: Tensor  # c_k (P,) float64; it never crosses the wire


@dataclass(frozen=True)
class Down:
    mean: Mean
    control: Gradient


@dataclass(frozen=True)
class Up:
    mean: Mean  # y
    train_loss: Scalar


# %% [markdown]
# The annotation of a message's field is its kind: shape, dtype, and what a receiver checks. The ledger
# books its bytes under its name.
#
# ## What both sides compute
#
# Δ_k is one function, which the client and the server call with what crossed the wire. So the server's sum
# and the clients' controls cannot drift apart. What arrives is float32; widen first, then subtract.


# %%
def dual_step(local: LocalTraining, down: Down, up: Up, k: int, sizes: tuple[int, ...], round: int) -> Tensor:
    eta, steps = local.in_round(round).lr, local.steps(sizes[k])
    return (down.mean.double() - up.mean.double()) / (steps * eta) - down.control.double()


# %% [markdown]
# ## The algorithm
#
# `client_update` trains and returns a draft of the client's next state; `client_commit` finishes the draft
# when the upload was folded. A penalty `Gaussian(-a, 0.0)` adds a to every gradient.


# %%
@dataclass(frozen=True)
class Scaffold(fedsim.Algorithm[Server, Client, Down, Up]):
    """SCAFFOLD with what both sides know left out of the messages.

    Wire: 2P down, P up.
    """

    local: LocalTraining = LocalTraining(optimiser="sgd", lr=0.05)

    name: ClassVar[str] = "scaffold_here"
    default_model: ClassVar[str] = "mlp_small"

    def server_init(self, ctx: Context) -> Server:
        start = ctx.start.double()
        return Server(start, torch.zeros_like(start))

    def client_init(self, ctx: Context, k: int) -> Client:
        return Client(torch.zeros_like(ctx.start, dtype=torch.float64))

    def broadcast(self, server: Server, ctx: Context) -> Down:
        return Down(server.mean, server.controls / ctx.K)

    def client_update(self, client: Client, down: Down, shard: Shard, task: Task) -> tuple[Client, Up]:
        correction = Gaussian(client.control - down.control.double(), 0.0)
        fit = task.minimise(shard, self.local, down.mean, penalties=(correction,))
        return client, Up(fit.weights, fit.loss)

    def client_commit(self, client: Client, down: Down, up: Up, task: Task) -> Client:
        return Client(client.control + dual_step(self.local, down, up, task.client, task.sizes, task.round))

    def server_update(self, server: Server, down: Down, arrivals: Iterable[Arrival], ctx: Context) -> Server:
        moved, controls, count = torch.zeros_like(server.mean), server.controls.clone(), 0
        for a in arrivals:
            moved += a.up.mean.double() - a.down.mean.double()
            controls += dual_step(self.local, a.down, a.up, a.client, ctx.sizes, ctx.round)
            count += 1
        return Server(server.mean + moved / count, controls)

    def model(self, server: Server, ctx: Context) -> Point:
        return Point(server.mean)


# %% [markdown]
# ## Run it
#
# Pass the class. Its costs are what the box says: 2P down, P up.

# %%
run = fedsim.run(algo=Scaffold, clients=5, rounds=5, out="runs/mine", quiet=True)
unit = 4 * run.summary["params"] * 5 * 5
down, up = (run.metrics[f"bytes_{side}"].sum() / unit for side in ("down", "up"))
print(f"{down:.2f} P down, {up:.2f} P up, accuracy {100 * run.summary['test_accuracy']:.1f} %")
assert 2.0 < down < 2.02
assert 1.0 < up < 1.02

# %% [markdown]
# ## Is it right?
#
# The repository has SCAFFOLD, too. The same experiment gives the same bytes and the same weights.

# %%
theirs = fedsim.run(algo="scaffold", clients=5, rounds=5, out="runs/theirs", quiet=True)
pairs = zip(run.model().parameters(), theirs.model().parameters(), strict=True)
assert all(torch.equal(mine, other) for mine, other in pairs)
assert list(run.metrics["bytes_up"]) == list(theirs.metrics["bytes_up"])
print("equal to the last bit")

# %% [markdown]
# Save the classes as a file, mine.py, and `fedsim launch --algo mine.py:Scaffold` runs them in worker
# processes. The battery puts a file through every test that the repository's own algorithms pass: [adding
# an algorithm](../adding-an-algorithm.md#put-it-through-the-battery). Next: [partial participation and
# duals](partial_participation.md).
