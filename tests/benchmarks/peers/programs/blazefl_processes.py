"""BlazeFL's process pool with shared memory (its thread pool wants a free-threaded Python 3.14)."""

import job
import torch._dynamo  # noqa: F401  (torch.optim imports it at its first use: once here, not in every round)
import torch.multiprocessing as mp
from blazefl.contrib.fedavg import (
    FedAvgBaseServerHandler,
    FedAvgDownlinkPackage,
    FedAvgProcessPoolUplinkPackage,
)
from blazefl.core import (
    IPCMode,
    ModelSelector,
    ProcessPoolClientTrainer,
    SHMHandle,
    deserialize_model,
    serialize_model,
)


class Selector(ModelSelector):
    def select_model(self, model_name):
        return job.model()


class Clients(
    ProcessPoolClientTrainer[FedAvgProcessPoolUplinkPackage, FedAvgDownlinkPackage, tuple[int, int]]
):
    def __init__(self, workers):
        self.num_parallels, self.device, self.ipc_mode = workers, "cpu", IPCMode.SHARED_MEMORY
        self.cache, self.round = [], 0
        self.stop_event = mp.Manager().Event()
        self.buffer = serialize_model(job.model())

    def get_client_config(self, cid):
        return cid, self.round

    def prepare_uplink_package_buffer(self):
        return FedAvgProcessPoolUplinkPackage(-1, self.buffer.clone(), 0)

    @staticmethod
    def worker(config, payload, device, stop_event, *, shm_buffer=None):
        net, (client, round) = job.model(), config
        deserialize_model(net, payload.model_parameters)
        size = job.train(net, client, round)
        shm_buffer.model_parameters.copy_(serialize_model(net))
        return FedAvgProcessPoolUplinkPackage(client, SHMHandle(), size)

    def uplink_package(self):
        packages, self.cache = self.cache, []
        return packages


if __name__ == "__main__":
    settings = job.settings()
    server = FedAvgBaseServerHandler(
        Selector(), "mlp", None, settings["rounds"], settings["clients"], 1.0, "cpu", settings["batch"], 0
    )
    clients = Clients(settings["workers"])
    while not server.if_stop():
        clients.round = server.round + 1
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)
        job.end_of_round(server.round, server.model)
    job.end(server.model)
