"""A schedule and a split in a user's file: taken as they are, or refused with the reason."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from fedsim import plugins
from fedsim.data.partitions import partition
from fedsim.errors import UsageError
from fedsim.participation import Participation, schedule

HEAD = "from fedsim import Participation\n"


def spec_of(folder: Path, body: str) -> str:
    """A file `own.py` whose `it` is a schedule, from the body of its inner function or its whole text."""
    if "def it" not in body:
        body = f"def it(population):\n    def f(round):\n        {body}\n    return f\n"
    (folder / "own.py").write_text(HEAD + body)
    return f"{folder}/own.py:it"


def test_ids_or_participations_are_taken(tmp_path: Path) -> None:
    drawn = schedule(spec_of(tmp_path, "return range(round, round + 2)"), clients=9, seed=0)
    assert drawn(3) == Participation((3, 4))
    body = "return Participation((0, 2, 4), frozenset({2, 4}), frozenset({4}))"
    drawn = schedule(spec_of(tmp_path, body), clients=5, seed=0)
    assert drawn(1) == Participation((0, 2, 4), frozenset({2}), frozenset({4}))


def test_population_is_what_the_built_in_schedules_have(tmp_path: Path) -> None:
    body = "return [k for k, x in enumerate(population.draws(round).random(population.clients)) if x < 0.5]"
    own = schedule(spec_of(tmp_path, body), clients=20, seed=3)
    ours = schedule("coin:0.5", clients=20, seed=3)
    assert [own(r) for r in range(1, 9)] == [ours(r) for r in range(1, 9)]


def test_modifiers_strike_a_users_participants_as_others(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "return range(population.clients)")
    own = schedule(f"{spec}+gone:0.3+lost:0.2", clients=20, seed=3)
    ours = schedule("full+gone:0.3+lost:0.2", clients=20, seed=3)
    assert [own(r) for r in range(1, 9)] == [ours(r) for r in range(1, 9)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [2, 1]", "round 1: the ids must ascend, each once; they are [2, 1]"),
        ("return [5]", "a client's id is a whole number from 0 to 4, not 5"),
        ("return [0.5]", "not 0.5"),
        ("return 3", "drawing round 1 failed: TypeError: 'int' object is not iterable"),
        ("return 1 / 0", "drawing round 1 failed in line 4: ZeroDivisionError"),
        ("return Participation((1,), dropouts=frozenset({2}))", "client 2 loses its upload or drops out"),
        ("population.c = population.c + 1", "failed in line 4: AttributeError"),
        ("def it(population):\n    return 3", "must return a function (round); it returns a int"),
        ("def it(population):\n    return 1 / 0", "calling it for 5 clients failed in line 3"),
        (
            "n = [0]\ndef it(population):\n    def f(round):\n        n[0] += 1\n        return [n[0] % 5]\n"
            "    return f",
            "differs when it is drawn again",
        ),
    ],
)
def test_mistake_names_the_file_and_the_round(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        schedule(spec_of(tmp_path, body), clients=5, seed=0)
    assert str(caught.value).startswith("--participation own:it")


def test_mistake_of_a_later_round_is_found_when_it_is_drawn(tmp_path: Path) -> None:
    drawn = schedule(spec_of(tmp_path, "return [round]"), clients=9, seed=0)
    assert drawn(8).participants == (8,)
    with pytest.raises(UsageError, match="round 9: a client's id"):
        drawn(9)


def test_missing_name_or_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        schedule(f"{tmp_path}/none.py:it", clients=3, seed=0)
    (tmp_path / "own.py").write_text("its = 1\n")
    with pytest.raises(UsageError, match="did you mean 'its'"):
        schedule(f"{tmp_path}/own.py:it", clients=3, seed=0)
    with pytest.raises(UsageError, match="is a int; name a function"):
        schedule(f"{tmp_path}/own.py:its", clients=3, seed=0)


# ---- splits

TARGETS = np.arange(12) % 3


def split_of(folder: Path, body: str, clients: int = 3, fraction: float = 1.0) -> tuple[np.ndarray, ...]:
    (folder / "split.py").write_text(f"import numpy as np\ndef it(targets, clients, seed):\n    {body}\n")
    return partition(
        f"{folder}/split.py:it", targets=TARGETS, classes=3, clients=clients, seed=7, fraction=fraction
    )


def test_users_split_is_taken_and_its_digest_known(tmp_path: Path) -> None:
    rows = split_of(tmp_path, "return [np.flatnonzero(targets == k) for k in range(clients)]")
    assert [r.tolist() for r in rows] == [[k, k + 3, k + 6, k + 9] for k in range(3)]
    assert all(r.dtype == np.int64 for r in rows)
    file = tmp_path / "split.py"
    assert plugins.sources([f"{file}:it"]) == {str(file): sha256(file.read_bytes()).hexdigest()}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [[0], [1]]", "returns rows of 2 clients; there are 3"),
        ("return [[0], [1], []]", "client 2 needs at least one row"),
        ("return [[0], [1], [2.5]]", "as a row of whole numbers"),
        ("return [[0], [1], [12]]", "client 2 has rows outside 0 .. 11"),
        ("return [[0], [1], [2, 2]]", "client 2 has a row twice"),
        ("return [[0], np.ma.masked_equal([1, 2], 2), [3]]", "client 1 has masked rows; return the others"),
        ("targets[0] = 1", "failed in line 3: ValueError"),
        (
            "return [[np.random.randint(4 * k, 4 * k + 4)] for k in range(3)] if False else "
            "[[id(object()) % 4], [4], np.random.permutation(12)]",
            "another split when it was called again",
        ),
    ],
)
def test_split_that_does_not_fit_is_refused(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        split_of(tmp_path, body)


def test_users_split_takes_the_whole_data_set(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fraction must be 1"):
        split_of(tmp_path, "return [[0], [1], [2]]", fraction=0.5)
