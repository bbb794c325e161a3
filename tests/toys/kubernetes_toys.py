"""A fake cluster with a launcher's scheduler on it, and jobs whose torchrun is a small shell script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_kubelet import FakeCluster
from fake_kubernetes import write_kubeconfig
from waiting import wait_until

from draftworks.config.launchers import KubernetesLauncherSpec
from resources.kubernetes_scheduler import KubernetesScheduler, make_scheduler
from resources.scheduler import JobRequest, SeenJob
from resources.torch_job import JobState, RunDir, TorchJob

_TORCHRUN = """\
#!/bin/sh
for task; do :; done
echo "${DRAFTWORKS_COPY:+copy }${DRAFTWORKS_COPY:-node ${JOB_COMPLETION_INDEX:-0}} does $task"
mkdir -p "$PET_LOG_DIR" && echo "$task" >"$PET_LOG_DIR/task"
touch "$SIGNS/started$JOB_COMPLETION_INDEX"
case $task in
  fail) echo "no such option" >&2; exit 3 ;;
  wait|ignore)
    if [ "$task" = ignore ]; then trap '' TERM; else trap 'touch "$SIGNS/saved$JOB_COMPLETION_INDEX"; exit 1' TERM; fi
    until [ -e "$SIGNS/finish$JOB_COMPLETION_INDEX" ]; do sleep 0.05; done
    read -r code <"$SIGNS/finish$JOB_COMPLETION_INDEX"
    exit "$code" ;;
esac
"""
"""Does what its last argument says. The files in SIGNS say what it did, and end one that waits."""


class KubernetesBench:
    """A scheduler on a fake cluster whose volume `shared` is this machine's folder `var`."""

    def __init__(self, cluster: FakeCluster, address: str, folder: Path, **settings: Any) -> None:
        self.cluster = cluster
        self.address = address
        self.var = folder / "var"
        self.signs = folder / "signs"
        self.schedulers: list[KubernetesScheduler] = []
        self.settings = {
            "image": "registry.example/draftworks:1",
            "kubeconfig": str(write_kubeconfig(folder / "kubeconfig", address)),
            "volumes": {str(self.var): "shared"},
            "python": str(self._write_torchrun(folder / "torchrun")),
            "grace_s": 5,
            **settings,
        }

    def make_scheduler(self, **settings: Any) -> KubernetesScheduler:
        self.schedulers.append(make_scheduler(self.make_spec(**settings)))
        return self.schedulers[-1]

    def make_spec(self, **settings: Any) -> KubernetesLauncherSpec:
        return KubernetesLauncherSpec(**{**self.settings, **settings})

    def request(
        self, task: str = "end", name: str = "dw-0123456789abcdef", nodes: int = 1, copies: int = 1, **rest: Any
    ) -> JobRequest:
        files = RunDir.create(self.var / "runs", "0123456789", 0)
        env = {"SIGNS": str(self.signs), "TORCHELASTIC_ERROR_FILE": str(files.error)}
        job = TorchJob("toy", (task,), nodes=nodes, copies=copies)
        return JobRequest(name, job, env, files, claim=self.var / "result.partial" / "job.json", **rest)

    def finish(self, node: int = 0, code: int = 0) -> None:
        """Let a node that waits end with an exit code."""
        partial = self.signs / f"finish{node}.partial"
        partial.write_text(f"{code}\n")
        partial.rename(self.signs / f"finish{node}")

    def wait_for_start(self, *nodes: int) -> None:
        wait_until(lambda: all((self.signs / f"started{node}").exists() for node in nodes or (0,)))

    def wait_for_end(self, scheduler: KubernetesScheduler, id: str) -> SeenJob:
        """Look until the job has ended."""
        seen: list[SeenJob] = []

        def is_over() -> bool:
            looked = scheduler.look(id)
            assert looked is not None, "the job is unknown"
            seen[:] = [looked]
            return looked.state.is_final

        wait_until(is_over, lambda: f"the end of job {id}, last seen as {seen}")
        return seen[0]

    def wait_for(self, scheduler: KubernetesScheduler, id: str, state: JobState, words: str = "") -> SeenJob:
        """Look until the job is in a state, with a reason that has these words."""
        seen: list[SeenJob | None] = []

        def is_there() -> bool:
            seen[:] = [scheduler.look(id)]
            return seen[0] is not None and seen[0].state is state and words in seen[0].reason

        wait_until(is_there, lambda: f"job {id} {state} {words}, last seen as {seen}")
        assert seen[0] is not None
        return seen[0]

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.cluster.list_processes())
        assert not self.cluster.store.list("pods")
        assert not self.cluster.store.list("trainjobs")

    def _write_torchrun(self, path: Path) -> Path:
        path.write_text(_TORCHRUN)
        path.chmod(0o755)
        return path


@contextmanager
def kubernetes_bench(folder: Path, **settings: Any) -> Iterator[KubernetesBench]:
    for each in ("var", "signs", "pods"):
        (folder / each).mkdir()
    cluster = FakeCluster(folder / "pods")
    cluster.claims["shared"] = folder / "var"
    with cluster.running() as address:
        bench = KubernetesBench(cluster, address, folder, **settings)
        yield bench
        for scheduler in bench.schedulers:
            scheduler.close()
