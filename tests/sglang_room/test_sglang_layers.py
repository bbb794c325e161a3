"""SGLang captures and feeds the intended layers, whatever its model class adds to the ids; `check` reports the rest.
The hook splits a packed batch into requests, writes those of Draftworks only, and never raises into the engine.
"""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import ConfigError, PassingTroubleError
from draftworks.handover.background import start_hand_over
from draftworks.handover.destination import make_destination
from draftworks.handover.spool import make_request_id, take_parts
from draftworks.preflight.compatibility import check_requirements
from draftworks.sglang.hook import SGLangCaptureBackend, find_spool, format_hook_option
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


LENGTHS = [3, 1, 4]


def pack(request_ids: list[str], starts: list[int], padding: int = 0) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A batch as SGLang packs it, whose values count the positions, and the output of the logits layer."""
    rows = torch.arange(sum(LENGTHS) + padding, dtype=torch.float32)[:, None]
    batch = SimpleNamespace(
        rids=request_ids,
        extend_seq_lens_cpu=LENGTHS,
        extend_prefix_lens_cpu=starts,
        input_ids=torch.arange(sum(LENGTHS) + padding, dtype=torch.int32),
    )
    logits = torch.arange(len(LENGTHS), dtype=torch.float32)[:, None].expand(-1, 5)
    output = SimpleNamespace(
        hidden_states=rows.expand(-1, 4), last_hidden_states=rows.expand(-1, 2), next_token_logits=logits
    )
    return batch, output


def test_every_request_gets_its_own_rows(tmp_path: Path):
    ids = [make_request_id(), make_request_id(with_logits=True), make_request_id()]
    SGLangCaptureBackend(start_hand_over(make_destination(tmp_path))).write(*pack(ids, [0, 0, 7], padding=2))
    parts = [take_parts(tmp_path, request_id)[0] for request_id in ids]
    assert [part.input_ids.tolist() for part in parts] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    for part in parts:
        assert torch.equal(part.taps, part.input_ids[:, None].float().expand(2, -1, 2))
        assert torch.equal(part.last, part.input_ids[:, None].float().expand(-1, 2))
    assert [part.start for part in parts] == [0, 0, 7]
    assert [part.logits is None for part in parts] == [True, False, True]
    assert parts[1].logits.tolist() == [1.0] * 5


def test_requests_of_others_are_left_alone(tmp_path: Path):
    SGLangCaptureBackend(start_hand_over(make_destination(tmp_path))).write(
        *pack(["HEALTH_CHECK_1", "answer", "x"], [0, 0, 0])
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["hidden_states", "last_hidden_states"])
def test_what_goes_wrong_is_told_to_whoever_waits_and_not_to_the_engine(tmp_path: Path, missing):
    ids = [make_request_id(), "answer", make_request_id()]
    batch, output = pack(ids, [0, 0, 0])
    setattr(output, missing, None)
    SGLangCaptureBackend(start_hand_over(make_destination(tmp_path))).write(batch, output)
    for request_id in (ids[0], ids[2]):
        with pytest.raises(PassingTroubleError, match="--enable-return-aux-hidden-states"):
            take_parts(tmp_path, request_id)
    assert list(tmp_path.iterdir()) == []


def test_nothing_reaches_the_engine_even_where_nobody_can_be_told(tmp_path: Path, monkeypatch):
    batch, output = pack([make_request_id(), "answer", "x"], [0, 0, 0])
    monkeypatch.setattr("draftworks.sglang.hook._find_prefill", lambda args: batch)
    SGLangCaptureBackend(start_hand_over(make_destination(tmp_path / "removed")))(nn.Identity(), (), output)
    assert not (tmp_path / "removed").exists()


def test_rows_that_are_missing_are_told(tmp_path: Path):
    ids = [make_request_id() for _ in LENGTHS]
    batch, output = pack(ids, [0, 0, 0])
    output.last_hidden_states = output.last_hidden_states[:5]
    SGLangCaptureBackend(start_hand_over(make_destination(tmp_path))).write(batch, output)
    with pytest.raises(PassingTroubleError, match="kept hidden states of 5 positions, expected 8"):
        take_parts(tmp_path, ids[0])


@pytest.mark.parametrize(
    "factory", ["draftworks.sglang.hook:capture_hook", "draftworks.serving.sglang_hook:capture_hook"]
)
def test_a_server_that_loaded_the_hook_where_it_is_or_was_is_known(factory: str, tmp_path: Path):
    others = {"hook_factory": "mylab:hook", "config": {"spool": "/elsewhere"}}
    assert find_spool([others, {"hook_factory": factory, "config": {"spool": str(tmp_path)}}]) == tmp_path
    assert find_spool([others]) is None


def test_the_hook_is_on_the_layer_that_makes_logits_in_a_wrapper_too(tmp_path: Path):
    (hook,) = json.loads(format_hook_option(tmp_path))
    modules = ["", "model", "logits_processor", "language_model.logits_processor", "lm_head", "language_model.lm_head"]
    matched = [name for name in modules if any(fnmatch.fnmatch(name, each) for each in hook["target_modules"])]
    assert matched == ["logits_processor", "language_model.logits_processor"]
