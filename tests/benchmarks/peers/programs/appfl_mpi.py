"""APPFL's batched MPI simulation: a process for the server, and one a worker for its share of the clients."""

import os
import sys

import appfl_serial
import job
import numpy as np
from appfl.agent import ServerAgent


class Server(ServerAgent):
    def global_update(self, *model, **more):
        before = self.scheduler.get_num_global_epochs()
        result = super().global_update(*model, **more)
        if self.scheduler.get_num_global_epochs() > before:
            job.end_of_round(before + 1, self.model)
        return result


def serve(comm):
    from appfl.comm.mpi import MPIServerCommunicator

    server = appfl_serial.server_agent(Server)
    MPIServerCommunicator(comm, server, logger=server.logger).serve()
    job.end(server.model)


def work(comm):
    from appfl.comm.mpi import MPIClientCommunicator

    shares = np.array_split(np.arange(job.settings()["clients"]), comm.Get_size() - 1)
    agents = {str(client): appfl_serial.client_agent(int(client)) for client in shares[comm.Get_rank() - 1]}
    server = MPIClientCommunicator(comm, 0, client_ids=list(agents), **appfl_serial.LEAN)
    config, start = server.get_configuration(), server.get_global_model(init_model=True)
    for agent in agents.values():
        agent.load_config(config)
        agent.load_parameters(start)
    sizes = {name: {"sample_size": agent.get_sample_size()} for name, agent in agents.items()}
    server.invoke_custom_action(action="set_sample_size", kwargs=sizes)
    running = True
    while running:
        for agent in agents.values():
            agent.train()
        models = {name: agent.get_parameters() for name, agent in agents.items()}
        model, answers = server.update_global_model(models, kwargs={})
        for agent in agents.values():
            agent.load_parameters(model)
        running = not all(answer["status"] == "DONE" for answer in answers.values())
    server.invoke_custom_action(action="close_connection")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        this, workers = [sys.executable, __file__], str(job.settings()["workers"])
        os.execvp("mpiexec", ["mpiexec", "-n", "1", *this, "server", ":", "-n", workers, *this, "client"])
    from mpi4py import MPI

    if sys.argv[1] == "server":
        serve(MPI.COMM_WORLD)
    else:
        work(MPI.COMM_WORLD)
