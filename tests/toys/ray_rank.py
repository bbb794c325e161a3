"""A rank for jobs on Ray, without torch: `speak`, `fail` (rank 1), or `save` in order when it is stopped."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from draftworks.distributed.stop_signals import Interrupted, end_with_parent, raise_on_stop
from draftworks.programs.failure import leave_error_file


def main(task: str, folder: Path) -> None:
    end_with_parent(20)
    raise_on_stop()
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    print(f"rank {rank} of {world}, {os.environ['SECRET']}", flush=True)
    (folder / f"began.{rank}.{world}").touch()
    if task == "fail" and rank == 1:
        leave_error_file(ValueError("rank 1 has had enough"))
        sys.exit(1)
    if task == "speak":
        return
    try:
        time.sleep(300)
    except Interrupted as interrupt:
        time.sleep(1)
        (folder / f"saved.{rank}").touch()
        leave_error_file(interrupt)
        sys.exit(128 + interrupt.signum)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
