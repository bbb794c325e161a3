"""Runs the real speculators library, in its own environment, on exported folders."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "speculators_logits.py"


@dataclass(frozen=True)
class Question:
    """Inputs of a proposal: features (n, taps · H), next_tokens (n,), and the tokens drawn (k,)."""

    features: Tensor
    next_tokens: Tensor
    drawn: Tensor


@dataclass(frozen=True)
class Case:
    """A folder to load and, with a question, to compute logits with; or to be saved anew by the library."""

    name: str
    folder: Path
    question: Question | None = None
    attention: str = "eager"
    saved: Path | None = None


@dataclass(frozen=True)
class Findings:
    """See `Verdict` in tools/speculators_logits.py. Where there was a question and no error: `logits` (k, V_d), and
    `confidence` (k,) of a draft with such a head, and DFlash 2's `losses` (2,)."""

    error: str | None
    missing: list[str]
    extra: list[str]
    unequal: list[str]
    logits: Tensor | None = None
    confidence: Tensor | None = None
    losses: Tensor | None = None

    @property
    def loads(self) -> bool:
        return self.error is None

    @property
    def faithful(self) -> bool:
        """Whether it holds exactly the file's tensors, unchanged."""
        return self.loads and not (self.missing or self.extra or self.unequal)


def judge(python: Path, cases: Sequence[Case], work: Path) -> dict[str, Findings]:
    """Returns the findings by name of the case."""
    request, answer = work / "request.json", work / "answer.json"
    request.write_text(json.dumps([_request(case, work) for case in cases]))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), str(SCRIPT), str(request), str(answer)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    verdicts = json.loads(answer.read_text())
    return {name: Findings(**verdict, **_said(work, name)) for name, verdict in verdicts.items()}


def _request(case: Case, work: Path) -> dict[str, str | None]:
    inputs = logits = None
    if case.question is not None:
        inputs, logits = str(work / f"{case.name}.inputs"), str(work / f"{case.name}.logits")
        save_file(dict(vars(case.question)), inputs)
    return {
        "name": case.name,
        "folder": str(case.folder),
        "attention": case.attention,
        "inputs": inputs,
        "logits": logits,
        "saved": None if case.saved is None else str(case.saved),
    }


def _said(work: Path, name: str) -> dict[str, Tensor]:
    path = work / f"{name}.logits"
    return load_file(path) if path.exists() else {}
