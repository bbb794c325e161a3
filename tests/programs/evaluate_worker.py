"""One rank of an evaluation: `evaluate_worker.py RUN_FILE`. Prints how many targets this rank loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from draftworks.capture.engines import hf
from draftworks.config.run_files import EvaluateRun
from draftworks.programs.evaluate import evaluate
from draftworks.programs.program import ProgramContext


def main(run_file: Path) -> None:
    torch.set_num_threads(1)
    loaded, load = [], hf.load_hf_engine

    def watched(*arguments: Any) -> hf.HFTargetEngine:
        loaded.append(arguments)
        return load(*arguments)

    hf.load_hf_engine = watched
    context = ProgramContext.from_torchrun()
    evaluate(EvaluateRun.load(run_file), context)
    sys.stdout.write(json.dumps({"rank": context.rank, "loads": len(loaded)}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
