"""SGLang's own model loads exported DFlash 2 drafts, and its convolutions and selector propose the same tokens."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from export_toys import HIDDEN, VOCAB, Toys
from safetensors.torch import save_file
from torch import Tensor

from draftworks.export.exporting import export_draft
from draftworks.export.readers.reader import TargetTensors
from draftworks.export.same_logits import open_export

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).resolve().parents[2]
JUDGE = Path(__file__).with_name("sglang_dflash2_judge.py")
CONTEXTS = (1, 2, 5, 9, 14, 20)
TEMPERATURE = 0.7
DRAFTS: dict[str, dict[str, Any]] = {
    "odd block": {"block_size": 7, "conv_kernel_size": 3},
    "window": {"block_size": 4, "sliding_window": 4, "sliding_layers": [1], "selector_top_k": 8},
}


@dataclass(frozen=True)
class Question:
    """A context that a draft was asked about, and what it proposed itself."""

    features: dict[str, Tensor]
    known: Tensor
    tokens: list[int]


@dataclass(frozen=True)
class Answers:
    """Of every draft: the questions, and the judge's answers."""

    toys: Toys
    ours: dict[str, list[Question]]
    theirs: dict[str, dict[str, Any]]


def exported(toys: Toys, name: str, options: dict[str, Any]) -> list[Question]:
    """Exports a draft with questions beside it."""
    strategy = toys.strategy("dflash2", **options)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():  # so that neither the mask token nor one token alone decides the proposal
        for weight_name, weight in strategy.model.named_parameters():
            if "norm" not in weight_name:
                weight.mul_(2).add_(0.1 * torch.randn(weight.shape, generator=generator))
    draft = toys.saved(strategy, f"draft-{name}")
    assert export_draft(draft, "zlab_dflash2", toys.folder / name, "float32").passed
    strategy = draft.build_strategy()
    asked = {"embedding": draft.parts.embedding.float(), "head": draft.parts.head.float()}
    questions = []
    for number, rows in enumerate(CONTEXTS):
        features = {tap.name: torch.randn(rows, HIDDEN, generator=generator) for tap in draft.taps}
        known = torch.randint(VOCAB, (rows,), generator=generator)
        uniforms = torch.rand(strategy.draft_tokens, generator=generator)
        asked |= {f"features.{number}": torch.cat(list(features.values()), dim=-1), f"anchor.{number}": known[-1:]}
        asked[f"uniforms.{number}"] = uniforms
        drafter = strategy.drafter()
        drafter.extend(features, known)
        proposed = drafter.propose(strategy.draft_tokens, temperature=0.0, generator=None).tokens.tolist()
        questions.append(Question(features, known, proposed))
    save_file(asked, toys.folder / f"{name}.safetensors")
    return questions


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    toys = Toys.make(tmp_path_factory.mktemp("sglang"))
    ours = {name: exported(toys, name, options) for name, options in DRAFTS.items()}
    command = [ROOT / ".venv-sglang" / "bin" / "python", JUDGE, *(toys.folder / name for name in DRAFTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return Answers(toys, ours, dict(zip(DRAFTS, json.loads(done.stdout.splitlines()[-1]), strict=True)))


@pytest.mark.parametrize("name", DRAFTS)
def test_sglang_proposes_the_tokens_that_the_draft_proposes(answers: Answers, name: str):
    ours, theirs = answers.ours[name], answers.theirs[name]
    assert theirs["unset"] == []
    assert [answer["tokens"] for answer in theirs["answers"]] == [question.tokens for question in ours]
    assert len({tuple(question.tokens) for question in ours}) > len(CONTEXTS) / 2


@pytest.mark.parametrize("name", DRAFTS)
def test_sglang_draws_from_the_distributions_of_the_reader_of_the_files(answers: Answers, name: str):
    """Along the path that it drew, over the candidates alone."""
    parts = answers.toys.strategy("dflash2").target
    target = TargetTensors(parts.embedding.float(), parts.head.float())
    reader = open_export("zlab_dflash2", answers.toys.folder / name, target, torch.float32)
    for question, answer in zip(answers.ours[name], answers.theirs[name]["answers"], strict=True):
        logits = reader.log_probabilities(question.features, question.known, torch.tensor(answer["drawn"]))
        torch.testing.assert_close(
            torch.tensor(answer["q"]), (logits / TEMPERATURE).softmax(-1).float(), rtol=0, atol=3e-5
        )
