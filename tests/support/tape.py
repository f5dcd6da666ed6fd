"""A CPU's stand-in for CUDA graphs: kernels are written down and repeated, without the Python around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsim.learning.recordings import Recordings, Work

aten = torch.ops.aten
ASKING = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
"""Operators whose result Python waits for, or whose shape depends on numbers of the device."""


def indices(args: Any) -> list[Any]:
    """The tensors of an operator's lists, among them the indices of `x[i]`."""
    return [a for group in args if isinstance(group, list | tuple) for a in group]


class Tape(TorchDispatchMode):
    """Writes down every operator that is carried out inside it, with the tensors that it reads and writes.

    It holds all of them, so that each stays at its address, as in the memory pool of a graph.
    """

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        """generators: Those that the device keeps, whose states go on from one repetition to the next."""
        super().__init__()
        self.generators = generators
        self.operators: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in ASKING or any(isinstance(a, Tensor) and a.dtype == torch.bool for a in indices(args)):
            raise AssertionError("a recorded step asks its device for a number")
        drawn_from = [a for a in tree_leaves((args, kwargs or {})) if isinstance(a, torch.Generator)]
        known = all(
            any(torch.equal(g.get_state(), k.get_state()) for k in self.generators) for g in drawn_from
        )
        if operator is aten.lift_fresh.default or not known:
            raise AssertionError("a recorded step has numbers from Python's side that may change")
        written = operator(*args, **(kwargs or {}))
        self.operators.append((operator, args, kwargs or {}, written))
        return written

    @torch.no_grad()
    def repeat(self) -> None:
        """Carry all operators out again; results lie where they lay, Python's numbers are the old ones."""
        for operator, args, kwargs, written in self.operators:
            again = operator(*args, **kwargs)
            for there, new in zip(tree_leaves(written), tree_leaves(again), strict=True):
                if isinstance(there, Tensor) and there.data_ptr() != new.data_ptr():
                    there.copy_(new)


class Tapes:
    """Makes recordings for networks, and counts how often steps were recorded and repeated."""

    def __init__(self) -> None:
        self.recorded = self.repeated = 0

    def recordings(self, steps: int = 3) -> Recordings:
        """Recordings for one network on the CPU."""
        return Recordings(self._record, torch.device("cpu"), steps)

    def _record(self, work: Work, generators: Sequence[torch.Generator]) -> Callable[[], object]:
        self.recorded += 1
        tape = Tape(generators)
        with tape:
            work()

        def repeat() -> None:
            self.repeated += 1
            tape.repeat()

        return repeat
