"""What a program does not need it does not import: seconds of each start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from draft_run_files import TRAINING, RunFiles
from model_families import DRAFT_OPTIONS

from draftworks.config.run_files import TargetFiles

SEVERAL_RANKS = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
COMPILERS = ["sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch._inductor"]
ELSEWHERE = ["transformers", "pandas", "dagster", "httpx"]
STRATEGIES = ["eagle3", "peagle", "domino", "lilicorr"]
"""With every kind of layer that drafts have: unrolled and masked attention, an embedding, a GRU, a lattice."""
TRAIN = """
import json, sys
from pathlib import Path
from draftworks.config.run_files import TrainRun
from draftworks.programs.program import ProgramContext
from draftworks.programs.train import train

for name in sys.argv[2:]:
    train(TrainRun.load(Path(name)), ProgramContext())
    print("imported", name, *(module for module in json.loads(sys.argv[1]) if module in sys.modules))
from draftworks.data.chat import ChatTokenizer

ChatTokenizer.load(TrainRun.load(Path(name)).target)
print("imported tokenizer", *(module for module in json.loads(sys.argv[1]) if module in sys.modules))
"""


def test_a_training_of_one_rank_imports_neither_what_several_need_nor_compilers(
    tmp_path: Path, tiny_target: TargetFiles
) -> None:
    """From its run file to checkpoints, draft and picture; and at last a tokenizer, which takes no class of a model."""
    files, training = RunFiles.make(tmp_path, tiny_target), TRAINING.model_copy(update={"max_steps": 2})
    paths = []
    for name in STRATEGIES:
        options = {**DRAFT_OPTIONS[name], "layer_ids": [2, 4, 5]}
        run = files.train_run(strategy=name, options=options, training=training, out=tmp_path / name)
        paths.append(str(run.save(tmp_path / f"{name}.yaml")))
    names = json.dumps(SEVERAL_RANKS + COMPILERS + ELSEWHERE)
    done = subprocess.run([sys.executable, "-c", TRAIN, names, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert found == [*(f"imported {path}" for path in paths), "imported tokenizer transformers"]
    assert all(any((tmp_path / name / "checkpoints").iterdir()) for name in STRATEGIES)
