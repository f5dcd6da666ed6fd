"""Named random streams: one name, one stream, for ever."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedsim.seeds import RandomStream, seeded_torch, standard_normals

SEEDS = st.integers(0, 2**40)


def test_two_keys_as_they_will_always_be() -> None:
    """A change of these changes every number of every run."""
    assert RandomStream(0, "participation", 1).key("uniform") == 8_187_249_739_049_470_837
    assert RandomStream(7, "task", 3, 2).key() == 3_195_646_315_577_060_309


def test_two_draws_as_they_will_always_be() -> None:
    """Philox, seeded by its key, is specified bit for bit."""
    generator = RandomStream(0, "participation", 1).numpy("uniform")
    assert generator.bit_generator.random_raw(2).tolist() == [
        11_382_445_055_562_326_749,
        9_425_719_638_391_067_674,
    ]


def test_the_key_is_blake2b_of_the_name() -> None:
    from hashlib import blake2b

    digest = blake2b(b"3|split|4|5|part", digest_size=8).digest()
    assert RandomStream(3, "split", 4, 5).key("part") == int.from_bytes(digest, "little") >> 1


@pytest.mark.parametrize(
    "other",
    [
        *(RandomStream(1, "task", 2, 3), RandomStream(0, "tasks", 2, 3), RandomStream(0, "task", 3, 3)),
        *(RandomStream(0, "task", 2, 4), RandomStream(0, "task", 2), RandomStream(0, "task")),
    ],
)
def test_draws_differ_with_the_name_and_repeat_with_it(other: RandomStream) -> None:
    stream = RandomStream(0, "task", 2, 3)

    def drawn(s: RandomStream, part: str = "x") -> tuple[list[float], list[float]]:
        return torch.rand(4, generator=s.torch(part)).tolist(), s.numpy(part).random(4).tolist()

    assert drawn(stream) == drawn(RandomStream(0, "task", 2, 3))
    for one, another in zip(drawn(stream), drawn(other), strict=True):
        assert not set(one) & set(another)
    assert not set(drawn(stream)[0]) & set(drawn(stream, "y")[0])


def _global_draws() -> tuple[list[float], list[float], float]:
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    drawn = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
    return drawn


def test_nothing_touches_the_global_generators() -> None:
    before = _global_draws()
    stream = RandomStream(5, "x")
    torch.rand(3, generator=stream.torch("a"))
    stream.numpy("a").random(3)
    with seeded_torch(stream.key("init")):
        torch.rand(100)
    with pytest.raises(RuntimeError), seeded_torch(1):
        torch.rand(1).reshape(2)
    assert _global_draws() == before


def test_seeded_torch_depends_on_the_key_alone() -> None:
    def drawn(key: int) -> list[float]:
        with seeded_torch(key, torch.device("cpu")):
            return torch.rand(3).tolist()

    first = drawn(9)
    torch.rand(1)
    assert drawn(9) == first != drawn(10)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.text(max_size=5), st.lists(st.integers(-1, 10**7), max_size=8), st.integers(1, 70))
def test_normals_of_many_streams_are_to_the_bit_those_of_each(
    seed: int, purpose: str, clients: list[int], count: int
) -> None:
    together = standard_normals(seed, purpose, 3, clients, "part", count)
    assert together.shape == (len(clients), count)
    for row, client in zip(together, clients, strict=True):
        stream = RandomStream(seed, purpose, 3, client)
        assert np.array_equal(row, stream.numpy("part").standard_normal(count))
        assert row[0] == stream.numpy("part").standard_normal()
