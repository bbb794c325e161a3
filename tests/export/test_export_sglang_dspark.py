"""SGLang's own model loads exported DSpark drafts, and its sampler proposes the same tokens."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from export_toys import HIDDEN, VOCAB, Toys
from safetensors.torch import load_file, save_file
from sglang_judge_process import SGLangJudge

from draftworks.drafts.strategy import DraftStrategy
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import load_format
from draftworks.export.exporting import export_draft
from draftworks.export.gates import check_export, open_export
from draftworks.export.readers.reader import TargetTensors

pytestmark = pytest.mark.sglang

CONTEXTS = (1, 2, 5, 9, 14, 20)
DRAFTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "confidence_with_markov": False},
    "rnn": {"markov_head_type": "rnn"},
    "window": {"sliding_window": 4, "sliding_layers": [1]},
}
SILENT = "markov_head.markov_w2.weight"
"""The tensor that is missing in the folder `silent`."""


@dataclass(frozen=True)
class Proposed:
    """For every context: tokens by our drafter, and their confidences by our reader of the files."""

    tokens: list[list[int]]
    confidence: list[list[float]]


@dataclass(frozen=True)
class Answers:
    """Results by folder; `theirs` is the judge's output."""

    toys: Toys
    ours: dict[str, Proposed]
    theirs: dict[str, dict[str, Any]]


def scale_weights(strategy: DraftStrategy) -> DraftStrategy:
    """Scale the weights so that neither the mask token nor one token alone decides the proposal."""
    with torch.no_grad():
        for name, weight in strategy.model.named_parameters():
            if "norm" not in name and not name.startswith("confidence_head"):
                weight.mul_(4)
    return strategy


def exported(toys: Toys, name: str, options: dict[str, Any]) -> Proposed:
    """Exports a draft with questions beside it, and returns what it proposes itself."""
    draft = toys.saved(scale_weights(toys.strategy("dspark", **{"block_size": 6, **options})), f"draft-{name}")
    assert export_draft(draft, "zlab_dspark", toys.folder / name, "float32").passed
    strategy, generator = draft.build_strategy(), torch.Generator().manual_seed(5)
    target = TargetTensors(draft.parts.embedding.float(), draft.parts.head.float())
    reader = open_export("zlab_dspark", toys.folder / name, target, torch.float32)
    asked, tokens, confidence = {"embedding": target.embedding, "head": target.head}, [], []
    for question, rows in enumerate(CONTEXTS):
        features = {tap.name: torch.randn(rows, HIDDEN, generator=generator) for tap in draft.taps}
        known = torch.randint(VOCAB, (rows,), generator=generator)
        asked |= {f"features.{question}": torch.cat(list(features.values()), dim=-1), f"anchor.{question}": known[-1:]}
        drafter = strategy.drafter()
        drafter.extend(features, known)
        said = drafter.propose(strategy.draft_tokens, temperature=0.0, generator=None).tokens
        tokens.append(said.tolist())
        confidence.append(reader.confidence(features, known, said).sigmoid().tolist())
    save_file(asked, toys.folder / f"{name}.safetensors")
    return Proposed(tokens, confidence)


def write_silent_copy(source: Path, folder: Path) -> None:
    """Write a copy without the tensor `SILENT`, with the same questions."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    del tensors[SILENT]
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(source.with_suffix(".safetensors"), folder.with_suffix(".safetensors"))


@pytest.fixture(scope="module")
def answers(sglang_judge: SGLangJudge, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    toys = Toys.make(tmp_path_factory.mktemp("sglang"))
    ours = {name: exported(toys, name, options) for name, options in DRAFTS.items()}
    write_silent_copy(toys.folder / "vanilla", toys.folder / "silent")
    names = [*DRAFTS, "silent"]
    theirs = sglang_judge.ask("dspark", [toys.folder / name for name in names])
    return Answers(toys, ours, dict(zip(names, theirs, strict=True)))


@pytest.mark.parametrize("name", DRAFTS)
def test_sglang_proposes_the_tokens_that_the_draft_proposes(answers: Answers, name: str):
    assert answers.theirs[name]["unset"] == []
    assert answers.theirs[name]["tokens"] == answers.ours[name].tokens
    assert len(set(map(tuple, answers.ours[name].tokens))) > len(CONTEXTS) / 2


@pytest.mark.parametrize("name", DRAFTS)
def test_sglang_is_as_confident_as_the_reader_of_the_files(answers: Answers, name: str):
    ours, theirs = (
        torch.tensor(found) for found in (answers.ours[name].confidence, answers.theirs[name]["confidence"])
    )
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert float(ours.std()) > 0.01


def test_the_heads_decide_what_is_proposed(answers: Answers):
    """Otherwise equal results would not show that the heads were read."""
    said = [tuple(map(tuple, answers.ours[name].tokens)) for name in DRAFTS]
    assert len(set(said)) == len(said)


def test_sglang_is_silent_about_a_missing_part_of_the_markov_head_and_a_gate_is_not(answers: Answers):
    assert answers.theirs["silent"]["unset"] == [SILENT]
    draft = CanonicalDraft.load(answers.toys.folder / "draft-vanilla", answers.toys.target)
    silent, export_format = answers.toys.folder / "silent", load_format("dspark", "zlab_dspark")
    gates = check_export(silent, export_format, draft, draft.build_strategy(), torch.float32)
    assert not {gate.name: gate.passed for gate in gates}["key_set"]
