"""FedLab's standalone mode: all clients one after another in one process."""

import job
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler


class Clients(SGDSerialClientTrainer):
    def local_process(self, payload, id_list, round):
        for client in id_list:
            self.set_model(payload[0])
            job.train(self._model, client, round)
            self.cache.append([self.model_parameters])


settings = job.settings()
server = SyncServerHandler(job.model(), settings["rounds"], sample_ratio=1.0)
server.num_clients = settings["clients"]
clients = Clients(job.model(), settings["clients"])
while not server.if_stop:
    clients.local_process(server.downlink_package, server.sample_clients(), server.round + 1)
    for upload in clients.uplink_package:
        server.load(upload)
    job.end_of_round(server.round, server.model)
job.end(server.model)
