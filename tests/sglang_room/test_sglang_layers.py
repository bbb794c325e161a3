"""SGLang captures and feeds the intended layers, whatever its model class adds to the ids; `check` reports the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError
from draftworks.preflight.compatibility import check_requirements
from draftworks.sglang.layers import choose_capture_convention, from_eagle3_ids, resolve_captured_layers, to_eagle3_ids
from draftworks.storage.identity import LayerTap
from draftworks.targets.registry import Registry

DEEPSEEK = "DeepseekV3ForCausalLM"
OPTIONS = {"draft_vocab_size": 64}


def compute_deepseek_layers(ids: list[int]) -> list[int]:
    """Layers passed, as `set_eagle3_layers_to_capture` of SGLang 0.5.23 computes them for its DeepSeek V2 and V3."""
    return [each + 1 for each in ids] if ids and ids[0] == 1 else list(ids)


@pytest.mark.parametrize("taps", [[2, 4, 7], [3, 11, 20], [4, 12, 21], [2], [0, 5]])
def test_an_eagle3_draft_of_deepseek_gets_the_layers_it_was_trained_on(taps: list[int]):
    ids = to_eagle3_ids([LayerTap(k) for k in taps], DEEPSEEK)
    assert compute_deepseek_layers(ids) == taps
    assert [tap.hf_index for tap in from_eagle3_ids(ids, DEEPSEEK)] == taps


@pytest.mark.parametrize("taps", [[1, 4, 7], [2, 4, 7], [3, 11, 20]])
def test_any_other_target_adds_one_to_every_id(taps: list[int]):
    ids = to_eagle3_ids([LayerTap(k) for k in taps], "LlamaForCausalLM")
    assert [layer + 1 for layer in ids] == taps
    assert [tap.hf_index for tap in from_eagle3_ids(ids, "LlamaForCausalLM")] == taps


def test_taps_that_no_ids_give_are_refused():
    with pytest.raises(ConfigError, match=f"hf1, hf5 beside a {DEEPSEEK}.*do not begin with hf1"):
        to_eagle3_ids([LayerTap(1), LayerTap(5)], DEEPSEEK)


@pytest.mark.parametrize(
    "architecture", [DEEPSEEK, "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "LlamaForCausalLM"]
)
def test_our_own_servers_capture_what_they_are_told(architecture: str):
    convention = choose_capture_convention(architecture)
    assert resolve_captured_layers([0, 1, 3], convention.lower(), architecture) == (0, 1, 3)


def make_deepseek(target: TargetFiles, folder: Path) -> TargetFiles:
    (folder / "config.json").write_text(json.dumps({"architectures": [DEEPSEEK]}))
    return target.model_copy(update={"model": str(folder)})


def make_spec(strategies: dict | None = None, **capture) -> TargetSpec:
    entries = strategies or {"eagle3": {"options": OPTIONS}}
    return TargetSpec(name="mine", model="m", dataset="d", max_length=32, strategies=entries, capture=capture)


def test_check_refuses_a_draft_that_sglang_would_serve_with_other_layers(tmp_path: Path, tiny_target: TargetFiles):
    target, options = make_deepseek(tiny_target, tmp_path), {**OPTIONS, "layer_ids": [1, 3, 5]}
    with pytest.raises(ConfigError, match="target mine: SGLang cannot serve an EAGLE-3 draft of hf1, hf3, hf5"):
        check_requirements(make_spec({"eagle3": {"options": options}}), target, Registry(tmp_path))
    check_requirements(
        make_spec({"eagle3": {"options": options, "export": {"formats": []}}}), target, Registry(tmp_path)
    )
    check_requirements(
        make_spec({"eagle3": {"options": {**OPTIONS, "layer_ids": [2, 3, 5]}}}), target, Registry(tmp_path)
    )


@pytest.mark.parametrize("argument", ["--enable-dp-attention", "--attn-dp-size=2"])
def test_check_refuses_attention_data_parallelism(tmp_path: Path, tiny_target: TargetFiles, argument: str):
    with pytest.raises(ConfigError, match="target mine: capture.server.args: .*only the first of all ranks writes"):
        check_requirements(make_spec(backend="sglang", server={"args": [argument]}), tiny_target, Registry(tmp_path))


def test_check_refuses_a_family_of_which_sglang_captures_nothing(tmp_path: Path, tiny_target: TargetFiles):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    target = tiny_target.model_copy(update={"model": str(tmp_path)})
    with pytest.raises(ConfigError, match="cannot capture layers of a GPT2LMHeadModel. Use backend hf"):
        check_requirements(make_spec(backend="sglang_server"), target, Registry(tmp_path))
    yours = {"url": "http://127.0.0.1:9", "spool": "/tmp"}
    check_requirements(make_spec(backend="sglang_server", server=yours), target, Registry(tmp_path))
    check_requirements(make_spec(), target, Registry(tmp_path))
