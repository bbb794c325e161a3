"""A Ray cluster of two nodes on this machine, in a process of its own: `with RayCluster.start(folder) as cluster`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0
MEMORY_BYTES = 100 << 20


@dataclass(frozen=True)
class RayCluster:
    """A head and one node more, with two CPUs each; the second one has the custom resource `second`."""

    address: str
    process: subprocess.Popen[str]

    @classmethod
    @contextmanager
    def start(cls) -> Iterator[RayCluster]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        folder = tempfile.mkdtemp(prefix="ray.")  # of a short name: paths of sockets are below it
        # Ray keeps the address of the newest cluster below RAY_TMPDIR, in a folder that it makes only where no `temp_dir` is given.
        Path(folder, "ray").mkdir()
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, __file__, str(port), folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True,
        )  # fmt: skip
        cluster = cls(f"http://127.0.0.1:{port}", process)
        try:
            cluster._expect("ready")
            yield cluster
        finally:
            process.communicate("quit\n")
            shutil.rmtree(folder, ignore_errors=True)

    def kill_second_node(self) -> None:
        self._tell("kill")

    def add_second_node(self) -> None:
        self._tell("add")

    def _tell(self, what: str) -> None:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        self._expect(what)

    def _expect(self, answer: str) -> None:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if line.strip() == answer:
                return
            assert line, f"the Ray cluster has ended with {self.process.wait()}"


def serve(port: int, folder: str) -> None:
    """Start the cluster, and do what stdin says."""
    from ray.cluster_utils import Cluster

    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": MEMORY_BYTES, "temp_dir": folder, **dashboard},
    )
    second = _add_node(cluster)
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "quit\n":
            break
        if line == "kill\n":
            cluster.remove_node(second, allow_graceful=False)
        elif line == "add\n":
            second = _add_node(cluster)
        print(line, end="", flush=True)
    cluster.shutdown()


def _add_node(cluster):
    return cluster.add_node(num_cpus=2, object_store_memory=MEMORY_BYTES, resources={"second": 1})


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
