from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftworks.drafts.layers import GatedMlp, RmsNorm, Rotary, rope_frequencies
from draftworks.errors import ConfigError

ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotation_equals_that_of_the_target(parts, rope):
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=4, head_dim=6, max_position_embeddings=64, rope_parameters=dict(rope)
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(5, 15)[None])
    query, key = torch.randn(2, 1, 4, 10, 6)
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    rotation = Rotary(replace(parts, rope=rope))(20, torch.float32).window(5, 10)
    torch.testing.assert_close(rotation.apply(query), expected[0])
    torch.testing.assert_close(rotation.apply(key), expected[1])


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_a_rope_is_made_on_the_device_that_drafts_are_made_on(parts, rope):
    """On `meta`, where check makes drafts without memory, too."""
    with torch.device("meta"):
        found = rope_frequencies(replace(parts, rope=rope))
    assert (found.inverse.device.type, found.inverse.dtype) == ("meta", torch.float32)
    assert found.inverse.shape == rope_frequencies(replace(parts, rope=rope)).inverse.shape


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "rope_theta": 1e4}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}]
)
def test_rope_that_cannot_be_reproduced_is_refused(parts, rope):
    with pytest.raises(ConfigError, match="not supported: expected rope_type default, linear, llama3, yarn"):
        Rotary(replace(parts, rope=rope))


def test_gradients_are_those_of_finite_differences(parts):
    norm = RmsNorm(6, 1e-3).double()
    rotation = Rotary(parts).double()(4, torch.float64)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, weight))
    torch.autograd.gradcheck(rotation.apply, x)
    mlp = GatedMlp(6, 8, torch.Generator().manual_seed(0)).double()
    torch.autograd.gradcheck(mlp, x)
