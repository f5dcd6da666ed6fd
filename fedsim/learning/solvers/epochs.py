"""Shuffled epochs of minibatch steps, executed directly or from recordings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedsim.seeds import RandomStream

if TYPE_CHECKING:
    from fedsim.learning.recordings import Recordings
    from fedsim.learning.shards import Shard

Step = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""A training step: a function from a batch's inputs and targets to one or more losses (0-d). Each loss is a
mean over the batch, and the loss of the batch is the mean of these losses."""


class Epochs(Protocol):
    """Settings of local training in epochs."""

    @property
    def epochs(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def drop_last(self) -> bool: ...


def batches(how: Epochs, examples: int) -> int:
    """Return the number of batches, at least 1, of one pass over N_k = `examples` examples."""
    if how.drop_last:
        return max(examples // how.batch_size, 1)
    return -(-examples // how.batch_size)


def rows_in_use(how: Epochs, examples: int) -> int:
    """Return the number of examples in the batches of one pass."""
    return min(batches(how, examples) * how.batch_size, examples)


def run_epochs(
    shard: Shard,
    step: Step,
    how: Epochs,
    rng: RandomStream,
    *,
    constants: Hashable = None,
    refused: str = "",
    dtype: torch.dtype = torch.float32,
    enough: Callable[[], bool] | None = None,
) -> float:
    """Call `step` for every batch of `how.epochs` epochs; return the mean loss of the last epoch.

    The short last batch of an epoch is kept, as in the released code, unless `how.drop_last`. rng's stream
    "batches" draws the order of the examples, and its stream "dropout" seeds the network's random draws.

    Args:
        constants: All Python numbers that `step` uses. If the network has recordings, steps with equal
            constants are recorded once for all tasks. Every tensor that `step` reads or writes, except its
            arguments, must belong to the network or be held by it (Net.hold).
        refused: The reason why the steps cannot be recorded; "" if they can.
        dtype: The dtype in which the losses are added up.
        enough: Function called after every epoch; True ends the training. `refused` must be given with it.
    """
    net, order = shard.net, rng.torch("batches")
    recordings = net.recordings
    if recordings is not None and not refused and how.epochs:
        refused = net.trial(shard, how.batch_size)
    with net.noise(rng.key("dropout")):
        if recordings is None or refused:
            net.refuse(refused)
            return _as_they_come(shard, step, how, order, dtype, enough)
        return _recorded(recordings, shard, step, how, order, dtype, constants)


def _as_they_come(
    shard: Shard,
    step: Step,
    how: Epochs,
    order: torch.Generator,
    dtype: torch.dtype,
    enough: Callable[[], bool] | None,
) -> float:
    total = torch.zeros((), dtype=dtype, device=shard.net.device)
    used = rows_in_use(how, shard.size)
    for epoch in range(how.epochs):
        total.zero_()
        for rows in shard.rows(how.batch_size, order, used):
            losses = step(*shard.batch(rows))
            if enough or epoch == how.epochs - 1:
                for loss in losses:
                    total.add_(loss, alpha=len(rows) / len(losses))
        if enough and enough():
            break
    return float(total) / used


def _recorded(
    recordings: Recordings,
    shard: Shard,
    step: Step,
    how: Epochs,
    order: torch.Generator,
    dtype: torch.dtype,
    constants: Hashable,
) -> float:
    """Run recorded steps. The device takes rows from position `place` of the order and advances `place`."""
    device, size, used = shard.net.device, how.batch_size, rows_in_use(how, shard.size)
    orders = torch.cat([torch.randperm(shard.size, generator=order)[:used] for _ in range(how.epochs)])
    rows = recordings.hold_rows("order", orders.pin_memory() if device.type == "cuda" else orders)
    inputs = recordings.hold_rows("inputs", shard.inputs)
    held = replace(shard, inputs=inputs, targets=recordings.hold_rows("targets", shard.targets))
    place = recordings.hold("place", torch.zeros((), dtype=torch.int64, device=device))
    total = recordings.hold("total", torch.zeros((), dtype=dtype, device=device))

    offsets_of = {
        n: recordings.hold(f"offsets {n}", torch.arange(n, device=device)) for n in (size, used % size) if n
    }

    def advance(count: int, size: int) -> None:
        """Run `count` steps on batches of `size` examples."""
        offsets = offsets_of[size]

        def one() -> None:
            losses = step(*held.batch(rows.index_select(0, place + offsets)))
            for loss in losses:
                total.add_(loss, alpha=size / len(losses))
            place.add_(size)

        if count:
            recordings.run((constants, size, shard.scale, inputs.dtype, inputs.shape[1:]), count, one)

    for _ in range(how.epochs):
        total.zero_()
        advance(used // size, size)
        if used % size:
            advance(1, used % size)
    recordings.settle()
    return float(total) / used
