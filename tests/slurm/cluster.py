"""Runs a temporary Slurm of two nodes on this machine: real daemons with separate configuration, ports and folders."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from relax_core.control.host.run_paths import owned

NODES = 2
CPUS = 4
DEADLINE_S = 120.0
POLL_S = 0.05
DAEMONS = ("munged", "slurmctld", "slurmd")

CONFIG = """\
ClusterName=relaxtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a job that was queued again waits (120 s by default).
AuthInfo=socket={root}/munge.sock,cred_expire=3
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=5
MinJobAge=300
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=15
InactiveLimit=0
OverTimeLimit=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=DEFAULT CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF
"""


class Cluster:
    """Context manager that runs a Slurm. ``environment`` is the environment of Slurm's commands.

    ``scratch`` is the /tmp of the nodes.
    """

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-test-", dir="/tmp"))
        self.scratch = Path(f"/tmp/st{secrets.token_hex(2)}")  # sockets need a short path
        self.scratch.mkdir(mode=0o700)
        self._owned = ExitStack()  # a later session removes the files of a killed session
        for folder in (self.root, self.scratch):
            self._owned.enter_context(owned(folder, f"a test's Slurm, process {os.getpid()}"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf"), "TMPDIR": str(self.scratch)}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def call(self, *command: str) -> str:
        """Runs a Slurm command. Raises CalledProcessError if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def wait_empty(self) -> None:
        """Blocks until the queue is empty."""
        deadline = time.monotonic() + DEADLINE_S
        while queue := self.call("squeue", "--noheader"):
            assert time.monotonic() < deadline, f"the queue does not empty: {queue}"
            time.sleep(POLL_S)

    def wait_idle(self) -> None:
        """Blocks until every node accepts jobs."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.call("sinfo", "-h", "-N", "-t", "idle", "-p", "main", "-o", "%N").split()) < NODES:
            assert time.monotonic() < deadline, self.call("sinfo", "-N", "-l") + self._logs()
            time.sleep(POLL_S)

    def clean(self) -> None:
        """Ends the jobs that a failed test left in the queue."""
        self.call("scancel", "--user=root")
        self.wait_empty()

    def processes(self) -> dict[int, str]:
        """Returns process id → command line of every process of a job. Finds processes by their environment."""
        mark = f"SLURM_CONF={self.root}/slurm.conf".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                words = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdecimal() else []
                if (
                    mark in words
                    and any(word.startswith(b"SLURM_JOB_ID=") for word in words)
                    and _is_alive(int(entry.name))
                ):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def assert_nothing_left(self) -> None:
        """Asserts that no process of a job, no folder of a job and no published weights are left."""
        deadline = time.monotonic() + DEADLINE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert not left, f"left over: {left}"
        folders = [path for path in self.scratch.iterdir() if path.name.startswith("r")]  # torch's cache may stay
        assert not folders, f"left over: {folders}"

    def _start(self) -> None:
        root = self.root
        root.chmod(0o755)  # munged requires it
        for name in ("log", "state", "spool"):
            (root / name).mkdir()
        key = root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = _free_ports(NODES + 1)
        host = socket.gethostname().split(".")[0]
        address = _own_address()
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname={host} NodeAddr={address} Port={port}"
            for number, port in enumerate(ports[1:], start=1)
        )
        text = CONFIG.format(host=host, port=ports[0], root=root, cpus=CPUS, nodes=nodes)
        (root / "slurm.conf").write_text(text)
        munged = ["munged", "--force", f"--key-file={key}", f"--socket={root}/munge.sock"]
        self.call(
            *munged, f"--pid-file={root}/munged.pid", f"--log-file={root}/log/munged.log", f"--seed-file={root}/seed"
        )
        self.call("slurmctld", "-i")
        for number in range(1, NODES + 1):
            self.start_node(number)
        self.wait_idle()

    def start_node(self, number: int) -> None:
        self.call("slurmd", "-N", f"n{number}")

    def daemons(self) -> list[int]:
        """Returns the process ids of the daemons: first the nodes' daemons."""
        files = [*self.root.glob("slurmd.*.pid"), self.root / "slurmctld.pid", self.root / "munged.pid"]
        return [int(text) for file in files if file.is_file() and (text := file.read_text().strip())]

    def _stop(self) -> None:
        """Ends the jobs before the daemons, because a job step continues without the daemon of its node."""
        with suppress(subprocess.CalledProcessError, AssertionError, FileNotFoundError):
            self.call("scancel", "--user=root")
            self.wait_empty()
        pids = self.daemons()
        for number, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + wait_s
            while any(map(_is_alive, pids)) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        assert not any(map(_is_alive, pids)), f"these do not end: {pids}"
        shutil.rmtree(self.root)
        shutil.rmtree(self.scratch)
        self._owned.close()

    def _logs(self) -> str:
        return "\n".join(f"{file.name}\n{file.read_text()[-2000:]}" for file in (self.root / "log").iterdir())


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _own_address() -> str:
    """Returns the address that Ray uses for this machine. With several nodes Ray does not use a loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 1))  # no packet is sent
        return str(probe.getsockname()[0])


def _free_ports(count: int) -> list[int]:
    """Returns ports below the kernel's ephemeral range. So no other process takes such a port by chance."""
    given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    free: list[int] = []
    for port in random.sample(range(10_000, given_away), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError(f"no {count} free ports between 10000 and {given_away}")
