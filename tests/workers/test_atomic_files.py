"""Temporary files that killed processes have left are removed; everything else stays."""

from __future__ import annotations

from pathlib import Path

from workers.storage.atomic_files import remove_temporaries, write_atomically


def test_temporaries_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["checkpoints/000001.checkpoint", "state/000002/000001.state", "uploads/000001/1-000002.envelope"]
    left = [
        "checkpoints/.000002.checkpoint.17",
        "state/000002/.000002.state.1",
        "uploads/000001/.1-000003.envelope.9",
    ]
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(tmp_path / name, [b"data"])
    (tmp_path / "state" / ".hidden").write_text("somebody's own")
    remove_temporaries(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == sorted(
        [*kept, "state/.hidden"]
    )


def test_a_folder_without_temporaries_stays_as_it_is(tmp_path: Path) -> None:
    remove_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == []
