"""SGLang's own model loads exported DFlash 2 drafts, and its convolutions and selector propose the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from export_toys import Toys
from sglang_judge_process import SGLangJudge
from sglang_questions import Question, export_with_questions

from draftworks.export.gates import open_export
from draftworks.export.readers.reader import TargetTensors

pytestmark = pytest.mark.sglang

CONTEXTS = (1, 2, 5, 9, 14, 20)
TEMPERATURE = 0.7
DRAFTS: dict[str, dict[str, Any]] = {
    "odd block": {"block_size": 7, "conv_kernel_size": 3},
    "window": {"block_size": 4, "sliding_window": 4, "sliding_layers": [1], "selector_top_k": 8},
}


@dataclass(frozen=True)
class Answers:
    """Of every draft: the questions, and the judge's answers."""

    toys: Toys
    ours: dict[str, list[Question]]
    theirs: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(sglang_judge: SGLangJudge, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    toys = Toys.make(tmp_path_factory.mktemp("sglang"))
    ours = {
        name: export_with_questions(toys, toys.strategy("dflash2", **options), "zlab_dflash2", name, CONTEXTS)
        for name, options in DRAFTS.items()
    }
    theirs = sglang_judge.ask("dflash2", [toys.folder / name for name in DRAFTS])
    return Answers(toys, ours, dict(zip(DRAFTS, theirs, strict=True)))


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
