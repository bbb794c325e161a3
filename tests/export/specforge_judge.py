"""Runs the real SpecForge, in its own environment, on drafts and batches."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "specforge_judge.py"


@dataclass(frozen=True)
class SpecForgeCase:
    """A draft's folder, keywords of SpecForge's training model, and the tensors of its batches.

    Attributes:
        saved: where SpecForge shall write the draft anew.
    """

    name: str
    strategy: str
    folder: Path
    model: Mapping[str, Any]
    batches: Sequence[Mapping[str, Tensor]]
    saved: Path | None = None


@dataclass(frozen=True)
class SpecForgeAnswer:
    """SpecForge's losses and sums by batch, and its Evaluator's figures; or its error."""

    losses: list[float] = field(default_factory=list)
    sums: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def ask_specforge(
    python: Path, cases: Sequence[SpecForgeCase], embedding: Tensor, head: Tensor, work: Path
) -> dict[str, SpecForgeAnswer]:
    """Returns the answers by name of the case; one process computes all of them."""
    requests = []
    for case in cases:
        tensors = {"embedding": embedding.clone(), "head": head.clone()}
        for number, batch in enumerate(case.batches):
            tensors |= {f"{number}.{name}": tensor.contiguous() for name, tensor in batch.items()}
        save_file(tensors, work / f"{case.name}.inputs")
        requests.append(
            {
                "name": case.name,
                "strategy": case.strategy,
                "folder": str(case.folder),
                "saved": None if case.saved is None else str(case.saved),
                "inputs": str(work / f"{case.name}.inputs"),
                "answer": str(work / f"{case.name}.json"),
                "model": dict(case.model),
                "batches": len(case.batches),
            }
        )
    (work / "request.json").write_text(json.dumps(requests))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(python), str(SCRIPT), str(work / "request.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {case.name: SpecForgeAnswer(**json.loads((work / f"{case.name}.json").read_text())) for case in cases}
