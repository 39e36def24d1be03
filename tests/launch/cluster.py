"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd of the distribution, in one folder.

The nodes are called 127.0.0.1 and 127.0.0.2: names that resolve everywhere, which a rendezvous needs, and that Slurm takes
for two hosts. machines.py has nodes that share no network.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
INSTALL = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES.values())}"
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
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
MessageTimeout=5
MailProg=/bin/true
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no cluster here, as a reason to skip; empty where there can."""
    packages = [package for program, package in PACKAGES.items() if not shutil.which(program, path=SEARCH)]
    return f"no Slurm here: missing packages {' '.join(packages)}; install with: {INSTALL}" if packages else ""


@dataclass(frozen=True)
class Machine:
    """A host as Slurm sees it. `command`: what starts a program there, before its own words; all that it starts ends with it."""

    name: str
    address: str
    command: tuple[str, ...] = ()


HERE = Machine(socket.gethostname().partition(".")[0], "127.0.0.1")
NODES = (Machine("127.0.0.1", "127.0.0.1"), Machine("127.0.0.2", "127.0.0.2"))


class Cluster:
    """A running cluster; SLURM_CONF must be `configuration` for the commands that talk to it.

    slurmctld runs on `login`.
    """

    def __init__(self, folder: Path, nodes: Sequence[Machine] = NODES, login: Machine = HERE) -> None:
        self.folder, self.nodes, self.login = folder, nodes, login
        self.configuration = folder / "slurm.conf"
        self._processes = contextlib.ExitStack()
        self._slurmd: dict[Machine, subprocess.Popen[bytes]] = {}

    def command(self, *words: str, **variables: object) -> str:
        """Standard output of one of Slurm's commands, called in the repository with these variables."""
        environment = self._environment() | {name: str(value) for name, value in variables.items()}
        command = [*self.login.command, *words]
        result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "show", "job", "--oneliner", number)))

    def wait(self, number: str, seconds: float = 200) -> str:
        """The state in which the job ended."""
        until(lambda: self.job(number)["JobState"] in ENDED, seconds, f"the end of job {number}: {self.job(number)}")
        return self.job(number)["JobState"]

    def start(self) -> None:
        """Start the daemons."""
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", *(f"spool-{node.name}" for node in self.nodes)):
            (self.folder / name).mkdir()
        self._configure()
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        files["seed-file"] = "munge.seed"
        # --force: the folder is this user's alone, which munged does not like for a socket
        munge = [word for option, file in files.items() for word in (f"--{option}", str(self.folder / file))]
        self._daemon(HERE, "munged", "--foreground", "--force", *munge)
        until((self.folder / "munge.socket").exists, 20, "munged's socket")
        self._daemon(self.login, "slurmctld", "-D", "-f", str(self.configuration))
        for node in self.nodes:
            self._boot(node)
        until(self._is_idle, 60, f"idle nodes; see the logs in {self.folder}")
        if not self.login.command:
            self._processes.callback(self._cancel_all)  # first of all at the end: slurmd leaves what runs running

    def stop(self) -> None:
        """End all daemons that were started."""
        self._processes.close()

    def reboot(self, node: Machine) -> None:
        """Switch the machine off, with all that runs on it, and on again."""
        _kill(self._slurmd[node])
        self._boot(node)

    def _boot(self, node: Machine) -> None:
        self._slurmd[node] = self._daemon(node, "slurmd", "-D", "-N", node.name, "-f", str(self.configuration))

    def _configure(self) -> None:
        ports = free_ports(1 + len(self.nodes))
        nodes = [
            f"NodeName={node.name} NodeAddr={node.address} Port={port} CPUs=2"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        text = CONFIGURATION.format(
            folder=self.folder,
            host=self.login.name,
            address=self.login.address,
            user=getpass.getuser(),
            controller=ports[0],
            nodes="\n".join(nodes),
        )
        self.configuration.write_text(text)
        # nothing here uses control groups; without this line slurmd looks for their mounts, which a namespace lacks
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _is_idle(self) -> bool:
        with contextlib.suppress(AssertionError):  # slurmctld does not answer yet
            return self.command("sinfo", "-h", "-p", "main", "-N", "-o", "%T").split() == ["idle"] * len(self.nodes)
        return False

    def _cancel_all(self) -> None:
        for number in self.command("squeue", "-h", "-o", "%i").split():
            self.command("scancel", number)
        until(lambda: not self.command("squeue", "-h").strip(), 60, "the end of all jobs")

    def _daemon(self, machine: Machine, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = shutil.which(name, path=SEARCH)
        assert program is not None
        log = self._processes.enter_context((self.folder / f"{name}-{time.monotonic_ns()}.out").open("wb"))
        command = [*machine.command, program, *arguments]
        process = subprocess.Popen(command, env=self._environment(), stdout=log, stderr=log, start_new_session=True)
        self._processes.callback(_kill if machine.command else _end, process)
        return process

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.configuration), "PATH": SEARCH}


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster lives as long as the block."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until `condition()` is true; an AssertionError says what did not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{seconds:.0f} s without {what}"
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
