"""The embedded target in float64, prompts, its greedy answers, their features, and a draft that has learned a little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from strategy_cases import find_cases
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from draftworks.capture.engines.hf import HFTargetEngine
from draftworks.config.decoding import GREEDY
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.drafts.target_parts import TargetParts
from draftworks.evaluation.ladder.decoding import DecodingLimits, decode
from draftworks.evaluation.ladder.loop import DecodingLoop, Prompt
from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.features.contracts import TrainBatch
from draftworks.storage.identity import EngineIdentity, LayerTap

TTT = 4
TAPS = (LayerTap(2), LayerTap(4), LayerTap(5))
ANCHORS, SERVED = 8, 400
"""Blocks of a sample that one step learns from: many short steps teach more in the same time than few long ones; tokens of
a reduced vocabulary."""
MakeDraft = Callable[[TargetParts, list["Sample"]], DraftStrategy]


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's greedy answer to it, with the features of both."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    features: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        ids = torch.tensor([*self.prompt, *self.answer])
        mask = torch.arange(len(ids)) >= len(self.prompt)
        return {"input_ids": ids, "loss_mask": mask, **self.features}


@dataclass(frozen=True)
class Ladder:
    """Everything that rungs 3 and 4 need, in one precision."""

    model: PreTrainedModel
    strategy: DraftStrategy
    samples: list[Sample]
    limits: DecodingLimits

    def batch(self, samples: list[Sample]) -> TrainBatch:
        return self.strategy.collate([s.tensors() for s in samples], [s.name for s in samples])


@dataclass(frozen=True)
class Answers:
    """A target with its answers to some prompts: what ladders of several drafts share."""

    model: PreTrainedModel
    samples: list[Sample]
    limits: DecodingLimits


def greedy_answers(folder: Path, prompts: int, max_new_tokens: int, model: PreTrainedModel | None = None) -> Answers:
    """Of the embedded target in `folder`, or of a model with its tokenizer."""
    if model is None:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return _answer(folder, _rows(folder, prompts), max_new_tokens, model)


def short_answers(folder: Path) -> Answers:
    """Of the embedded target in `folder`, three that it ends itself, after 20 to 29 tokens."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    answers = _answer(folder, _rows(folder, 24)[14:17], 40, model)
    assert sorted(len(sample.answer) for sample in answers.samples) == [20, 22, 29]
    return answers


def _answer(folder: Path, rows: list[dict], max_new_tokens: int, model: PreTrainedModel) -> Answers:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    limits = DecodingLimits(max_new_tokens, (tokenizer.eos_token_id,))
    return Answers(model, [_answered(model, tokenizer, row, limits) for row in rows], limits)


def build_ladder(answers: Answers, target: TargetFiles, steps: int, make: MakeDraft) -> Ladder:
    strategy = make(TargetParts.load(target), answers.samples)
    ladder = Ladder(answers.model, strategy, answers.samples, answers.limits)
    _teach(ladder, steps)
    strategy.model.double()
    return ladder


def _rows(folder: Path, count: int) -> list[dict]:
    rows = pq.read_table(folder / "corpus.parquet").to_pylist()
    return [row for row in rows[:: len(rows) // count] if len(row["messages"][0]["content"]) < 120][:count]


def _answered(model: PreTrainedModel, tokenizer, row: dict, limits: DecodingLimits) -> Sample:
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    answer = decode(model, prompt, limits).tokens
    engine = HFTargetEngine(model, EngineIdentity("hf"), context=512)
    return Sample(row["id"], tuple(prompt), answer, engine.capture([[*prompt, *answer]], TAPS)[0])


def make_draft(name: str, parts: TargetParts, samples: list[Sample], **options: Any) -> DraftStrategy:
    """Return a draft over taps; `options` come before those of the toy."""
    spec = resolve_strategy(name)
    sizes: dict[str, Any] = {"layer_ids": [tap.hf_index for tap in TAPS], "num_layers": 2, "draft_vocab_size": SERVED}
    sizes |= {"ttt_length": TTT, "num_depths": TTT, "block_size": TTT + 1, "num_anchors": ANCHORS}
    known = {key: value for key, value in sizes.items() if key in spec.options.model_fields}
    chosen = spec.options(**known | find_cases()[name].learning | options)
    counts = np.bincount([token for sample in samples for token in sample.answer], minlength=parts.vocab_size)
    vocab = build_vocab_mapping(counts, SERVED) if spec.uses_vocab_mapping else None
    return spec.load_factory()(chosen, parts, vocab, 1)


def require_walk_equals_loop(ladder: Ladder) -> list[PromptAcceptance]:
    """Require it count for count, but for near ties, and return what the loop counted: the gated delta rule of transformers
    is fp32 whatever the model's dtype is."""
    names = {sample.name for sample in ladder.samples}
    walked = replay_all(ladder.strategy, [ladder.batch(ladder.samples)], TTT, torch.device("cpu"), names)
    loop = DecodingLoop(ladder.model, ladder.strategy, TAPS, ladder.limits, TTT, seed=0)
    prompts = [Prompt(sample.name, sample.prompt) for sample in ladder.samples]
    found = loop.measure(prompts, GREEDY, {one.walk.sample_id: one.first_answer for one in walked})
    assert all(one.gap is not None and one.gap < 1e-4 for one in found.differences)
    tied = {one.sample_id for one in found.differences}
    assert len(tied) < 2
    walks = {one.walk.sample_id: one.walk for one in walked}
    assert all(walks[one.sample_id] == one for one in found.prompts if one.sample_id not in tied)
    assert sum(one.accepted for one in found.prompts) > 5
    return list(found.prompts)


def _teach(ladder: Ladder, steps: int) -> None:
    model = ladder.strategy.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = ladder.batch(ladder.samples)
    for step in range(steps):
        output = ladder.strategy.forward_loss(batch, StepContext(step, steps, training=True))
        (output.loss_sum / output.loss_weight).backward()
        optimizer.step()
        optimizer.zero_grad()
