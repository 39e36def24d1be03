"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd of the distribution, in one folder.

The nodes are called 127.0.0.1 and 127.0.0.2: names that resolve everywhere, which a rendezvous needs, and that Slurm takes
for two hosts.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
INSTALL = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES.values())}"
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
NODES = ("127.0.0.1", "127.0.0.2")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
KillWait=3
MailProg=/bin/true
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing() -> str:
    """Why there can be no cluster here, as a reason to skip; empty where there can."""
    packages = [package for program, package in PACKAGES.items() if not shutil.which(program, path=SEARCH)]
    return f"no Slurm here: missing packages {' '.join(packages)}; install with: {INSTALL}" if packages else ""


class Cluster:
    """A running cluster; SLURM_CONF must be `configuration` for the commands that talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"

    def command(self, *words: str) -> str:
        """Standard output of one of Slurm's commands."""
        result = subprocess.run(words, env=self._environment(), capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "show", "job", "--oneliner", number)))

    def wait(self, number: str, seconds: float = 200) -> str:
        """The state in which the job ended."""
        until(lambda: self.job(number)["JobState"] in ENDED, seconds, f"the end of job {number}: {self.job(number)}")
        return self.job(number)["JobState"]

    def start(self, processes: contextlib.ExitStack) -> None:
        """Start the daemons; `processes` ends them."""
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        ports = free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={node} NodeAddr={node} Port={port} CPUs=2" for node, port in zip(NODES, ports[1:], strict=True)
        ]
        self.configuration.write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                controller=ports[0],
                nodes="\n".join(nodes),
            )
        )
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        files["seed-file"] = "munge.seed"
        # --force: the folder is this user's alone, which munged does not like for a socket
        munge = [word for option, file in files.items() for word in (f"--{option}", str(self.folder / file))]
        self._daemon(processes, "munged", "--foreground", "--force", *munge)
        until((self.folder / "munge.socket").exists, 20, "munged's socket")
        self._daemon(processes, "slurmctld", "-D", "-f", str(self.configuration))
        for node in NODES:
            self._daemon(processes, "slurmd", "-D", "-N", node, "-f", str(self.configuration))
        until(self._is_idle, 60, f"idle nodes; see the logs in {self.folder}")
        processes.callback(self._cancel_all)  # first of all at the end: slurmd leaves what runs running

    def _is_idle(self) -> bool:
        result = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], env=self._environment(), capture_output=True, text=True, timeout=60
        )
        return result.stdout.split() == ["idle"] * len(NODES)

    def _cancel_all(self) -> None:
        for number in self.command("squeue", "-h", "-o", "%i").split():
            self.command("scancel", number)
        until(lambda: not self.command("squeue", "-h").strip(), 60, "the end of all jobs")

    def _daemon(self, processes: contextlib.ExitStack, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=SEARCH)
        assert program is not None
        log = processes.enter_context((self.folder / f"{name}-{time.monotonic_ns()}.out").open("wb"))
        process = subprocess.Popen(
            [program, *arguments], env=self._environment(), stdout=log, stderr=log, start_new_session=True
        )
        processes.callback(_end, process)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.configuration), "PATH": SEARCH}


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster that lives as long as the block."""
    cluster = Cluster(folder)
    with contextlib.ExitStack() as processes:
        cluster.start(processes)
        yield cluster


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until `condition()` is true; an AssertionError says what did not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{seconds:.0f} s without {what}"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
