"""Which worker a process is: by its rank, by a lock on the join file, by the keys that its file has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.errors import UsageError
from workers.transport.join_credentials import FORMAT, JoinCredentials, KeyPair
from workers.worker.seats import RANKS, SeatLocks, rank

SERVER = KeyPair.new()


def credentials(workers: int) -> JoinCredentials:
    pairs = tuple(KeyPair.new() for _ in range(workers))
    return JoinCredentials(FORMAT, "r", "tcp://127.0.0.1:1", SERVER.public, 1, pairs)


@pytest.mark.parametrize("name", RANKS)
def test_every_engines_rank_is_read(name: str) -> None:
    assert rank({name: "3", "HOME": "/"}) == 3


def test_the_nearest_starter_counts() -> None:
    """mpirun in a batch script of Slurm: SLURM_PROCID is the script's, 0 for every process."""
    assert rank({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "2"}) == 2


@pytest.mark.parametrize("environment", [{}, {"RANK": ""}, {"RANK": "one"}, {"RANK": "-1"}])
def test_without_a_rank_the_error_says_what_to_do(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="--seat"):
        rank(environment)


HOLDER = """
import sys
from pathlib import Path
from workers.worker.seats import SeatLocks
locks = SeatLocks(Path(sys.argv[1]))
print(next(locks.free(range(3))), flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_processes_that_share_a_file_take_different_seats_and_leave_them_with_their_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "join.json"
    credentials(3).write(path)
    command = [sys.executable, "-c", HOLDER, str(path)]
    held = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        assert sorted(int(process.stdout.readline()) for process in held if process.stdout) == [0, 1]
        own = SeatLocks(path)
        assert [*own.free(range(3))] == [2]
        held[0].kill()
        held[0].wait()
        assert len([*own.free(range(3))]) == 2
        own.close()
    finally:
        for process in held:
            process.kill()
            process.communicate()


def test_without_a_file_all_seats_are_tried(tmp_path: Path) -> None:
    assert [*SeatLocks(None).free(range(3))] == [0, 1, 2]
    assert [*SeatLocks(tmp_path / "nothing").free(range(3))] == [0, 1, 2]


def test_a_machines_file_has_its_own_keys_only(tmp_path: Path) -> None:
    whole = credentials(6)
    part = whole.part(range(2, 4))
    part.write(tmp_path / "join.json")
    read = JoinCredentials.read(tmp_path / "join.json")
    assert (read.seats, read.pair(3)) == (range(2, 4), whole.pair(3))
    assert whole.workers[0].secret not in (tmp_path / "join.json").read_text()
    assert read.part(range(3, 4)).pair(3) == whole.pair(3)
    for missing in (range(1, 3), range(3, 5), range(0)):
        with pytest.raises(UsageError):
            read.part(missing)
