"""What stays on a device between tasks, with a pretended device that counts what it had to be given."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from fedsim.device_copies import DeviceCopies, room_on, to_cpu
from fedsim.problem import Problem
from fedsim.wire.ledger import Ledger
from fedsim.wire.schema import optional_group, tensors_of
from protocols import find
from tests.support.harness import ALGORITHMS, ROUNDS, Class, loopback, play, problem_of
from workers.transport.endpoint import Endpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
T = TypeVar("T")


class Pretended(DeviceCopies):
    """A device with room for `limit` bytes; `misses` are the names of what it did not have."""

    def __init__(self, limit: float = math.inf) -> None:
        super().__init__(CPU, lambda nbytes: nbytes + self.held <= limit, Tensor.clone)
        self.misses: list[Hashable] = []

    @property
    def held(self) -> int:
        return sum(t.nbytes for _, value, _ in self._kept.values() for t in tensors_of(value))

    def get(self, name: Hashable, stamp: Hashable, value: Callable[[], T]) -> T:
        def missed() -> T:
            self.misses.append(name)
            return value()

        return super().get(name, stamp, missed)

    def connected(self, problem: Problem, folder: Path, ledger: Ledger) -> Endpoint:
        problem.__dict__["copies"] = self  # in the place of the cached property
        return loopback(problem, folder, ledger)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_a_run_has_the_same_bits_and_copies_each_thing_once(algorithm: Class, tmp_path: Path) -> None:
    device = Pretended()
    plain = play(problem_of(algorithm), tmp_path / "plain")
    assert play(problem_of(algorithm), tmp_path / "kept", connect=device.connected).bits == plain.bits
    missed = Counter(device.misses)
    broadcasts = missed.pop("broadcast")
    assert max(missed.values()) == 1, "examples, start, and the states of clients"
    parts = plain.problem.algorithm
    if not any(optional_group(exchange.down) for exchange in parts.exchanges + parts.setup):
        exchanges = parts.setup + ROUNDS * parts.exchanges
        assert broadcasts == len(exchanges), "all clients of a round share one"


@pytest.mark.parametrize("limit", [0, 3000, 10_000])
def test_a_run_on_a_small_device_has_the_same_bits(limit: int, tmp_path: Path) -> None:
    device, algorithm = Pretended(limit), find("fedlap_cov")
    plain = play(problem_of(algorithm), tmp_path / "plain")
    assert play(problem_of(algorithm), tmp_path / "kept", connect=device.connected).bits == plain.bits
    assert device.held <= limit
    assert Counter(device.misses)["broadcast"] > ROUNDS


def test_another_stamp_is_another_value() -> None:
    device = Pretended()
    for stamp in (1, 2, 2, 1):
        assert device.get("x", stamp, lambda: torch.tensor(stamp)) == stamp  # noqa: B023
    assert device.misses == ["x", "x", "x"]
    device.keep("x", 7, torch.tensor(7))
    assert device.get("x", 7, lambda: torch.tensor(0)) == 7


def test_what_was_used_longest_ago_goes_first() -> None:
    device, number = Pretended(limit=12), lambda: torch.tensor(0.0)
    for name in ("a", "b", "c", "a", "d"):
        device.get(name, 0, number)
    assert list(device._kept) == ["c", "a", "d"]
    device.get("large", 0, lambda: torch.zeros(4))
    assert not device.held


def test_nothing_is_copied_or_kept_on_the_cpu() -> None:
    copies, value = DeviceCopies(CPU), (torch.zeros(3), 5)
    copies.keep("x", 0, value)
    assert copies.get("x", 0, lambda: value)[0].data_ptr() == value[0].data_ptr()
    assert to_cpu(value)[0].data_ptr() == value[0].data_ptr()
    assert not copies._kept


def test_half_of_a_gpu_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has reserved and does not use is free for this process."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (45, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    room = room_on(GPU)
    assert room(5)
    assert not room(6)


def test_what_uses_a_copy_waits_for_the_one_who_makes_it() -> None:
    """The maker's own stream is in order; a copy that is kept is used by others."""
    waits: list[list[float]] = []
    events: list[int] = []

    def record_event() -> Callable[[list[Tensor]], None]:
        events.append(1)
        return lambda tensors: waits.append([float(t) for t in tensors])

    copies = DeviceCopies(CPU, lambda nbytes: True, Tensor.clone, record_event)
    for _ in range(3):
        copies.get("x", 0, lambda: (torch.tensor(1.0), torch.tensor(2.0)))
    assert (len(events), waits) == (1, [[1.0, 2.0], [1.0, 2.0]])
    copies.keep("y", 0, torch.tensor(3.0))
    copies.get("y", 0, lambda: torch.tensor(4.0))
    assert (len(events), waits[2:]) == (2, [[3.0]])
