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
# # Notebook: a first run
#
# Federated learning from Python in five minutes. The data are scikit-learn's digits, which come with the
# installation. Five clients share them unevenly; in every round each client gets the global model, trains
# on its own examples and sends its result back.

# %%
import fedsim

run = fedsim.run(algo="fedavg", clients=5, rounds=5, out="runs/fedavg", quiet=True)
print(run.status, run.summary["rounds"], "rounds,", run.summary["params"], "parameters")

# %% [markdown]
# `workers=0` is the default: this process computes for all clients. `workers=2` starts two processes, and
# the result has the same bits. A run is a folder; what is in it comes back as pandas frames.

# %%
print(run.metrics[["round", "test_accuracy", "bytes_down", "bytes_up"]].to_string(index=False))

# %% [markdown]
# ## How many bytes
#
# FedAvg sends its P weights to every client of a round, and gets P weights back: 4 bytes each, and a little
# for headers. Costs are best read in units of P, because they are the same for every model then.

# %%
params, messages = run.summary["params"], 5 * 5
down = int(run.metrics["bytes_down"].sum())
print(f"{down:,} bytes down: {down / (4 * params * messages):.3f} P per client and round")
assert 1.0 < down / (4 * params * messages) < 1.01

# %% [markdown]
# ## An algorithm with precisions
#
# `fedlap_cov` keeps a Gaussian over the weights and sends a precision (an inverse variance) beside every
# mean: 2P each way. Is that worth it? `bytes_to` counts the bytes until a run first reaches an accuracy.

# %%
posterior = fedsim.run(algo="fedlap_cov", clients=5, rounds=5, out="runs/fedlap_cov", quiet=True)
for each in (run, posterior):
    spent = each.bytes_to(accuracy=0.85)
    print(each.experiment["algo"], "never reached 85 %" if spent is None else f"{spent / 1e6:.2f} MB to 85 %")
assert int(posterior.metrics["bytes_down"].sum()) > 1.9 * down

# %% [markdown]
# One seed and five rounds decide nothing; [the tutorial](../tutorial.md#6-the-question) asks the question
# over three seeds.
#
# ## More rounds
#
# A run goes on where it ended, with the bits that a longer run would have had.

# %%
longer = fedsim.resume(run, rounds=8, quiet=True)
print(longer.status, longer.summary["rounds"], "rounds")
assert longer.summary["rounds"] == 8

# %% [markdown]
# `longer.report()` writes the run as one page, `longer.model()` is its torch module, and `help(fedsim.run)`
# lists every argument. Next: [where the bytes go](where_the_bytes_go.md).
