"""APPFL's serial simulation: its server agent and all client agents in one process.

optimize_memory, which is on by default, collects the garbage of the whole process after most steps.
"""

import job
from appfl.agent import ClientAgent, ServerAgent
from appfl.algorithm.trainer import BaseTrainer
from omegaconf import OmegaConf

LEAN = {"optimize_memory": False}


class Trainer(BaseTrainer):
    def train(self):
        self.round += 1
        job.train(self.model, self.train_dataset.client, self.round)

    def get_parameters(self):
        return self.model.state_dict()


class Shard:
    def __init__(self, client):
        self.client, self.size = client, len(job.shard(client)[1])

    def __len__(self):
        return self.size


def shard(client):
    return Shard(client), None


def server_agent(kind=ServerAgent):
    shared = {
        "train_configs": {"trainer": "Trainer", "trainer_path": __file__},
        "model_configs": {"model_path": job.__file__, "model_name": "model"},
    }
    averaging = {
        "num_clients": job.settings()["clients"],
        "num_global_epochs": job.settings()["rounds"],
        "scheduler": "SyncScheduler",
        "scheduler_kwargs": LEAN,
        "aggregator": "FedAvgAggregator",
        "aggregator_kwargs": {"client_weights_mode": "sample_size", **LEAN},
        **LEAN,
    }
    return kind(OmegaConf.create({"client_configs": shared, "server_configs": averaging}))


def client_agent(client):
    data = {"dataset_path": __file__, "dataset_name": "shard", "dataset_kwargs": {"client": client}}
    own = {"client_id": str(client), "data_configs": data, "train_configs": {"logging_output_dirname": ""}}
    return ClientAgent(OmegaConf.create({**own, **LEAN}))


def main():
    server = server_agent()
    agents = [client_agent(client) for client in range(server.get_num_clients())]
    for agent in agents:
        agent.load_config(server.get_client_configs())
        agent.load_parameters(server.get_parameters(serial_run=True))
        server.set_sample_size(agent.get_id(), agent.get_sample_size())
    round = 0
    while not server.training_finished():
        futures = []
        for agent in agents:
            agent.train()
            futures.append(server.global_update(agent.get_id(), agent.get_parameters()))
        for agent, future in zip(agents, futures, strict=True):
            agent.load_parameters(future.result())
        round += 1
        job.end_of_round(round, server.model)
    job.end(server.model)


if __name__ == "__main__":
    main()
