"""What Draftworks adds to the start of a Slurm job, on a real Slurm of two nodes on this machine.

    make .cluster/ready && .venv/bin/python benchmarks/slurm_start.py [--repeats 5]

Three times, by the clocks of one machine, medians over the repeats:

    submit   from the call that creates a job to the id that sbatch gives it (script, sbatch)
    script   from the begin of the batch script to the begin of torchrun on every node
    notice   from the end of the job to the launcher's knowledge of it

What Slurm itself takes between (queue, scheduler, srun) is shown as `slurm`, and is not ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "toys")]

from draftworks.config.launchers import SlurmLauncherSpec  # noqa: E402
from resources.scheduler import JobRequest  # noqa: E402
from resources.slurm_scheduler import SlurmScheduler  # noqa: E402
from resources.torch_job import RunDir, TorchJob  # noqa: E402


def measure(commands: str, folder: Path, nodes: int) -> dict[str, float]:
    """Return the seconds of one job, whose torchrun is a program that only notes the time."""
    clock = folder / "clock.sh"
    clock.write_text(f'#!/bin/sh\ndate +%s.%N >>"{folder}/torchrun"\n')
    clock.chmod(0o755)
    note_begin = f'date +%s.%N >>"{folder}/setup"'
    spec = SlurmLauncherSpec(commands=commands, setup=[note_begin])
    scheduler = SlurmScheduler(spec)
    job = TorchJob("nothing", nodes=nodes, python=clock)
    request = JobRequest("dw-benchmark", job, {}, RunDir.create(folder / "runs", "benchmark", 0), folder / "job.json")
    created = time.time()
    id = scheduler.create(request)
    submitted = time.time()
    while not (seen := scheduler.look(id)) or not seen.state.is_final:
        time.sleep(0.05)
    known = time.time()
    begun, ended = ([float(line) for line in (folder / name).read_text().split()] for name in ("setup", "torchrun"))
    script = Path(request.files.path / "nodes")
    stamps = [path.stat().st_mtime for path in script.glob("*.exit")]
    (folder / "setup").unlink()
    (folder / "torchrun").unlink()
    return {
        "submit": submitted - created,
        "slurm": min(begun) - submitted,
        "script": max(ended) - min(begun),
        "notice": known - max(stamps),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args(arguments).repeats
    slurm_cluster = import_module("slurm_cluster").slurm_cluster
    with slurm_cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        for nodes in (1, 2):
            found = [measure(str(cluster.commands), Path(folder), nodes) for _ in range(repeats)]
            figures = {name: statistics.median(each[name] for each in found) for name in found[0]}
            ours = sum(figures[name] for name in ("submit", "script", "notice"))
            print(f"{nodes} node(s): " + " ".join(f"{name}={value:.2f}s" for name, value in figures.items()), end="")
            print(f"; ours: {ours:.2f} s", flush=True)


if __name__ == "__main__":
    main()
