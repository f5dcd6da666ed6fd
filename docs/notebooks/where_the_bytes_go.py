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
# # Notebook: where the bytes go
#
# Every frame is booked in the ledger where it meets the socket: by round, client, direction, field and
# layer. This notebook asks the ledger of one run, and then makes its largest entry smaller.

# %%
import fedsim

run = fedsim.run(algo="fedlap_cov", clients=5, rounds=5, out="runs/dense", quiet=True)
ledger = run.ledger[run.ledger["kind"] == "algorithm"]
print(ledger.groupby(["direction", "field", "layer"], dropna=False)["bytes"].sum().to_string())

# %% [markdown]
# The rows of layer `values` are the tensors. Every field of P numbers costs 4P bytes a message, to the
# byte:

# %%
params, messages = run.summary["params"], 5 * 5
values = ledger[ledger["layer"] == "values"]
for field in ("mean", "precision"):
    for direction in ("down", "up"):
        rows = values[(values["field"] == field) & (values["direction"] == direction)]
        assert rows["bytes"].sum() == 4 * params * messages
print(f"mean and precision, each way: {4 * params * messages:,} bytes")

# %% [markdown]
# `header` and `framing` are what the envelopes cost beside their values: the message's header, and ZeroMQ's
# lengths.
#
# ## Rows and summary agree
#
# The ledger has no estimate in it. Its rows add up to what metrics.jsonl books per round.

# %%
total = int(ledger["bytes"].sum())
assert total == int(run.metrics["bytes_down"].sum() + run.metrics["bytes_up"].sum())
share = 100 * (1 - int(values["bytes"].sum()) / total)
print(f"{total:,} bytes, of which {share:.2f} % are no values")

# %% [markdown]
# With `workers=2, transport="tcp", verify_bytes=True` a run also compares this sum with the kernel's count
# of each TCP connection; the difference is 0.
#
# ## Fewer bytes
#
# A codec encodes one field in one direction. Here are three ways to send the precisions: bfloat16, which
# halves them; a logarithmic byte, which quarters them; and the largest tenth of them, with the positions of
# these.


# %%
def precisions_up(run: fedsim.Run) -> int:
    rows = run.ledger
    return int(rows[(rows["field"] == "precision") & (rows["direction"] == "up")]["bytes"].sum())


sizes = {"dense": precisions_up(run)}
accuracy = {"dense": run.summary["test_accuracy"]}
for codec in ("bf16", "log8", "best:0.1"):
    small = fedsim.run(
        algo="fedlap_cov",
        clients=5,
        rounds=5,
        codecs={"up.precision": codec},
        out=f"runs/{codec.partition(':')[0]}",
        quiet=True,
    )
    sizes[codec] = precisions_up(small)
    accuracy[codec] = small.summary["test_accuracy"]
for codec, size in sizes.items():
    share, right = 100 * size / sizes["dense"], 100 * accuracy[codec]
    print(f"{codec:9} {share:6.2f} % of the bytes, accuracy {right:.1f} %")
assert sizes["bf16"] * 2 == sizes["dense"]
assert sizes["best:0.1"] < sizes["log8"] < sizes["bf16"]

# %% [markdown]
# None of the three costs accuracy in these five rounds. Both sides compute with what was decoded, so a lossy
# codec may change the result, and no dual drifts apart. Whether the accuracy holds over fifty rounds is
# another question: [compression](../compression.md) and [what accuracy costs](../results/comparison.md) have
# the answers, and one of them is "not always". Next: [write SCAFFOLD in an hour](write_scaffold.md).
