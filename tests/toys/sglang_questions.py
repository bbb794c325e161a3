"""Exports of block drafts with questions beside them, which SGLang's own model and the draft itself answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from export_toys import HIDDEN, VOCAB, Toys
from safetensors.torch import save_file
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy
from draftworks.export.exporting import export_draft


@dataclass(frozen=True)
class Question:
    """A context that a draft was asked about, and what it proposed itself."""

    features: dict[str, Tensor]
    known: Tensor
    tokens: list[int]


def export_with_questions(
    toys: Toys, strategy: DraftStrategy, export_format: str, name: str, contexts: tuple[int, ...]
) -> list[Question]:
    """Export a draft, moved away from its initial weights, as folder `name`, and write `name.safetensors` beside it.

    That has `embedding`, `head`, and for every question i `features.{i}` (n, taps · H), `anchor.{i}` (1,) and `uniforms.{i}`
    (places,).

    Args:
        contexts: their lengths, one for each question.
    """
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():  # so that neither the mask token nor one token alone decides the proposal
        for weight_name, weight in strategy.model.named_parameters():
            if "norm" not in weight_name:
                weight.mul_(2).add_(0.1 * torch.randn(weight.shape, generator=generator))
    draft = toys.saved(strategy, f"draft-{name}")
    assert export_draft(draft, export_format, toys.folder / name, "float32").passed
    saved = draft.build_strategy()
    asked = {"embedding": draft.parts.embedding.float(), "head": draft.parts.head.float()}
    questions = []
    for number, rows in enumerate(contexts):
        features = {tap.name: torch.randn(rows, HIDDEN, generator=generator) for tap in draft.taps}
        known = torch.randint(VOCAB, (rows,), generator=generator)
        uniforms = torch.rand(saved.draft_tokens, generator=generator)
        asked |= {f"features.{number}": torch.cat(list(features.values()), dim=-1), f"anchor.{number}": known[-1:]}
        asked[f"uniforms.{number}"] = uniforms
        drafter = saved.drafter()
        drafter.extend(features, known)
        proposed = drafter.propose(saved.draft_tokens, temperature=0.0, generator=None).tokens.tolist()
        questions.append(Question(features, known, proposed))
    save_file(asked, toys.folder / f"{name}.safetensors")
    return questions
