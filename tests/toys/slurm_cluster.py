"""A real Slurm on this machine: munged, slurmctld and two slurmd from the packages of `.cluster/`, as any user."""

from __future__ import annotations

import getpass
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from network_namespaces import LOOPBACK, Host
from ports import reserve_ports
from waiting import wait_until

from draftworks.distributed.stop_signals import build_shim_command

UNPACKED = Path(__file__).resolve().parents[2] / ".cluster" / "root"
NODES = ("n1", "n2")
MARK = "DRAFTWORKS_SLURM_DAEMON"
"""Environment variable of a daemon, and of the step managers that it starts: which daemon of which cluster it is."""

CONFIGURATION = """\
ClusterName=draftworks
SlurmctldHost={host}({controller_address})
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
PluginDir={plugins}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SchedulerParameters=sched_min_interval=100000,sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdTimeout=6
KillWait=30
MessageTimeout=10
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=gpu Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes={names} MaxTime=1 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=8 Boards=1 SocketsPerBoard=1"
    " CoresPerSocket=8 ThreadsPerCore=1 RealMemory=100000 State=UNKNOWN"
)


@dataclass
class SlurmCluster:
    """A running cluster.

    Attributes:
        folder: of its files; removed when it has ended.
        commands: folder of `sbatch`, `squeue` and the others, which ask this cluster wherever they are called from.
    """

    folder: Path
    hosts: tuple[Host, ...]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def commands(self) -> Path:
        return self.folder / "bin"

    @property
    def path(self) -> str:
        """PATH with this cluster's commands before all others."""
        return f"{self.commands}{os.pathsep}{os.environ['PATH']}"

    def ask(self, name: str, *arguments: str) -> str:
        """Return what a command of Slurm prints. Raises CalledProcessError if it fails."""
        done = subprocess.run([self.commands / name, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def start(self) -> None:
        """Start what does not run, and wait until all nodes are idle. Raises RuntimeError with what a daemon said."""
        where = dict(zip(NODES, self.hosts))
        self.start_daemon("munged", ["munged", *_munge_options(self.folder)])
        _wait_for(lambda: (self.folder / "munge.socket").exists(), self._require_daemons, "munged")
        self.start_controller()
        stepd = UNPACKED / "usr/sbin/slurmstepd-wlm"
        for node in NODES:
            self.start_daemon(node, ["slurmd-wlm", "-D", "-d", str(stepd), "-N", node], where[node])
        _wait_for(lambda: self.nodes_are("idle"), self._require_daemons, "Slurm")

    def start_controller(self) -> None:
        """Start slurmctld; it takes up the jobs that an earlier one knew."""
        self.start_daemon("slurmctld", ["slurmctld-wlm", "-D"], self.hosts[0])

    def start_node(self, name: str) -> None:
        """Start a lost node again, and wait until it is idle."""
        stepd = UNPACKED / "usr/sbin/slurmstepd-wlm"
        host = dict(zip(NODES, self.hosts))[name]
        self.start_daemon(name, ["slurmd-wlm", "-D", "-d", str(stepd), "-N", name], host)
        _wait_for(lambda: self.nodes_are("idle"), self._require_daemons, name)

    def start_daemon(self, name: str, command: Sequence[str], host: Host = LOOPBACK) -> None:
        if name in self.daemons and self.daemons[name].poll() is None:
            return
        program = UNPACKED / "usr/sbin" / command[0]
        if not program.exists():
            raise RuntimeError(f"expected {program}: run `make .cluster/ready`, which unpacks Slurm's packages")
        env = {**os.environ, **_slurm_environment(self.folder), MARK: f"{self.folder}:{name}"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                [*build_shim_command(), *_enter(host), str(program), *command[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop_controller(self) -> None:
        """End slurmctld: commands cannot reach it, and jobs go on."""
        daemon = self.daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait()

    def lose_node(self, name: str) -> None:
        """Kill everything on a node at once, as a power cut would."""
        self.daemons.pop(name)
        _kill([process for each in find_daemons(f"{self.folder}:{name}") for process in _tree(each)])

    def kill_ranks(self, copy: int) -> None:
        """Kill the ranks of an array's element, as a machine without memory does."""
        wanted = {b"SLURM_ARRAY_TASK_ID=%d" % copy, f"SLURM_CONF={self.folder}/slurm.conf".encode()}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                found = set(Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"))
                if found >= wanted and any(each.startswith(b"LOCAL_RANK=") for each in found):
                    process.kill()

    def nodes_are(self, state: str) -> bool:
        """Whether all nodes are in a state; False while the controller does not answer."""
        with suppress(subprocess.CalledProcessError):
            return self.ask("sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%T").split() == [state] * len(
                NODES
            )
        return False

    def empty(self) -> None:
        """End all jobs and wait for idle nodes, so that the next test finds what the first one found."""
        self.ask("scancel", f"--user={getpass.getuser()}")
        _wait_for(lambda: self.nodes_are("idle"), self._require_daemons, "idle nodes")

    def end(self) -> None:
        """End all jobs and daemons; kill what is left of either."""
        with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            subprocess.run(
                [self.commands / "scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}"],
                timeout=60,
                capture_output=True,
            )
        left = [process for each in find_daemons(f"{self.folder}:") for process in _tree(each)]
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        _kill(left)
        for daemon in self.daemons.values():
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _require_daemons(self) -> None:
        for name, daemon in self.daemons.items():
            if daemon.poll() is not None:
                raise RuntimeError(f"{name} ended with exit code {daemon.returncode}:\n{self.read_log(name)}")

    def read_log(self, name: str) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])


@contextmanager
def slurm_cluster(hosts: tuple[Host, Host] = (LOOPBACK, LOOPBACK)) -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes, `n1` and `n2`, and end it without a trace.

    Partitions: `gpu` (the default), `urgent`, whose jobs pre-empt those of the others, and `short`, of one minute.

    Args:
        hosts: where the nodes run; the controller runs on the first one's.

    Raises:
        RuntimeError: something cannot start, with the last lines of its log.
    """
    # Not pytest's folder: the path of a socket is limited to 108 bytes.
    cluster = SlurmCluster(Path(tempfile.mkdtemp(prefix="dwslurm-")), hosts)
    try:
        _write_files(cluster)
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def _write_files(cluster: SlurmCluster) -> None:
    folder, host = cluster.folder, socket.gethostname()
    for name in ("state", "bin", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    ports = reserve_ports(1 + len(NODES))
    nodes = [
        NODE.format(name=name, host=host, address=place.address, port=port)
        for name, place, port in zip(NODES, cluster.hosts, ports[1:])
    ]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            host=host,
            controller_address=cluster.hosts[0].address,
            controller_port=ports[0],
            user=getpass.getuser(),
            plugins=_libraries() / "slurm-wlm",
            nodes="\n".join(nodes),
            names=",".join(NODES),
        )
    )
    # In another network namespace than its cluster's, a command enters that of the controller.
    prefix = shlex.join(_enter(cluster.hosts[0]))
    enter = f'test -n "$(ip netns identify $$)" || set -- {prefix} "$@"\n' if prefix else ""
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in _slurm_environment(folder).items())
    for client in sorted((UNPACKED / "usr/bin").glob("s*")):
        script = folder / "bin" / client.name
        script.write_text(f'#!/bin/sh\n{variables}set -- {client} "$@"\n{enter}exec "$@"\n')
        script.chmod(0o755)


def _enter(host: Host) -> tuple[str, ...]:
    """Return what stands before a command that is to run there. `ip netns exec` would hide the cgroups that slurmd needs."""
    return ("nsenter", f"--net=/run/netns/{host.prefix[-1]}") if host.prefix else ()


def _slurm_environment(folder: Path) -> dict[str, str]:
    libraries = _libraries()
    system = UNPACKED / "lib" / libraries.name
    found = [libraries, libraries / "slurm-wlm", system]
    return {"SLURM_CONF": str(folder / "slurm.conf"), "LD_LIBRARY_PATH": os.pathsep.join(map(str, found))}


def _libraries() -> Path:
    return UNPACKED / "usr/lib" / f"{platform.machine()}-linux-gnu"


def _munge_options(folder: Path) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return ["--foreground", "--force", *(f"--{option}={folder}/munge.{end}" for option, end in files.items())]


def _wait_for(condition: Callable[[], bool], check: Callable[[], None], what: str) -> None:
    """Wait for `what`; `check` raises if it cannot come."""
    wait_until(lambda: check() or condition(), what)


def find_daemons(mark: str) -> list[psutil.Process]:
    """Return daemons and step managers of a cluster (`FOLDER:`), or of one daemon of it (`FOLDER:NAME`)."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for process in psutil.process_iter():
        # psutil reads no environment of a step manager, whose title has been written over the begin of it.
        with suppress(psutil.Error, OSError):
            if wanted in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process)
    return found


def _tree(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":  # by hand: a cluster until Ctrl-C
    with slurm_cluster() as running, suppress(KeyboardInterrupt):
        print(f"export PATH={running.commands}:$PATH", flush=True)
        sys.stdin.read()
