"""APPFL's gRPC server and a process for each client, with the agents of appfl_serial.

A round begins when all uploads of the one before are there, so that the model that the server then sends
belongs to it; the model after the last round is sent in round `rounds` + 1.
"""

import subprocess
import sys
import threading

import appfl_serial
import job
from appfl.agent import ServerAgent
from appfl.comm.grpc import GRPCClientCommunicator, GRPCServerCommunicator, serve


class Server(ServerAgent):
    uploads, lock = 0, threading.Lock()

    def global_update(self, *model, **more):
        with self.lock:
            self.uploads += 1
            round, rest = divmod(self.uploads, self.get_num_clients())
        if not rest:
            print(f"[ROUND {round + 1}]", flush=True)
        return super().global_update(*model, **more)


def server():
    agent = appfl_serial.server_agent(Server)
    print("[ROUND 1]", flush=True)
    communicator = GRPCServerCommunicator(agent, logger=agent.logger)
    serve(communicator, server_uri=f"127.0.0.1:{job.settings()['port']}")
    job.end(agent.model)


def client(number):
    agent = appfl_serial.client_agent(number)
    address = f"127.0.0.1:{job.settings()['through']}"
    link = GRPCClientCommunicator(agent.get_id(), server_uri=address, logger=agent.logger)
    agent.load_config(link.get_configuration())
    agent.load_parameters(link.get_global_model(init_model=True))
    link.invoke_custom_action(action="set_sample_size", sample_size=agent.get_sample_size())
    status = "RUNNING"
    while status != "DONE":
        agent.train()
        model, answer = link.update_global_model(agent.get_parameters())
        agent.load_parameters(model)
        status = answer["status"]
    link.invoke_custom_action(action="close_connection")


def main():
    roles = ["server", *map(str, range(job.settings()["clients"]))]
    started = [subprocess.Popen([sys.executable, __file__, role]) for role in roles]
    sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "server":
        server()
    else:
        client(int(sys.argv[1]))
