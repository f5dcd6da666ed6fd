"""Who took part, as a grid of clients and rounds."""

from __future__ import annotations

from fedsim.errors import FedsimError
from fedsim.participation import schedule
from launch.runs.reader import Run

MOST_CLIENTS, MOST_ROUNDS = 60, 200


def grid(run: Run, rounds: int) -> str:
    """As the run's schedule says, which decides it; what is cut is said below."""
    experiment = run.experiment
    clients = int(experiment["clients"])
    try:
        participations = schedule(
            str(experiment["participation"]),
            clients=clients,
            seed=int(experiment["seed"]),
            sizes=tuple(experiment.get("client_sizes") or ()),
        )
        shown = [participations(r) for r in range(1, min(rounds, MOST_ROUNDS) + 1)]
    except FedsimError:  # a trace file that has gone
        return '<p class="soft">The schedule of this run can no longer be read.</p>'
    if not shown:
        return ""
    many, side = min(clients, MOST_CLIENTS), 10
    cells = []
    for x, participation in enumerate(shown):
        participants, unfolded = (
            set(participation.participants),
            participation.lost_uploads | participation.dropouts,
        )
        for k in range(many):
            kind = "away" if k not in participants else "lost" if k in unfolded else "took"
            cells.append(f'<rect class="{kind}" x="{x * side}" y="{k * side}" width="9" height="9"/>')
    width, height = len(shown) * side, many * side
    drawn = (
        f'<div class="wide"><svg class="grid" role="img" aria-label="participation" '
        f'viewBox="0 0 {width} {height}" style="max-width: {width * 1.4:.0f}px">{"".join(cells)}</svg></div>'
    )
    key = "".join(
        f'<span class="key"><i style="background: var(--{colour})"></i>{what}</span>'
        for colour, what in (("c0", "folded"), ("c1", "took part, not folded"), ("line", "away"))
    )
    cut = [f"clients 0 to {many - 1} of {clients:,} downwards, rounds 1 to {len(shown)} of {rounds:,} across"]
    return f'{drawn}<p>{key}</p><p class="soft">{cut[0]}</p>'
