"""NVFlare's simulator, a recipe and the Client API: this file is the job and the script of its clients."""

import sys
import tempfile
from pathlib import Path

import job
import nvflare.client as flare
import torch
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv


class Network(torch.nn.Sequential):
    def __init__(self):
        super().__init__(*job.model())


class Persistor(PTFileModelPersistor):
    def __init__(self):
        super().__init__(model=Network())

    def save_model(self, ml, fl_ctx):
        super().save_model(ml, fl_ctx)
        weights = {name: torch.as_tensor(value) for name, value in ml[ModelLearnableKey.WEIGHTS].items()}
        self.model.load_state_dict(weights)
        job.end_of_round(fl_ctx.get_prop(AppConstants.CURRENT_ROUND) + 1, self.model)


def client():
    flare.init()
    net, number = job.model(), int(flare.get_site_name().removeprefix("site-")) - 1
    while flare.is_running():
        received = flare.receive()
        net.load_state_dict(received.params)
        size = job.train(net, number, received.current_round + 1)
        flare.send(flare.FLModel(params=net.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": size}))


def main(folder):
    settings = job.settings()
    recipe = FedAvgRecipe(
        name="peer",
        min_clients=settings["clients"],
        num_rounds=settings["rounds"],
        model_persistor=Persistor(),
        train_script=__file__,
        train_args="client",
    )
    result = recipe.execute(SimEnv(num_clients=settings["clients"], workspace_root=folder)).get_result()
    net = job.model()
    saved = next(Path(result).rglob("FL_global_model.pt"))
    net.load_state_dict(torch.load(saved)["model"])
    job.end(net)


if __name__ == "__main__":
    if "client" in sys.argv:
        client()
    else:
        with tempfile.TemporaryDirectory() as name:
            main(name)
