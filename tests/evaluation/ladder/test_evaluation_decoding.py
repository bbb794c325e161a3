"""A target session gives the logits of a forward pass over the whole sequence, also after a rewind."""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from draftworks.evaluation.ladder.target_session import TargetSession

VOCABULARY, PROMPT, ANSWER, PROPOSED = 50, 10, 12, 3


@pytest.mark.parametrize("window", [4, 9, 14, 64])
def test_proposals_are_forgotten_also_beyond_a_sliding_window(window: int):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = MistralForCausalLM(
        MistralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=window, **sizes)
    ).eval()
    said = torch.randint(VOCABULARY, (PROMPT + ANSWER,)).tolist()
    with torch.no_grad():
        whole = model(torch.tensor([said])).logits[0]
    session = TargetSession(model, rewinds=True)
    session.forward(said[:PROMPT])
    session.rewind_to(PROMPT)
    known = PROMPT
    while known + PROPOSED < len(said):
        accepted = known % (PROPOSED + 1)  # every number, from none to all
        proposed = [*said[known : known + 1 + accepted], *[0] * (PROPOSED - accepted)]
        found = session.forward(proposed).logits[: accepted + 1]
        torch.testing.assert_close(found, whole[known : known + 1 + accepted])
        known += accepted + 1
        session.rewind_to(known)
