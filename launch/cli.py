"""The fedsim command. `fedsim VERB` is defined in launch/commands/VERB.py, which is imported on first use."""

from __future__ import annotations

import click

from fedsim.version import __version__
from launch.commands.errors import Commands

IN_FILES = {**dict.fromkeys(("worker", "node", "revoke"), "workers"), "list": "lists"}
"""The modules of the verbs that are not in a module of the same name."""
GROUPS = {
    "Run": {
        "launch": "Run an experiment with real worker processes.",
        "resume": "Continue a run that was ended, however it was ended.",
        "sweep": "Run a grid of experiments side by side and tabulate them.",
        "plan": "Cost an experiment on the wire without running it.",
    },
    "Look": {
        "list": "Show what there is to choose from.",
        "describe": "Show an algorithm's messages, cost and hyperparameters, or a model's parameters.",
        "runs": "List runs: their state, rounds, accuracy and bytes.",
        "report": "Write a run's page, RUN/report.html.",
    },
    "Compare": {
        "compare": "Compare runs: accuracy against bytes, tables, one page.",
        "card": "Write what a paper states about runs: RUN/card.md and .html.",
    },
    "Look closer": {
        "watch": "Follow a run, or the runs of a sweep, from another terminal.",
        "ledger": "Show where a run's bytes went.",
        "trace": "Write a run's timeline for ui.perfetto.dev, RUN/trace.json.",
        "codecs": "Compare all codecs on the messages of a run.",
        "schedule": "Print a participation schedule as a grid.",
        "verify": "Compute a run's last rounds again and compare the bits.",
        "relay": "Count the bytes of another tool, by round and connection.",
    },
    "Workers on other machines": {
        "worker": "Take part in a run on another machine.",
        "node": "Take part in a run with several workers of this machine.",
        "revoke": "Shut a worker on another machine out of a run.",
    },
}
"""The verbs by section of `fedsim --help`, with their descriptions."""


@click.group(
    cls=Commands,
    modules=IN_FILES,
    groups=GROUPS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(version=__version__, message="fedsim %(version)s")
def main() -> None:
    """Measure what federated Bayesian and ADMM learning costs on the wire.

    A coordinator and K worker processes exchange typed messages over ZeroMQ; every byte is counted
    by its meaning: mean, precision, dual, header, framing.
    """
