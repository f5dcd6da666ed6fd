"""Selection of the trained parameters. Frozen parameters are never sent.

A frozen parameter is part of the model but not of the Layout. Its values follow from the seed or a user's
file, so every process creates them itself. Processes compare a digest of them to detect differences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from hashlib import sha256

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedsim.errors import UsageError


def freeze(module: nn.Module, train: str = "", freeze: str = "") -> None:
    """Set requires_grad of all parameters of a model, in place.

    train: comma-separated name patterns, with * and ?, of the parameters to train; '': all. Parameters that
    the model itself has frozen stay frozen unless `train` matches them. freeze: patterns of the parameters
    not to train. A shared parameter matches by any of its names.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    every = [name for of_one in names.values() for name in of_one]
    trained, frozen = _patterns(train, "--train", every), _patterns(freeze, "--freeze", every)
    for parameter, own in names.items():
        if trained:
            parameter.requires_grad_(_fits(own, trained))
        if _fits(own, frozen):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in names):
        raise UsageError("no parameter of the model is left to train; see fedsim describe --model")


def _patterns(text: str, option: str, names: list[str]) -> tuple[str, ...]:
    patterns = tuple(pattern.strip() for pattern in text.split(",") if pattern.strip())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            few = ", ".join(names[:8])
            raise UsageError(f"{option} {pattern!r} fits no parameter of the model; it has {few}, ...")
    return patterns


def _fits(names: list[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def frozen_tensors(module: nn.Module, kept: Collection[nn.Module] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of frozen parameters and of the buffers of frozen modules.
    kept: other modules whose buffers are constant."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter.detach()
    for prefix, part in module.named_modules():
        if is_frozen(part) or part in kept:
            for name, buffer in part.named_buffers(recurse=False):
                yield f"{prefix}.{name}".lstrip("."), buffer


def put_frozen(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Make the named frozen tensors use the memory of tensors with equal values, and free their own."""
    for name, there in tensors:
        owner, _, leaf = name.rpartition(".")
        getattr(module.get_submodule(owner), leaf).data = there


def frozen_digest(module: nn.Module, kept: Collection[nn.Module] = ()) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and values of frozen_tensors; '' if there are none."""
    hashed, empty = sha256(), True
    for name, tensor in frozen_tensors(module, kept):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        empty = False
    return "" if empty else hashed.hexdigest()


def is_frozen(part: nn.Module) -> bool:
    """Return whether a module, without its submodules, has parameters and trains none of them."""
    own = list(part.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


def running_statistics(module: nn.Module) -> dict[str, nn.Module]:
    """Return by name the batch-normalisation modules whose running statistics training would change."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and part.running_mean is not None and not is_frozen(part)
    }


def kept_in_evaluation(module: nn.Module, statistics: str = "") -> list[nn.Module]:
    """Return the modules that stay in evaluation mode, so that training does not change their float buffers.

    These are frozen modules and, if `statistics` is 'frozen', batch normalisation. statistics: the rule for
    trained batch normalisation (Experiment.statistics). If it is '', trained batch normalisation raises a
    UsageError. Other floating-point buffers have to be constants, which the registry tries out.
    """
    kept, running = [], running_statistics(module)
    if statistics and not running:
        raise UsageError(
            f"--statistics {statistics}: the model has no trained layer with running statistics; leave it out"
        )
    for name, part in module.named_modules():
        if not any(b.is_floating_point() for b in part.buffers(recurse=False)):
            continue
        where = name or "itself"
        if name in running and statistics in ("local", "average"):
            if running[name].momentum is None:
                raise UsageError(
                    f"--statistics {statistics}: the statistics in {where} are averages over all batches so "
                    "far (momentum=None), whose number does not travel; give the layer a momentum"
                )
            continue
        if name in running and not statistics:
            raise UsageError(
                f"the model has floating-point buffers (running statistics) in {where}, which would be state "
                "outside the parameter vector; choose what happens to them: --statistics average (they "
                "travel), local (each client keeps its own) or frozen; or freeze the layer (--freeze)"
            )
        if is_frozen(part) or name in running:
            kept.append(part)
    return kept
