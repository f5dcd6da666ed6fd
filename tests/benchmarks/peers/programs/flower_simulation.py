"""Flower's simulation engine (Ray), with its message API."""

import job
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    net = job.model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    round, client = message.content["config"]["server-round"], context.node_config["partition-id"]
    metrics = MetricRecord({"num-examples": job.train(net, client, round)})
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    net = job.model()

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        if round:
            job.end_of_round(round, net)
        return MetricRecord({})

    clients = job.settings()["clients"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.start(grid, ArrayRecord(net.state_dict()), job.settings()["rounds"], evaluate_fn=evaluate)
    job.end(net)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": job.settings()["workers"]}}
    run_simulation(server_app, client_app, job.settings()["clients"], backend_config=resources)
