"""An unsuitable external server is rejected before a capture, with every reason and its correction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fake_sglang import HIDDEN, VOCAB, fake_sglang, server_info

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.capture.engines.sglang_hosts import require_server
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import ConfigError, EngineError
from draftworks.sglang.client import SGLangClient
from draftworks.storage.identity import LayerTap

TARGET = TargetFiles(
    name="toy", model="models/toy", tokenizer="models/toy", digest="0" * 16, tokenizer_digest="1" * 16,
    num_layers=6, hidden_size=HIDDEN, vocab_size=VOCAB, context=32,
)  # fmt: skip


def check_server(
    spool: Path, served_spool: Path | None = None, model: str | None = None, args: tuple[str, ...] = (), **served
) -> None:
    """Check a server that differs by `served` from what the registry asks for."""
    with fake_sglang(spool) as fake, SGLangClient(fake.url, 5) as client:
        fake.info = server_info("models/toy", served_spool or spool, **served)
        server = {"url": fake.url, "spool": str(spool), "model": model, "args": list(args)}
        capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
        require_server(client, TARGET, capture, (1, 3), longest=32)


def test_a_server_set_up_for_capture_is_accepted(tmp_path: Path):
    check_server(tmp_path)
    check_server(tmp_path, return_aux_hidden_state_layer_ids=[0, 1, 3, 4])
    check_server(tmp_path, model_path="/mnt/toy", model="/mnt/toy")
    check_server(tmp_path, quantization="fp8", args=("--quantization", "fp8"))


def test_another_version_is_warned_of(tmp_path: Path, caplog):
    check_server(tmp_path, version="0.5.24")
    assert "is SGLang 0.5.24; Draftworks was tested with 0.5.23" in caplog.text


def test_weights_that_were_replaced_since_it_was_started_are_noticed(tmp_path: Path):
    with fake_sglang(tmp_path) as fake, SGLangClient(fake.url, 5) as client:
        fake.served = {"model_path": "models/tuned"}
        server = {"url": fake.url, "spool": str(tmp_path)}
        capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
        with pytest.raises(
            EngineError, match=r"the model models/tuned \(it was started with models/toy\), expected models/toy"
        ):
            require_server(client, TARGET, capture, (1, 3))


@pytest.mark.parametrize(
    ("architecture", "convention", "ids", "taken"),
    [
        ("LlamaForCausalLM", "eagle3", [1, 3], True),
        ("DeepseekV3ForCausalLM", "eagle3", [1, 3], True),
        ("DeepseekV3ForCausalLM", "eagle3", [0, 1, 3], False),
        ("DeepseekV3ForCausalLM", "eagle3", [2, 4], True),
        ("DeepseekV3ForCausalLM", "dflash", [0, 1, 3], True),
        ("GlmMoeDsaForCausalLM", None, [2, 4], True),
        ("KimiK25ForConditionalGeneration", "eagle3", [0, 3], False),
    ],
)
def test_ids_of_layers_are_understood_as_the_server_understands_them(
    tmp_path: Path, architecture: str, convention: str | None, ids: list[int], taken: bool
):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    target = TARGET.model_copy(update={"model": str(tmp_path)})
    served = {"return_aux_hidden_state_layer_ids": ids, "aux_hidden_state_capture": convention}
    with fake_sglang(tmp_path / "spool", **served) as fake, SGLangClient(fake.url, 5) as client:
        fake.info["model_path"] = str(tmp_path)
        server = {"url": fake.url, "spool": str(fake.spool)}
        capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
        if taken:
            assert set(require_server(client, target, capture, (1, 3)).layer_ids or ()) >= {1, 3}
        else:
            with pytest.raises(EngineError, match=r"captures the layers .* expected \[1, 3\].*algorithm DFLASH"):
                require_server(client, target, capture, (1, 3))


@pytest.mark.parametrize(
    ("served", "message"),
    [
        ({"model_path": "models/other"}, "it serves the model models/other, expected models/toy.*capture.server.model"),
        ({"revision": "abc"}, "it serves revision abc, expected None"),
        ({"dtype": "float16"}, "it computes in float16, expected float32: --dtype float32"),
        ({"disable_radix_cache": False}, "prefix cache is on.*--disable-radix-cache"),
        ({"chunked_prefill_size": 4096}, "--chunked-prefill-size -1"),
        ({"return_aux_hidden_state_layer_ids": [1]}, r"captures the layers \[1\], expected \[1, 3\].*-layer-ids 1 3"),
        ({"enable_return_aux_hidden_states": False}, r"captures the layers \[\], expected \[1, 3\]"),
        ({"context_length": 32}, "its context is 32 tokens, expected more than 32: --context-length 48"),
        ({"quantization": "fp8"}, r"runs with --quantization fp8.*capture.server.args: \[--quantization, fp8\]"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "runs with --kv-cache-dtype fp8_e5m2"),
        ({"torchao_config": "int4wo-128"}, "runs with --torchao-config int4wo-128"),
        ({"lora_paths": ["/adapter"]}, "runs with --lora-paths"),
        ({"json_model_override_args": '{"rope_theta": 1}'}, "runs with --json-model-override-args"),
        ({"attn_dp_size": 2}, "2 groups of attention data parallelism.*without --attn-dp-size"),
        ({"enable_dp_attention": True, "dp_size": 4}, "4 groups of attention data parallelism"),
        ({"forward_hooks": None}, r"nowhere \(it is not loaded\).*--forward-hooks"),
    ],
    ids=str,
)
def test_every_difference_is_told_with_what_puts_it_right(tmp_path: Path, served, message):
    with pytest.raises(EngineError, match=message):
        check_server(tmp_path, **served)


def test_all_differences_are_told_at_once(tmp_path: Path):
    with pytest.raises(EngineError) as raised:
        check_server(tmp_path, tmp_path / "elsewhere", dtype="bfloat16", disable_radix_cache=False)
    assert len(str(raised.value).splitlines()) == 4
    assert str(tmp_path / "elsewhere") in str(raised.value)


def test_an_unreachable_url_is_told(tmp_path: Path):
    server = {"url": "http://127.0.0.1:9", "spool": str(tmp_path)}
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
    with pytest.raises(EngineError, match="http://127.0.0.1:9: /server_info: cannot be reached"):
        load_engine(TARGET, capture, torch.device("cpu"), EnginePlace(tmp_path, ()))


def test_a_missing_environment_is_told_before_anything_is_started(tmp_path: Path):
    place = EnginePlace(tmp_path / "engine", (LayerTap(2),), sglang=SGLangSpec(python=str(tmp_path / "python")))
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32")
    with pytest.raises(ConfigError, match=r"python .*cannot be run.*make sglang-env"):
        load_engine(TARGET, capture, torch.device("cpu"), place)


def test_a_url_without_the_folder_of_its_hidden_states_is_refused():
    with pytest.raises(ConfigError, match="target.yaml: server: url and spool must be given together"):
        parse_spec(CaptureSpec, {"server": {"url": "http://127.0.0.1:9"}}, where="target.yaml")
