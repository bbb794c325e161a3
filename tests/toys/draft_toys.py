"""A small made-up target."""

from __future__ import annotations

import torch

from draftworks.drafts.target_parts import TargetParts

VOCAB, HIDDEN, DRAFT_VOCAB = 40, 16, 24


def small_target() -> TargetParts:
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    return TargetParts(
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        intermediate_size=20,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        num_layers=8,
        max_positions=64,
        embedding=embedding,
        head=head,
        rope={"rope_type": "default", "rope_theta": 100.0},
    )
