"""A Slurm cluster of pretended nodes on this machine: munged, slurmctld and one slurmd a node.

    python -m tests.support.slurm_cluster 2 -- squeue         runs a command in a cluster of two nodes

Needs root and Debian's packages slurm-wlm and munge. Nothing outside a temporary folder is written, and no
service of the system is used.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.commands import DEADLINE

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
START = DEADLINE
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=0
"""


def missing() -> list[str]:
    """What this machine lacks for a cluster."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = [name for name in COMMANDS if shutil.which(name, path=path) is None]
    return lacking + ([] if os.getuid() == 0 else ["root"])


@dataclass
class Cluster:
    """A cluster with `nodes` nodes of `cpus` CPUs each, between start() and stop()."""

    nodes: int = 2
    cpus: int = 2
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="slurm-")))
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Of commands that use the cluster."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        (self.folder / "state").mkdir()
        (key := self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)
        host, ports = socket.gethostname(), _free_ports(self.nodes + 1)
        lines = [CONFIG.format(host=host, folder=self.folder, control=ports[0])]
        names = [f"n{i}" for i in range(self.nodes)]
        for name, port in zip(names, ports[1:], strict=True):
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} "
                "State=UNKNOWN"
            )
        lines.append(f"PartitionName=main Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--{name}-file={self.folder}/munge.{name}" for name in ("log", "pid", "seed")),
            f"--socket={self.folder}/munge.socket",
        )
        until = time.monotonic() + START
        while not (self.folder / "munge.socket").exists():
            assert time.monotonic() < until, (self.folder / "munged.out").read_text()
            time.sleep(0.05)
        self._daemon("slurmctld", "-D", "-i")
        for name in names:
            self._daemon("slurmd", "-D", "-N", name)
        while self._idle() < self.nodes:
            assert time.monotonic() < until, self.command("sinfo")
            time.sleep(0.1)

    def _idle(self) -> int:
        return self.command("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")

    def _daemon(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}{len(self.processes)}.out", "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [name, *arguments], env=self.environment, stdout=log, stderr=subprocess.STDOUT
                )
            )

    def command(self, *arguments: str) -> str:
        """What a command that uses the cluster prints."""
        done = subprocess.run(
            arguments, env=self.environment, capture_output=True, text=True, timeout=DEADLINE
        )
        return done.stdout + done.stderr

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.command("scancel", "--full", "--signal=KILL", "--user=root")
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def main() -> int:
    """Run a command in a cluster; returns its exit code."""
    cluster = Cluster(int(sys.argv[1]))
    try:
        cluster.start()
        return subprocess.run(sys.argv[3:], env=cluster.environment).returncode
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
