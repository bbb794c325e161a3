"""Rotary frequencies of the readers equal those of transformers, in either spelling of the config."""

from __future__ import annotations

import pytest
import torch
from random_exports import HEAD_DIM, sglang_eagle3
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftworks.errors import StoreError
from draftworks.export.readers.files import ExportFolder
from draftworks.export.readers.rope import RopeTable, read_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.9},
    {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
]


@pytest.fixture
def read(tmp_path):
    def of(**settings) -> RopeTable:
        config = {name: value for name, value in {**sglang_eagle3().config, **settings}.items() if value is not ...}
        return read_rope(ExportFolder(tmp_path, config, {}), "", HEAD_DIM)

    return of


@pytest.mark.parametrize("scaling", SCALED)
def test_frequencies_are_those_of_transformers(scaling, read):
    rope = {"rope_theta": 500.0, **scaling}
    config = LlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters=rope)
    inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours = read(rope_parameters=rope)
    torch.testing.assert_close(ours.inverse.float(), inverse, rtol=1e-5, atol=0)
    assert ours.scaling == pytest.approx(factor)


def test_unscaled_frequencies_fall_from_one_by_powers_of_theta(read):
    inverse = read(rope_parameters={"rope_type": "default", "rope_theta": 81.0}).inverse
    assert inverse[0] == 1
    assert inverse[HEAD_DIM // 4] == pytest.approx(1 / 9)


@pytest.mark.parametrize("scaling", [None, *SCALED])
def test_the_spelling_of_transformers_4_says_the_same(scaling, read):
    new = read(rope_parameters={"rope_type": "default", "rope_theta": 500.0, **(scaling or {})})
    old = read(rope_parameters=..., rope_theta=500.0, rope_scaling=scaling)
    assert torch.equal(old.inverse, new.inverse)
    assert old.scaling == new.scaling


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": ..., "rope_theta": ...},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_no_rope_half_a_rope_and_one_that_depends_on_the_length_are_refused(settings, read):
    with pytest.raises(StoreError, match=r"config\.json: rope_parameters: expected"):
        read(**settings)
