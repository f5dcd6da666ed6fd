"""Build an experiment's problem: the same steps, in the same order, in every process that computes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fedsim.errors import UsageError
from fedsim.experiment import Experiment, build_algorithm
from fedsim.problem import Problem
from fedsim.process_settings import fix_settings, set_deterministic
from protocols import find
from workers.exact_roots import use_exact_roots
from workers.portable import check_numerics

DETERMINISTIC = (True, False, False)
"""On a GPU. Memory that was not written is not filled: nothing reads it, and each filling is a kernel."""


def assemble(experiment: Experiment, data_dir: Path | None, device: str) -> Problem:
    """Fix the process's numerics, and build the problem. A user's file cannot change them.

    device: where the network is: "cpu", or "cuda" with or without a number.
    """
    # before denormals are flushed: "> 0" is stored as ">= the smallest denormal", which would be 0
    algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
    fix_numerics(experiment.threads, device, experiment.numerics)
    problem = Problem.build(experiment, algorithm, data_dir, device)
    if device.startswith("cuda"):
        set_deterministic(DETERMINISTIC)  # also of a compiler that the user's model has imported
    return problem


def fix_numerics(threads: int, device: str, numerics: str = "native") -> None:
    """Fix the settings that float results depend on; every process that computes calls it first.

    Denormals are flushed to zero: saturated units give gradients near 1e-20 whose squares would be
    denormal, and slow. Threads that are started afterwards inherit the flag. On a GPU matrix products and
    convolutions are of float32, unless numerics is tf32.

    Raises:
        UsageError: if `device` is cuda and torch has none, or if `numerics` is portable and comes too late.
    """
    check_numerics(numerics)
    fix_settings()
    use_exact_roots(numerics == "portable")
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError("this installation of torch cannot use the GPU here; give --devices cpu")
        # cuBLAS reads it at its first use; without it torch 2.6 refuses matrix products
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        set_deterministic(DETERMINISTIC)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = numerics == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = numerics == "tf32"
