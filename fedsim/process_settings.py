"""Settings of torch and NumPy that results depend on, and that a user's program or file may have changed.

`fix_settings` sets them to the values of a fresh interpreter. Every process that computes calls it, through
workers.assembly. `settings_kept` restores them after a user's code, which may change them. `own_settings`
wraps a run in the process of a user's program: it restores the caller's settings and the states of the global
random generators, which a run does not use.

Settings that belong to a thread (autograd mode, autocast, the default device) are set in the calling thread;
other threads of a run start with torch's defaults.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import overrides
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from fedsim.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """A setting: the functions that read and write it, and its value in a fresh interpreter."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    value: Any


def _attribute(owner: str, name: str, value: Any) -> Iterator[Setting]:
    """Yield a property of torch.backends, if this version of torch has it."""
    thing: Any = torch.backends
    for part in filter(None, owner.split(".")):
        thing = getattr(thing, part, None)
    if getattr(thing, name, None) is not None:
        full = ".".join(filter(None, ("torch.backends", owner, name)))
        yield Setting(full, partial(getattr, thing, name), partial(setattr, thing, name), value)


def _matmul_precision() -> str | None:
    """Return the precision; None if torch raises an error, because fp32_precision was set differently."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _deterministic() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
    )


def set_deterministic(value: tuple[bool, bool, bool]) -> None:
    """Set torch's deterministic algorithms: whether to use them, only warn, and fill uninitialised memory.

    The effect is that of torch.use_deterministic_algorithms, which imports torch's compiler to inform it. The
    import slows a worker's start from one second to seven; it is needed only if the compiler was imported.
    """
    enabled, warn_only, fill = value
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _settings() -> Iterator[Setting]:
    yield Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32)
    # set before the newer fp32_precision settings, because it changes them
    yield Setting("float32 matmul precision", _matmul_precision, _set_matmul_precision, "highest")
    for owner in ("", "cuda.matmul", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"):
        yield from _attribute(owner, "fp32_precision", "none")
    yield from _attribute("mkldnn", "deterministic", False)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        enabled = partial(getattr, torch.backends.mkldnn, "enabled")
        yield Setting("oneDNN (mkldnn)", enabled, torch._C._set_mkldnn_enabled, True)
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        yield from _attribute("cudnn", name, name in ("enabled", "allow_tf32"))
    for kind in ("fp16", "bf16"):
        yield from _attribute("cuda.matmul", f"allow_{kind}_reduced_precision_reduction", True)
    yield Setting("deterministic algorithms", _deterministic, set_deterministic, (False, False, True))
    cuda: Any = torch.backends.cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        read, write = getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")
        yield Setting(f"{name} attention", read, write, True)
    fast = torch.backends.mha
    yield Setting("the fast path of attention", fast.get_fastpath_enabled, fast.set_fastpath_enabled, True)
    for kind in ("cpu", "cuda"):
        read = partial(torch.is_autocast_enabled, kind)
        yield Setting(f"autocast on {kind}", read, partial(torch.set_autocast_enabled, kind), False)
    yield Setting("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled, True)
    yield Setting(
        "anomaly detection", _anomaly, lambda v: torch.autograd.set_detect_anomaly(*v), (False, True)
    )
    errors = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
    yield Setting("numpy.seterr", np.geterr, lambda v: np.seterr(**v), errors)


SETTINGS = tuple(_settings())
THREADS = "torch's number of threads"


def current_settings() -> dict[str, Any]:
    """Return the values of all settings by name, with this process's number of threads."""
    return {THREADS: torch.get_num_threads()} | {s.name: s.get() for s in SETTINGS}


def fix_settings() -> None:
    """Set all settings to the values of a fresh interpreter; refuse modes that only the caller can end."""
    for setting in SETTINGS:
        if setting.get() != setting.value:
            setting.set(setting.value)
    if torch.get_default_device().type != "cpu":
        torch.set_default_device(None)
    _refuse(None)


def flushes_denormals() -> bool:
    """Return whether this thread treats denormal numbers as zero."""
    smallest_normal = sys.float_info.min
    return smallest_normal / 2.0 == 0.0


@contextmanager
def own_settings() -> Iterator[None]:
    """Run a block with the settings of a fresh interpreter, and restore the caller's settings after it.

    The number of threads and denormal flushing, which fix_numerics sets, are restored, too."""
    _refuse("fedsim cannot run in this block")
    with ExitStack() as closing:
        # tensors are created on the CPU, in spite of torch.set_default_device or `with torch.device(...)`
        for _ in range(torch._C._len_torch_function_stack()):
            closing.enter_context(overrides._pop_mode_temporarily())
        closing.enter_context(torch.inference_mode(False))
        closing.callback(random.setstate, random.getstate())
        closing.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        closing.callback(torch.set_rng_state, torch.get_rng_state())
        closing.enter_context(settings_kept())
        fix_settings()
        yield


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore settings, number of threads and denormal flushing after a block; reset the default device."""
    before, flushes = current_settings(), flushes_denormals()
    try:
        yield
    finally:
        if torch.get_default_device().type != "cpu":
            torch.set_default_device(None)
        for setting in SETTINGS:
            if setting.get() != before[setting.name]:
                setting.set(before[setting.name])
        torch.set_num_threads(before[THREADS])
        torch.set_flush_denormal(flushes)


def _refuse(begin: str | None) -> None:
    """Refuse modes that intercept torch's functions in this thread. With `begin`, allow a default device."""
    devices = DeviceContext if begin else ()
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    names = [
        *(type(mode).__name__ for mode in modes if not isinstance(mode, devices)),
        *(type(mode).__name__ for mode in _python_dispatch._get_current_dispatch_mode_stack()),
    ]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        names.append("torch.func (vmap, grad, ...)")
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.6 has none
    if top is not None and top(True) is not None:
        names.append("torch.autograd.graph.saved_tensors_hooks")
    if names:
        raise UsageError(
            f"{begin or 'a run cannot go on'}: {names[-1]} intercepts torch's functions here, and the bits "
            "would depend on it. Call fedsim outside of it"
        )
