"""A separate Dagster process that launches a hanging worker, for tests that interrupt or kill it."""

import os
import sys

import dagster as dg

from resources.local_launcher import LocalLauncher
from resources.torch_job import TorchJob


@dg.asset
def draft(context: dg.AssetExecutionContext, launcher: LocalLauncher) -> None:
    task, marker, procs = sys.argv[1], sys.argv[2], int(sys.argv[5])
    paths = {"PYTHONPATH": os.path.dirname(__file__)}
    job = TorchJob("launcher_worker", (task, marker), procs_per_node=procs, env=paths)
    launcher.run(context, job)


if __name__ == "__main__":
    launcher = LocalLauncher(workdir=sys.argv[3], grace_s=float(sys.argv[4]))
    dg.materialize([draft], resources={"launcher": launcher})
