"""Build an experiment's problem. Every process that computes uses the same steps in the same order."""

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
"""The value for set_deterministic on a GPU. New memory is not filled, because each fill launches a kernel."""


def assemble(experiment: Experiment, data_dir: Path | None, device: str) -> Problem:
    """Fix the process's numerics, then build the problem. Code in a user's file cannot change the numerics.

    device: the network's device, which is "cpu", "cuda" or "cuda:N".
    """
    # before fix_numerics, which flushes denormals to 0: the bound "> 0" is stored as the smallest denormal
    algorithm = build_algorithm(find(experiment.algo), experiment.hyperparameters)
    fix_numerics(experiment.threads, device, experiment.numerics)
    problem = Problem.build(experiment, algorithm, data_dir, device)
    if device.startswith("cuda"):
        set_deterministic(DETERMINISTIC)  # tell torch's compiler, too, if the model has imported it
    return problem


def fix_numerics(threads: int, device: str, numerics: str = "native") -> None:
    """Fix the settings on which floating-point results depend. Every process that computes calls this first.

    Denormals are flushed to zero: saturated units have gradients near 1e-20, whose squares would be denormal
    and slow. Threads that start later inherit this flag. On a GPU, matrix products and convolutions use
    float32, unless numerics is tf32.

    Raises:
        UsageError: if `device` is cuda and torch cannot use a GPU, or if check_numerics raises it.
    """
    check_numerics(numerics)
    fix_settings()
    use_exact_roots(numerics == "portable")
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError("this installation of torch cannot use the GPU here; give --devices cpu")
        # cuBLAS reads this variable at its first use; torch 2.6 refuses matrix products without it
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        set_deterministic(DETERMINISTIC)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = numerics == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = numerics == "tf32"
