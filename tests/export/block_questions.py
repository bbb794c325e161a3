"""Block drafts with questions beside their exports, which servers' own models answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from export_toys import HIDDEN, VOCAB, Toys
from safetensors.torch import save_file
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy
from draftworks.export.conventions import DRAFT_FOLDER
from draftworks.export.exporting import export_draft

CONTEXTS = (1, 2, 3, 5, 8, 9, 14, 20, 21, 30)
"""Their lengths, one for each question."""


@dataclass(frozen=True)
class Question:
    """A context that a draft was asked about, and what it proposed itself."""

    features: dict[str, Tensor]
    known: Tensor
    tokens: list[int]


def move_weights(strategy: DraftStrategy, generator: torch.Generator) -> None:
    """So that neither the mask token nor one token alone decides the proposal."""
    with torch.no_grad():
        for name, weight in strategy.model.named_parameters():
            if strategy.name != "dspark" and "norm" not in name:
                weight.mul_(2).add_(0.1 * torch.randn(weight.shape, generator=generator))
            elif "norm" not in name and not name.startswith("confidence_head"):
                weight.mul_(4)


def export_with_questions(toys: Toys, strategy: DraftStrategy, name: str, export_format: str) -> list[Question]:
    """Export a draft as folder `name`, and write `name.safetensors` and `name.txt` beside it.

    The former has `embedding`, `head`, and for every question i `features.{i}` (n, taps · H), `anchor.{i}` (1,) and
    `uniforms.{i}` (places,); the latter the last command, which is vLLM's if there is one.
    """
    generator = torch.Generator().manual_seed(6)
    move_weights(strategy, generator)
    draft = toys.saved(strategy, f"draft-{name}")
    made = export_draft(draft, export_format, toys.folder / name, "float32")
    assert made.passed
    [*_, command] = [line.replace(DRAFT_FOLDER, str(toys.folder / name)) for line in made.commands.values()]
    (toys.folder / f"{name}.txt").write_text(command)
    saved = draft.build_strategy()
    asked = {"embedding": draft.parts.embedding.float(), "head": draft.parts.head.float()}
    questions = []
    for number, rows in enumerate(CONTEXTS):
        features = {tap.name: torch.randn(rows, HIDDEN, generator=generator) for tap in draft.taps}
        known = torch.randint(VOCAB, (rows,), generator=generator)
        asked |= {f"features.{number}": torch.cat(list(features.values()), dim=-1), f"anchor.{number}": known[-1:]}
        asked[f"uniforms.{number}"] = torch.rand(saved.draft_tokens, generator=generator)
        drafter = saved.drafter()
        drafter.extend(features, known)
        proposed = drafter.propose(saved.draft_tokens, temperature=0.0, generator=None).tokens.tolist()
        questions.append(Question(features, known, proposed))
    save_file(asked, toys.folder / f"{name}.safetensors")
    return questions
