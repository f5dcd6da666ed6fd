"""fedsim schedule."""

from __future__ import annotations

from click.testing import CliRunner

from fedsim.participation import Participation
from launch.cli import main
from launch.commands.schedule import lines


def test_the_grid_says_what_the_schedule_does() -> None:
    participations = [
        Participation((0, 2), frozenset({2})),
        Participation(()),
        Participation((0, 1, 2), frozenset(), frozenset({1})),
    ]
    out = list(lines(lambda r: participations[r - 1], 3, 3, 80))
    assert out[1:4] == ["client 0 █·█  2 of 3", "client 1 ··o  1 of 3", "client 2 x·█  2 of 3"]
    assert "per round 0 to 3 clients, 1.7 on average (55.6%); 1 empty rounds" in out
    assert "per client 1 to 2 of 3 rounds" in out
    assert "of 5 broadcasts 1 get no answer and 1 uploads are lost" in out


def test_a_large_one_is_cut_and_says_so() -> None:
    participants = Participation(tuple(range(500)))
    out = list(lines(lambda r: participants, 1000, 300, 50))
    assert "... and 960 more clients" in out and "... and 250 more rounds" in out
    assert all(len(line) < 90 for line in out)
    assert "per client 0 to 300 of 300 rounds; 500 clients never take part" in out


def test_the_command_prints_it_and_names_mistakes() -> None:
    good = CliRunner().invoke(main, ["schedule", "robin:2", "--clients", "4", "--rounds", "4"])
    assert good.exit_code == 0 and "client 3 ·█·█" in good.output
    bad = CliRunner().invoke(main, ["schedule", "robin:9", "--clients", "4"])
    assert bad.exit_code == 2 and "1 to 4" in bad.output
