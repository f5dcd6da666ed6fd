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
# # Notebook: partial participation and duals
#
# In ADMM-like algorithms every client has a dual: what its data say, and the global model does not say yet.
# The server keeps the sum of the duals. When only some clients take part in a round, two things may go
# wrong: the sum may drift away from the clients' duals, and the step may have the wrong size. Here the
# first cannot happen, and the second can.

# %%
import matplotlib.pyplot as plt

import fedsim

everybody = fedsim.run(algo="fedlap", clients=10, rounds=10, out="runs/full", quiet=True)
paper = {"rho": "1/K"}
some = fedsim.run(
    algo="fedlap",
    clients=10,
    rounds=10,
    participation=0.3,
    hyperparameters=paper,
    out="runs/some",
    quiet=True,
)
print("all clients:", f"{everybody.summary['test_accuracy']:.3f}")
print("3 of 10:    ", f"{some.summary['test_accuracy']:.3f}")

# %% [markdown]
# ## The sum of the duals
#
# When a run ends, the server's sum is compared with the sum over all clients' states. Client and server
# call the same function with what crossed the wire, so the difference is rounding of float64.

# %%
for run in (everybody, some):
    print(run.experiment["participation"], f"{run.summary['dual_mismatch']:.0e}")
    assert run.summary["dual_mismatch"] < 1e-12

# %% [markdown]
# It stays so when uploads get lost on their way. A lost upload is paid for and not folded, and its client
# goes on as if it had never trained.

# %%
lossy = fedsim.run(
    algo="fedlap", clients=10, rounds=10, participation="0.3+lost:0.3", out="runs/lossy", quiet=True
)
rounds = lossy.metrics[lossy.metrics["round"] > 0]
sent = rounds["participants"].map(len).sum()
folded = rounds["folded"].fillna(rounds["participants"]).map(len).sum()  # none: all of them
print(f"{folded} of {sent} uploads were folded; mismatch of the duals {lossy.summary['dual_mismatch']:.0e}")
assert lossy.summary["dual_mismatch"] < 1e-12

# %% [markdown]
# ## The size of the step
#
# So the loss of accuracy with 3 of 10 clients is no drift. The dual step is damped by rho, and rho = 1/K is
# the papers' choice: right when all K clients move at once, and too small when only |S| do. fedsim's default
# counts the round's participants instead.

# %%
mended = fedsim.run(
    algo="fedlap",
    clients=10,
    rounds=10,
    participation=0.3,
    hyperparameters={"rho": "1/|S|"},
    out="runs/mended",
    quiet=True,
)
print("rho = 1/K:  ", f"{some.summary['test_accuracy']:.3f}")
print("rho = 1/|S|:", f"{mended.summary['test_accuracy']:.3f}")
assert mended.summary["test_accuracy"] > some.summary["test_accuracy"]

# %%
figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
lines = {"all clients": everybody, "3 of 10, rho = 1/K": some, "3 of 10, rho = 1/|S|": mended}
for label, run in lines.items():
    megabytes = (run.metrics["bytes_down"] + run.metrics["bytes_up"]).cumsum() / 1e6
    axes.plot(megabytes, 100 * run.metrics["test_accuracy"], marker=".", label=label)
axes.set(xlabel="megabytes, both directions", ylabel="test accuracy (%)")
axes.legend()

# %% [markdown]
# With the right rho, three of ten clients keep pace with all clients per byte: a round moves the model less,
# and costs less. That is one seed and ten rounds.
# [What partial participation costs](../results/participation.md) has eleven configurations under eight
# schedules, three seeds each. [Adding a schedule](../adding-a-schedule.md) says how to write one of your own.
