"""Models by name.

Every model maps a float32 batch (n, *shape) to outputs (n, classes). A user's sequence model maps ids (n, T),
whole numbers in float32, to outputs (n, T, classes). Dense models flatten their inputs, so a table (42,) and
an image (1, 28, 28) both fit. Convolutional models take (channels, height, width) of any size that leaves at
least one pixel before the first dense layer.

Initial weights are PyTorch's defaults unless a model's docstring says otherwise. They are drawn from torch's
global generator, layer by layer in the order of the forward pass. `torch.manual_seed(seed)` followed by
`build_model` thus gives the initial weights of the released code (bayes-admm `models.py`, `train.py`
L195-225). No activation works in place, so hooks may record layer outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsim import plugins
from fedsim.data.datasets import Dataset
from fedsim.errors import UsageError, unknown
from fedsim.experiment import Experiment
from fedsim.learning.frozen import freeze
from fedsim.learning.likelihoods import likelihood as likelihood_of
from fedsim.learning.models.paper_models import (
    Shape,
    cnn_acar,
    cnn_mcmahan,
    cnn_zenke,
    logistic,
    mlp,
    resnet20,
)
from fedsim.learning.models.timm_models import timm_model
from fedsim.learning.models.weights import load_weights
from fedsim.learning.module_state import ModuleState
from fedsim.learning.params import Net
from fedsim.learning.shards import as_floats
from fedsim.model_specs import ModelSpec
from fedsim.process_settings import current_settings, settings_kept
from fedsim.seeds import seeded_torch


@dataclass(frozen=True)
class ModelInfo:
    """One entry of the registry: `build(shape, classes)` returns a freshly initialised module."""

    name: str
    description: str
    build: Callable[[Shape, int], nn.Module]


def build_model(name: str, shape: Shape, classes: int, likelihood: str = "categorical") -> nn.Module:
    """Build a model for inputs (n, *shape) and `classes` outputs, drawing from torch's global generator.

    name: a key of MODELS, path/to/file.py:NAME or timm:NAME, with optional weights (fedsim.model_specs). The
    caller seeds the generator.
    """
    spec = ModelSpec.parse(name)
    files = spec.files()  # reports missing files before anything is built
    module = _base(spec, shape, classes, likelihood)
    for file in files:
        load_weights(module, file)
    return module


def _base(spec: ModelSpec, shape: Shape, classes: int, likelihood: str) -> nn.Module:
    """Build a model with its own initial weights."""
    name = spec.base
    if name not in MODELS and not plugins.is_spec(name) and spec.timm is None:
        raise unknown("model", name, MODELS)
    if not shape or any(side < 1 for side in shape):
        raise UsageError(f"model {name!r}: an input shape needs sides of at least 1, got {shape}")
    if likelihood == "categorical" and classes < 2:
        raise UsageError(f"model {name!r}: a classifier needs at least 2 classes, got {classes}")
    sequence = likelihood_of(likelihood).sequences
    expected = (2, *shape, classes) if sequence else (2, classes)
    if spec.timm is not None:
        return _tried(timm_model(spec.timm, shape, classes), f"model {name!r}", shape, expected)
    if name not in MODELS:
        return _users_model(name, shape, classes, expected)
    if sequence:
        raise UsageError(
            f"model {name!r} has one row of outputs per example, and this data set's targets are "
            f"{likelihood}; take a model with outputs at every place of a sequence, such as FILE.py:NAME"
        )
    return MODELS[name].build(shape, classes)


def _users_model(spec: str, shape: Shape, classes: int, expected: Shape) -> nn.Module:
    """Build a module with the callable NAME(shape, classes) of a user's file.
    For two blank examples, the module must return a tensor of the `expected` shape."""
    owner = f"--model {plugins.short(spec)}"
    with torch.random.fork_rng(devices=[]):  # executing the file may draw random numbers
        build = plugins.load(spec, "--model")
    if not callable(build) or isinstance(build, nn.Module):
        raise UsageError(
            f"{owner} is a {type(build).__name__}; name a class or function that makes a new torch.nn.Module "
            "from (shape, classes)"
        )
    calling = f"calling it with shape {shape} and {classes} classes"
    with settings_kept(), plugins.user_code_errors(spec, "--model", calling):
        module = build(shape, classes)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{owner} must return a torch.nn.Module; it returned a {type(module).__name__}")
    trying = f"a forward pass of two examples of shape {shape}"
    with settings_kept(), plugins.user_code_errors(spec, "--model", trying):
        return _tried(module, owner, shape, expected)


def _tried(module: nn.Module, owner: str, shape: Shape, expected: Shape) -> nn.Module:
    """Return the module after checking that two blank examples give outputs of the expected shape."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UsageError(
            f"{owner} is TorchScript (torch.jit), which is not trained here; bring the torch.nn.Module that "
            "it was made from"
        )
    lazy = any(is_lazy(parameter) for parameter in module.parameters())
    state = None if lazy else ModuleState(module, list(module.parameters()))
    with torch.no_grad():
        out = module.eval()(torch.zeros(2, *shape))
    _check_outputs(out, owner, shape, expected)
    if state is not None:
        state.restore()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            why = "a lazy layer that is not called" if is_lazy(tensor) else "it is on the meta device"
            raise UsageError(f"{owner}: {name} has no values after a forward pass: {why}")
    if not list(module.parameters()):
        raise UsageError(f"{owner} has no parameters that could be trained")
    return module.train()


def _check_outputs(out: object, owner: str, shape: Shape, expected: Shape, mode: str = "") -> None:
    """Refuse outputs of another shape than the expected one. mode: the mode that the error names."""
    if isinstance(out, Tensor) and out.shape == expected:
        return
    came = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
    count = "one example" if expected[0] == 1 else "two examples"
    raise UsageError(
        f"{owner} must give one logit per class: for {count} of shape {shape} a tensor of shape "
        f"{expected}; {mode}it gave {came}"
    )


def _tried_out(net: Net, model: str, rows: Tensor, classes: int) -> ModuleState:
    """Check the outputs of a user's network or one of timm for two examples and for one, in both modes.

    Also learn whether it draws random numbers, and refuse what fedsim could neither send nor restore. Return
    what the module keeps, as it was before.

    Raises:
        UsageError: if outputs have another shape; if a forward pass changes a parameter, a floating-point
            buffer or a setting of the process; if evaluation draws random numbers; or if something that the
            module keeps cannot be restored.
    """
    owner, shape = f"--model {plugins.short(model)}", tuple(rows.shape[1:])
    state, statistics, weights = net.state(), net.statistics.clone(), net.weights.detach().clone()
    settings = current_settings()
    for name, kind in state.unrestorable.items():
        raise UsageError(
            f"{owner} keeps {kind} in {name}, which fedsim cannot restore before every task; keep a list and "
            "a number instead, or make it in forward"
        )
    buffers = {
        name: (buffer, buffer.clone())
        for name, buffer in net.module.named_buffers()
        if buffer.is_floating_point() and name not in {part.name for part in net.running.slices}
    }

    def doing(count: int) -> str:
        return f"a forward pass of {'two examples' if count > 1 else 'one example'} in {mode} mode"

    for mode, enter in (("training", net.module.train), ("evaluation", net.module.eval)):
        enter()
        for part in net.kept:
            part.eval()
        for count in sorted({len(rows), 1}, reverse=True):
            with torch.random.fork_rng(devices=[]), plugins.user_code_errors(model, "--model", doing(count)):
                before = torch.get_rng_state()
                out = net.outputs(rows[:count])
                drew = not torch.equal(torch.get_rng_state(), before)
            like = (count, *shape, classes) if net.likelihood.sequences else (count, classes)
            _check_outputs(out, owner, shape, like, f"in {mode} mode ")
            if drew and mode == "evaluation":
                raise UsageError(
                    f"{owner} draws random numbers in evaluation mode, so its scores would differ each time; "
                    "draw in training mode only: F.dropout(x, p, self.training), nn.Dropout"
                )
            net.stochastic |= drew
        if not torch.equal(net.weights, weights):
            raise UsageError(
                f"{owner}: a forward pass in {mode} mode changes trained parameters in place; only training "
                "may do that. Compute with a changed copy instead"
            )
        for name, value in current_settings().items():
            if value != settings[name]:
                raise UsageError(
                    f"{owner}: a forward pass in {mode} mode sets {name}, which all processes share; "
                    "leave it to fedsim"
                )
        changed = [name for name, (buffer, value) in buffers.items() if not torch.equal(buffer, value)]
        if changed:
            raise UsageError(
                f"{owner}: a forward pass in {mode} mode changes the floating-point buffer {changed[0]}, "
                "which would be state outside the parameter vector; freeze its layer (--freeze), or use "
                "batch normalisation of torch.nn with --statistics"
            )
    state.restore()
    net.statistics.copy_(statistics)
    return state


def network_of(experiment: Experiment, dataset: Dataset, device: torch.device) -> Net:
    """Return the network of an experiment, on flat buffers, with its initial weights."""
    shape = tuple(dataset.train_inputs.shape[1:])
    with seeded_torch(experiment.seed):
        module = build_model(experiment.model, shape, dataset.classes, dataset.likelihood)
        freeze(module, experiment.train, experiment.freeze)
        net = Net(module, device, likelihood_of(dataset.likelihood), experiment.statistics)
    if experiment.model not in MODELS:
        rows = torch.from_numpy(np.array(dataset.train_inputs[:2])).to(device)
        scale = dataset.scale if experiment.inputs == "scaled" else 1.0
        net.kept_state = _tried_out(net, experiment.model, as_floats(rows, shape, scale), dataset.classes)
    return net


_ALL = (
    ModelInfo("logistic", "logistic regression, no bias, zero init (v1/v2, FedLap)", logistic(bias=False)),
    ModelInfo("logistic_bias", "logistic regression with bias, zero init", logistic(bias=True)),
    ModelInfo("mlp", "d-200-100-C, sigmoid (v1/v2, FedLap)", mlp((200, 100), nn.Sigmoid)),
    ModelInfo("mlp_small", "d-100-C, ReLU (this project's main job on digits)", mlp((100,), nn.ReLU)),
    ModelInfo("mlp_500_300", "d-500-300-C, ReLU (Gaussian product)", mlp((500, 300), nn.ReLU)),
    ModelInfo("cnn_zenke", "4 conv3x3, dropout, FC 512 (v1/v2, FedLap: CifarNet)", cnn_zenke),
    ModelInfo("cnn_acar", "2 conv5x5 of 64, FC 384-192 (FedDyn; v1/v2)", cnn_acar),
    ModelInfo("cnn_mcmahan", "conv5x5 32-64, FC 512 (McMahan; Gaussian product)", cnn_mcmahan),
    ModelInfo("resnet20", "ResNet-20, GroupNorm, option-A shortcuts (v2: CIFAR-100)", resnet20),
)
MODELS: Mapping[str, ModelInfo] = MappingProxyType({info.name: info for info in _ALL})
