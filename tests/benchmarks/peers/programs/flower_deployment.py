"""Flower's deployment engine: a SuperLink, and a SuperNode a client; flower_simulation's app over HTTP.

A SuperNode starts a process for every message that its ClientApp gets (isolation "subprocess", the default).
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import job

APP = """
[project]
name = "peer"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr>=1.41.0"]

[tool.flwr.app]
publisher = "peer"

[tool.flwr.app.components]
serverapp = "app:server_app"
clientapp = "app:client_app"
"""
CONNECTION = """
[superlink]
default = "local"

[superlink.local]
address = "127.0.0.1:{}"
insecure = true
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for(port):
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 1).close()
        time.sleep(0.05)


def main(folder, settings):
    app, home = Path(folder, "app"), Path(folder, "flwr")
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(APP)
    shutil.copy(Path(__file__).with_name("flower_simulation.py"), app / "app.py")
    port = settings.get("port") or free_port()
    (home / "config.toml").write_text(CONNECTION.format(port))
    os.environ["FLWR_HOME"] = str(home)
    link = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    started = [subprocess.Popen([*link, "--disable-runtime-dependency-installation"])]
    wait_for(port)
    for client in range(settings["clients"]):
        link = f"127.0.0.1:{settings.get('through', port)}"
        node = ["flower-supernode", "--insecure", "--superlink", link, "--port", str(free_port())]
        started.append(subprocess.Popen([*node, "--node-config", f"partition-id={client}"]))
    try:
        subprocess.run(["flwr", "run", str(app), "local", "--stream"], check=True)
        if settings.get("through"):
            listed = subprocess.check_output(["flwr", "list", "local", "--format", "json"])
            traffic = json.loads(listed)["runs"][0]["network-traffic"]
            print(f"{traffic['outbound-bytes']:,} bytes down, {traffic['inbound-bytes']:,} bytes up")
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(name, job.settings())
