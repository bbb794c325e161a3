"""A capture in a process of its own, to be killed: arguments are a run file and a seed of rows."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from capture_toys import random_rows

from draftworks.capture.engine import load_engine
from draftworks.capture.session import capture_missing
from draftworks.config.run_files import CaptureRun

if __name__ == "__main__":
    torch.set_num_threads(1)
    run = CaptureRun.load(Path(sys.argv[1]))
    tokens = random_rows(int(sys.argv[2]), seed=1, longest=40)
    print("started", flush=True)
    capture_missing(
        run,
        lambda: load_engine(run.target, run.capture, torch.device("cpu")),
        tokens,
        progress=lambda at: print(at.done, flush=True),
    )
