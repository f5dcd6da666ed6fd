"""Processes as /proc shows them."""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """All descendants of a process; none of one that has ended."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        hits = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return hits + [below for child in hits for below in children_of(child)]


def alive(pid: int) -> bool:
    """Whether it runs; a zombie, which nobody has waited for, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    """Its arguments with spaces between them; '' of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def left_over(run: Path) -> list[str]:
    """Command lines of processes of a run."""
    everyone = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [command_line(pid) for pid in everyone if alive(pid) and str(run) in command_line(pid)]
