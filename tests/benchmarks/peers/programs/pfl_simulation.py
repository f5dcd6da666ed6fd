"""pfl-research's simulated backend in one process (its workers are Horovod's or torch.distributed's)."""

import job
import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = job.model()

    def forward(self, inputs):
        return self.layers(inputs)

    def loss(self, inputs, targets, eval=False):
        return cross_entropy(self(inputs), targets)

    def metrics(self, inputs, targets, eval=False):
        return {"accuracy": Weighted((self(inputs).argmax(1) == targets).sum().item(), len(targets))}


class EndOfRound(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        job.end_of_round(central_iteration + 1, model.pytorch_model)
        return False, Metrics()


settings = job.settings()
np.random.seed(0)
torch.manual_seed(0)
torch.set_default_device(settings["device"])


def shuffled(client: int) -> PyTorchTensorDataset:
    inputs, targets = job.shard(client)
    rows = torch.randperm(len(targets), device=targets.device)
    return PyTorchTensorDataset([inputs[rows], targets[rows]], user_id=str(client))


clients = list(range(settings["clients"]))
users = FederatedDataset(shuffled, get_user_sampler("minimize_reuse", clients))
network = Network()
FederatedAveraging().run(
    NNAlgorithmParams(settings["rounds"], settings["rounds"] + 1, settings["clients"], None),
    SimulatedBackend(users, users),
    PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
    NNTrainHyperParams(
        local_batch_size=settings["batch"], local_num_epochs=1, local_learning_rate=settings["lr"]
    ),
    NNEvalHyperParams(local_batch_size=None),
    callbacks=[EndOfRound()],
)
job.end(network)
