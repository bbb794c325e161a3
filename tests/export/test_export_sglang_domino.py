"""SGLang's own code reads exported Domino drafts and proposes the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export_toys import HIDDEN, VOCAB, Toys
from judge_process import PeerJudge
from safetensors.torch import save_file

from draftworks.export.exporting import export_draft
from draftworks.strategies.dflash.model import BlockStates


def exported(toys: Toys, shift_label: bool) -> list[list[int]]:
    """Exports a draft with a question beside it, and returns what it proposes itself."""
    name, generator = f"shift-{shift_label}", torch.Generator().manual_seed(5)
    draft = toys.draft("domino", name=f"draft-{name}", block_size=6, shift_label=shift_label)
    export_draft(draft, "zlab_domino", toys.folder / name, "float32")
    strategy = draft.build_strategy()
    states = torch.randn(50, 6, HIDDEN, generator=generator)
    anchors = torch.randint(VOCAB, (50,), generator=generator)
    with torch.no_grad():
        rows = strategy.model.backbone.norm(states)
    target = {"embedding": draft.parts.embedding.float(), "head": draft.parts.head.float()}
    save_file({"rows": rows, "anchors": anchors, **target}, toys.folder / f"{name}.safetensors")
    blocks = BlockStates(states, anchors, states[:, 0])
    return strategy.model.decode(blocks, strategy.draft_tokens, lambda logits: logits.argmax(-1)).tolist()


@pytest.mark.sglang
def test_sglang_rolls_out_the_tokens_that_the_draft_proposes(sglang_judge: PeerJudge, tmp_path: Path):
    toys = Toys.make(tmp_path)
    ours = [exported(toys, shift_label) for shift_label in (True, False)]
    assert sglang_judge.ask("domino", [tmp_path / "shift-True", tmp_path / "shift-False"]) == ours
    assert all(len(set(map(tuple, said))) > 20 for said in ours)
