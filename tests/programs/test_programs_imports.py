"""What a program does not need it does not import: seconds of each start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from draft_run_files import RunFiles

from draftworks.config.run_files import TargetFiles

SEVERAL_RANKS = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
COMPILERS = ["sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch._inductor"]
ELSEWHERE = ["transformers", "pandas", "dagster", "httpx"]


def test_a_training_of_one_rank_imports_neither_what_several_need_nor_compilers(
    tmp_path: Path, tiny_target: TargetFiles
) -> None:
    """With checkpoints, from its first step to the draft."""
    path = RunFiles.make(tmp_path, tiny_target).train_run().save(tmp_path / "train.yaml")
    names = SEVERAL_RANKS + COMPILERS + ELSEWHERE
    code = (
        "import json, runpy, sys; sys.argv = ['train', sys.argv[1]]\n"
        "runpy.run_module('draftworks.programs.train', run_name='__main__')\n"
        f"print(json.dumps([name for name in {names} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert any((tmp_path / "draft" / "checkpoints").iterdir())
    assert json.loads(done.stdout.splitlines()[-1]) == []
