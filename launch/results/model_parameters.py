"""fedsim describe --model: the parameters of a model, which of them are trained, and their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from fedsim.experiment import Experiment, build_algorithm
from fedsim.learning.frozen import frozen_tensors
from fedsim.problem import Problem
from launch.terminal import console, print_json, print_table
from protocols import find


def parameters_of(experiment: Experiment, data_dir: Path | None) -> dict[str, Any]:
    """Every parameter and frozen buffer of the model: name, shape, count, and whether it is trained.

    Raises:
        FedsimError: As Problem.outline.
    """
    problem = Problem.outline(experiment, build_algorithm(find(experiment.algo), {}), data_dir)
    module = problem.net.module
    rows = [
        {"name": name, "shape": list(p.shape), "count": p.numel(), "trained": p.requires_grad}
        for name, p in module.named_parameters()
    ]
    known = {row["name"] for row in rows}
    rows += [
        {"name": name, "shape": list(t.shape), "count": t.numel(), "trained": False}
        for name, t in frozen_tensors(module)
        if name not in known
    ]
    return {
        "model": problem.experiment.model,
        "dataset": experiment.dataset,
        "params": problem.net.layout.size,
        "frozen": sum(row["count"] for row in rows if not row["trained"]),
        "frozen_sha256": problem.frozen_digest,
        "parameters": rows,
    }


def describe_model(experiment: Experiment, data_dir: Path | None, as_json: bool) -> None:
    """Print them.

    Raises:
        FedsimError: As Problem.outline.
    """
    document = parameters_of(experiment, data_dir)
    if as_json:
        return print_json(document)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("parameter", "left"), ("shape", "left"), ("count", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in document["parameters"]:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        table.add_row(row["name"], shape, f"{row['count']:,}", "trained" if row["trained"] else "frozen")
    out = console()
    print_table(out, table)
    params, frozen = document["params"], document["frozen"]
    out.print(f"\nP = {params:,}: a vector of P has {4 * params:,} bytes as float32")
    if frozen:
        out.print(f"frozen: {frozen:,}, which never cross the wire; sha256 {document['frozen_sha256'][:16]}")
    return None
