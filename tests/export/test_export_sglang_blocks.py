"""SGLang's own models load exported block drafts, and propose the same tokens with the distributions of our readers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from block_questions import CONTEXTS, Question, export_with_questions
from export_toys import Toys
from judge_process import PeerJudge
from safetensors.torch import load_file, save_file

from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import load_format
from draftworks.export.gates import check_export, open_export
from draftworks.export.readers.reader import ExportReader, TargetTensors

pytestmark = pytest.mark.sglang

TEMPERATURE = 0.7
FORMATS = {"dspark": "zlab_dspark", "dflash2": "zlab_dflash2", "lilicorr": "sglang_lilicorr"}
DSPARK: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "confidence_with_markov": False},
    "rnn": {"markov_head_type": "rnn"},
    "window": {"sliding_window": 4, "sliding_layers": [1]},
}
DFLASH2: dict[str, dict[str, Any]] = {
    "odd block": {"block_size": 7, "conv_kernel_size": 3},
    "short block": {"block_size": 4, "sliding_window": 4, "sliding_layers": [1], "selector_top_k": 8},
}
LILICORR: dict[str, dict[str, Any]] = {
    "narrow": {"lattice_size": 6, "factor_dim": 5, "candidate_topk": 8, "block_size": 6},
    "wide": {"candidate_topk": 4, "logit_scale": 3.0, "lattice_layers": 1, "vector_eps": 1e-3, "sliding_window": 4},
    "convolved": {"conv_kernel_size": 3, "conv_group_size": 4, "block_size": 7},
}
STRATEGIES = {
    **dict.fromkeys(DSPARK, "dspark"),
    **dict.fromkeys(DFLASH2, "dflash2"),
    **dict.fromkeys(LILICORR, "lilicorr"),
}
SILENT = "markov_head.markov_w2.weight"
"""The tensor that is missing in the folder `silent`."""


@dataclass(frozen=True)
class Answers:
    """Of every draft, by its name: the questions, and the judge's answers."""

    toys: Toys
    ours: dict[str, list[Question]]
    theirs: dict[str, dict[str, Any]]

    def open(self, name: str) -> ExportReader:
        parts = self.toys.strategy(STRATEGIES[name]).target
        target = TargetTensors(parts.embedding.float(), parts.head.float())
        return open_export(FORMATS[STRATEGIES[name]], self.toys.folder / name, target, torch.float32)


def write_silent_copy(source: Path, folder: Path) -> None:
    """Write a copy without the tensor `SILENT`, with the same questions."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    del tensors[SILENT]
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(source.with_suffix(".safetensors"), folder.with_suffix(".safetensors"))


@pytest.fixture(scope="module")
def answers(sglang_judge: PeerJudge, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    toys, ours, theirs = Toys.make(tmp_path_factory.mktemp("sglang")), {}, {}
    for strategy, drafts in (("dspark", DSPARK), ("dflash2", DFLASH2), ("lilicorr", LILICORR)):
        sizes = {"block_size": 6} if strategy == "dspark" else {}
        for name, options in drafts.items():
            ours[name] = export_with_questions(
                toys, toys.strategy(strategy, **sizes | options), name, FORMATS[strategy]
            )
        names = [*drafts]
        if strategy == "dspark":
            write_silent_copy(toys.folder / "vanilla", toys.folder / "silent")
            names.append("silent")
        theirs |= zip(names, sglang_judge.ask(strategy, [toys.folder / name for name in names]), strict=True)
    return Answers(toys, ours, theirs)


@pytest.mark.parametrize("name", STRATEGIES)
def test_sglang_proposes_the_tokens_that_the_draft_proposes(answers: Answers, name: str):
    ours, theirs = answers.ours[name], answers.theirs[name]
    assert theirs["unset"] == []
    assert theirs["tokens"] == [question.tokens for question in ours]
    assert len({tuple(question.tokens) for question in ours}) > len(CONTEXTS) / 2


@pytest.mark.parametrize("name", DSPARK)
def test_sglang_is_as_confident_as_the_reader_of_the_files(answers: Answers, name: str):
    reader = answers.open(name)
    ours = torch.tensor(
        [
            reader.confidence(question.features, question.known, torch.tensor(question.tokens)).sigmoid().tolist()
            for question in answers.ours[name]
        ]
    )
    torch.testing.assert_close(torch.tensor(answers.theirs[name]["confidence"]), ours, rtol=0, atol=1e-5)
    assert float(ours.std()) > 0.01


@pytest.mark.parametrize("name", DFLASH2)
def test_sglang_draws_from_the_distributions_of_the_reader_of_the_files(answers: Answers, name: str):
    """Along the path that it drew, over the candidates alone."""
    reader, theirs = answers.open(name), answers.theirs[name]
    for question, drawn, q in zip(answers.ours[name], theirs["drawn"], theirs["q"], strict=True):
        logits = reader.log_probabilities(question.features, question.known, torch.tensor(drawn))
        torch.testing.assert_close(torch.tensor(q), (logits / TEMPERATURE).softmax(-1).float(), rtol=0, atol=3e-5)


def test_the_heads_decide_what_is_proposed(answers: Answers):
    """Otherwise equal results would not show that the heads were read."""
    said = [tuple(tuple(question.tokens) for question in answers.ours[name]) for name in DSPARK]
    assert len(set(said)) == len(said)


def test_sglang_is_silent_about_a_missing_part_of_the_markov_head_and_a_gate_is_not(answers: Answers):
    assert answers.theirs["silent"]["unset"] == [SILENT]
    draft = CanonicalDraft.load(answers.toys.folder / "draft-vanilla", answers.toys.target)
    silent, export_format = answers.toys.folder / "silent", load_format("dspark", "zlab_dspark")
    gates = check_export(silent, export_format, draft, draft.build_strategy(), torch.float32)
    assert not {gate.name: gate.passed for gate in gates}["key_set"]
