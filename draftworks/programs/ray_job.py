"""What a Ray job runs: torchrun on its node, or on each of several nodes, where Ray Train's workers start it.

    python -m draftworks.programs.ray_job FILE

The file is `RayJob` as JSON, on the file system that all nodes share. Only the driver of several nodes imports Ray; its
function for the workers is sent by value, so that they need nothing of Draftworks.

Ray Train calls that function in a thread of its worker, where Python receives no signals: a program that ran there could
not save a checkpoint when it is stopped. So it starts torchrun, as every launcher does, and ranks are the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from draftworks.distributed import stop_signals

EXIT_LOST = 75
"""A node was lost, or the time is over: the job may be submitted again."""
EXIT_STOPPED = 128 + signal.SIGTERM
EXIT_USER_ERROR = 2
POLL_S = 0.2
MARGIN_S = 5.0
"""Beyond the grace, before torchrun is killed and before a node that says nothing counts as lost."""
MEETING, ADDRESS, IS_HOST, NODES = "@MEETING@", "@ADDRESS@", "@IS_HOST@", "@NODES@"
NODE_OPTIONS = (
    "--rdzv-backend=c10d",
    f"--rdzv-endpoint={MEETING}",
    f"--rdzv-conf=is_host={IS_HOST}",
    f"--nnodes={NODES}",
    f"--local-addr={ADDRESS}",
)
"""Options of torchrun on several nodes; the words in @ are known on the nodes only."""
STOP_FILE = "stop"
STOPPED, OUT_OF_TIME = "stopped", "out of time"
RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class RayJob:
    """A torchrun job for Ray. `folder` and `log` are on the shared file system.

    Attributes:
        command: torchrun's command line, with `NODE_OPTIONS` if there are several nodes.
        env: added to the environment of torchrun; may hold secrets, so the file is the user's alone.
        least_nodes: nodes to begin with if `nodes` are not in the cluster.
        resources: of Ray, that each node of the job takes: CPU, GPU, memory, and custom ones.
        time_limit_s: after which the ranks are asked to stop in order.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    folder: str
    log: str
    cwd: str
    nodes: int
    least_nodes: int
    resources: Mapping[str, float]
    grace_s: float
    start_timeout_s: float
    time_limit_s: float | None = None

    @property
    def stop_file(self) -> Path:
        """Exists when the job is to end in order, and says why."""
        return Path(self.folder) / STOP_FILE

    @property
    def is_out_of_time(self) -> bool:
        return self.stop_file.exists() and self.stop_file.read_text() == OUT_OF_TIME

    def ask_to_stop(self, reason: str) -> None:
        if not self.stop_file.exists():
            self.stop_file.write_text(reason)

    def locate_marker(self, rank: int) -> Path:
        """Return the file that exists while torchrun runs on a node."""
        return Path(self.folder) / f"node{rank}.running"

    def locate_code(self, rank: int) -> Path:
        """Return the file with the exit code of a node."""
        return Path(self.folder) / f"node{rank}.code"

    def find_markers(self) -> list[Path]:
        return list(Path(self.folder).glob("node*.running"))

    def save(self, path: Path) -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)

    @classmethod
    def load(cls, path: Path) -> RayJob:
        values = json.loads(path.read_text())
        return cls(**{**values, "command": tuple(values["command"])})

    def make_environment(self) -> dict[str, str]:
        """Return the environment of torchrun, without the ranks that Ray Train gave its workers."""
        return {**{name: value for name, value in os.environ.items() if name not in RANKS}, **self.env}


@dataclass(frozen=True)
class Node:
    """A node's place in a job of several."""

    rank: int
    count: int
    meeting: str
    address: str

    def fill_in(self, command: Sequence[str]) -> list[str]:
        words = {
            MEETING: self.meeting,
            ADDRESS: self.address,
            IS_HOST: str(self.rank == 0).lower(),
            NODES: str(self.count),
        }
        filled = []
        for argument in command:
            for word, value in words.items():
                argument = argument.replace(word, value) if argument.startswith("--") else argument
            filled.append(argument)
        return filled


def run_here(job: RayJob) -> int:
    """Run torchrun on this node, until it ends or is asked to; return the exit code of the job.

    When Ray stops a job it sends SIGTERM to this process and to all below it, torchrun included: a second one would end
    torchrun before its ranks have saved.
    """
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: signals.append(signum))
    code = run_torchrun(job, job.command, lambda: job.stop_file.exists(), lambda: bool(signals))
    return EXIT_LOST if job.is_out_of_time else code


def run_on_node(job: RayJob, node: Node, worker: int) -> int:
    """Run torchrun on one of several nodes, until it ends, is asked to by the stop file, or loses Ray's worker (a pid).

    Writes and returns torchrun's exit code; 0 after an orderly stop, since a worker that fails would end those of other
    nodes at once.
    """
    process = psutil.Process(worker) if psutil.pid_exists(worker) else None
    marker = job.locate_marker(node.rank)
    marker.write_text(f"{socket.gethostname()} {os.getpid()}")
    try:
        command = node.fill_in(job.command)
        code = run_torchrun(job, command, lambda: job.stop_file.exists() or not _is_alive(process))
        code = 0 if job.stop_file.exists() else code
        job.locate_code(node.rank).write_text(str(code))
    finally:
        marker.unlink(missing_ok=True)
    return code


def _is_alive(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def run_torchrun(
    job: RayJob,
    command: Sequence[str],
    must_stop: Callable[[], bool],
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Run torchrun to its end and return its exit code.

    Args:
        must_stop: whether it is to be terminated; then it has the grace of the job before it is killed.
        is_stopping: whether somebody else has terminated it.
    """
    torchrun = subprocess.Popen(
        [*stop_signals.build_shim_command(), *command], env=job.make_environment(), start_new_session=True
    )
    kill_at = None
    while torchrun.poll() is None:
        if kill_at is None and (is_stopping() or must_stop()):
            if not is_stopping():
                torchrun.terminate()
            kill_at = time.monotonic() + job.grace_s + MARGIN_S
        if kill_at is not None and time.monotonic() > kill_at:
            _kill_tree(torchrun.pid)
        time.sleep(POLL_S)
    return torchrun.returncode


def _kill_tree(pid: int) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.Error):
                each.kill()


def start_clock(job: RayJob) -> None:
    """Ask the job to stop when its time is over."""

    def stop() -> None:
        print(
            f"the time limit of {job.time_limit_s:g} s is reached: the ranks are asked to save and to stop", flush=True
        )
        job.ask_to_stop(OUT_OF_TIME)

    if job.time_limit_s is not None:
        timer = threading.Timer(job.time_limit_s, stop)
        timer.daemon = True
        timer.start()


def start_on_node(config: Mapping[str, str]) -> None:
    """Start `run_on_node` from Ray Train's worker and wait for it. Raises RuntimeError if torchrun fails.

    It runs in a process that is no child of the worker: Ray kills a worker's children, and the ranks could not save.
    """
    import contextlib
    import os
    import pathlib
    import socket
    import subprocess
    import time

    import ray.train  # pyright: ignore[reportMissingImports]
    import ray.util  # pyright: ignore[reportMissingImports]
    from ray.train.collective import broadcast_from_rank_zero  # pyright: ignore[reportMissingImports]

    context = ray.train.get_context()
    address, rank = ray.util.get_node_ip_address(), context.get_world_rank()
    with contextlib.closing(socket.socket()) as free:
        free.bind(("", 0))
        found = f"{address}:{free.getsockname()[1]}" if rank == 0 else None
    meeting = broadcast_from_rank_zero(found)
    place = [str(rank), str(context.get_world_size()), meeting, address, str(os.getpid())]
    command = [config["python"], "-m", "draftworks.programs.ray_job", config["file"], "--node", *place]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [config["root"], os.environ.get("PYTHONPATH")]))}
    subprocess.run(command, env=env, start_new_session=True, check=True)
    folder = pathlib.Path(config["file"]).parent
    code, marker = folder / f"node{rank}.code", folder / f"node{rank}.running"
    missing = 0
    while not code.exists() or not code.read_text():
        missing = 0 if marker.exists() else missing + 1
        if missing * 0.5 > 60:
            raise RuntimeError(f"the process that runs torchrun on node {rank} ({address}) is gone")
        time.sleep(0.5)
    if code.read_text() != "0":
        raise RuntimeError(f"torchrun on node {rank} ({address}) exited with code {code.read_text()}")


def run_on_nodes(job: RayJob, file: Path) -> int:
    """Run the job on several nodes by Ray Train; return the exit code of the driver."""
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(job.start_timeout_s)
    import ray  # pyright: ignore[reportMissingImports]
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
    from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]

    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    signal.signal(signal.SIGTERM, lambda *_: job.ask_to_stop(STOPPED))
    count = count_nodes(job, ray.nodes())
    print(f"Ray Train starts torchrun on {count} node(s), each with {dict(job.resources)}", flush=True)
    trainer = TorchTrainer(
        start_on_node,
        torch_config=TorchConfig(backend="gloo"),  # of the workers, which compute nothing; ranks choose their own
        train_loop_config={"python": sys.executable, "file": str(file), "root": str(Path(__file__).parents[2])},
        scaling_config=ScalingConfig(
            num_workers=count,
            use_gpu=job.resources.get("GPU", 0) > 0,
            resources_per_worker=dict(job.resources),
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(
            name="workers",
            storage_path=str(Path(job.folder) / "ray_train"),
            failure_config=FailureConfig(max_failures=0),
        ),
    )
    failed = False
    try:
        trainer.fit()
    except Exception:
        failed = True
        traceback.print_exc()
    if not wait_for_nodes(job, job.grace_s + 2 * MARGIN_S):
        print(f"Ray has lost {[marker.read_text() for marker in job.find_markers()]}", flush=True)
        return EXIT_LOST
    if job.stop_file.exists():
        return EXIT_LOST if job.is_out_of_time else EXIT_STOPPED
    return int(failed)


def count_nodes(job: RayJob, nodes: Sequence[Mapping[str, Any]]) -> int:
    """Return how many nodes to begin with: those that are there and large enough, within the job's limits."""
    fitting = sum(
        bool(node["Alive"]) and all(node["Resources"].get(name, 0) >= need for name, need in job.resources.items())
        for node in nodes
    )
    return max(job.least_nodes, min(job.nodes, fitting))


def wait_for_nodes(job: RayJob, timeout_s: float) -> bool:
    """Wait until torchrun has ended on all nodes; return whether it has within the time."""
    deadline = time.monotonic() + timeout_s
    while job.find_markers():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="the job (JSON)")
    place = ("RANK", "COUNT", "MEETING", "ADDRESS", "WORKER")
    parser.add_argument("--node", nargs=5, metavar=place, help="set by Ray Train's workers")
    parsed = parser.parse_args(arguments)
    if not parsed.file.exists():
        print(
            f"{socket.gethostname()} does not see {parsed.file}: every node of the cluster needs the file system of `var`,"
            " at the path that it has where Dagster runs",
            file=sys.stderr,
        )
        return EXIT_USER_ERROR
    job = RayJob.load(parsed.file)
    log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    if os.path.isdir(job.cwd):
        os.chdir(job.cwd)
    if parsed.node is not None:
        rank, count, meeting, address, worker = parsed.node
        if os.fork():
            return 0
        return run_on_node(job, Node(int(rank), int(count), meeting, address), int(worker))
    if job.stop_file.exists():
        print("this job was ended while it waited for a place", flush=True)
        return EXIT_STOPPED
    start_clock(job)
    return run_here(job) if job.nodes == 1 else run_on_nodes(job, parsed.file)


if __name__ == "__main__":
    sys.exit(main())
