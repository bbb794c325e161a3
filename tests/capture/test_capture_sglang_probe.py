"""A server of somebody else's is refused before anything is captured, with every reason and what puts it right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_sglang import HIDDEN, VOCAB, fake_sglang, server_info

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.capture.sglang_probe import require_server
from draftworks.errors import ConfigError, EngineError
from draftworks.identity import LayerTap
from draftworks.runs import TargetFiles
from draftworks.serving.sglang_client import SGLangClient
from draftworks.specs import CaptureSpec, SGLangSpec, validated

TARGET = TargetFiles(
    name="toy", model="models/toy", tokenizer="models/toy", digest="0" * 16, tokenizer_digest="1" * 16,
    num_layers=6, hidden_size=HIDDEN, vocab_size=VOCAB, context=32,
)  # fmt: skip


def examine(
    spool: Path, served_spool: Path | None = None, model: str | None = None, args: tuple[str, ...] = (), **served
) -> None:
    """Examine a server that differs from what the registry asks for by `served`."""
    with fake_sglang(spool) as fake, SGLangClient(fake.url, 5) as client:
        fake.info = server_info("models/toy", served_spool or spool, **served)
        server = {"url": fake.url, "spool": str(spool), "model": model, "args": list(args)}
        capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
        require_server(client, TARGET, capture, (1, 3), longest=32)


def test_a_server_set_up_for_capture_is_accepted(tmp_path: Path):
    examine(tmp_path)
    examine(tmp_path, return_aux_hidden_state_layer_ids=[0, 1, 3, 4])
    examine(tmp_path, model_path="/mnt/toy", model="/mnt/toy")
    examine(tmp_path, quantization="fp8", args=("--quantization", "fp8"))


def test_another_version_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"SGLang at http.*: expected SGLang 0.5.23, .* found 0.5.24"):
        examine(tmp_path, version="0.5.24")


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
        ({"forward_hooks": None}, "nowhere: it has not loaded it.*--forward-hooks"),
    ],
    ids=str,
)
def test_every_difference_is_told_with_what_puts_it_right(tmp_path: Path, served, message):
    with pytest.raises(EngineError, match=message):
        examine(tmp_path, **served)


def test_all_differences_are_told_at_once(tmp_path: Path):
    with pytest.raises(EngineError) as raised:
        examine(tmp_path, tmp_path / "elsewhere", dtype="bfloat16", disable_radix_cache=False)
    assert len(str(raised.value).splitlines()) == 4
    assert str(tmp_path / "elsewhere") in str(raised.value)


def test_an_unreachable_url_is_told(tmp_path: Path):
    server = {"url": "http://127.0.0.1:9", "spool": str(tmp_path)}
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
    with pytest.raises(EngineError, match="http://127.0.0.1:9 cannot be reached"):
        load_engine(TARGET, capture, torch.device("cpu"), EnginePlace(tmp_path, ()))


def test_a_missing_environment_is_told_before_anything_is_started(tmp_path: Path):
    place = EnginePlace(tmp_path / "engine", (LayerTap(2),), sglang=SGLangSpec(python=str(tmp_path / "python")))
    capture = CaptureSpec(backend="sglang_server", compute_dtype="float32")
    with pytest.raises(ConfigError, match=r"python .*cannot be run.*make sglang-env"):
        load_engine(TARGET, capture, torch.device("cpu"), place)


def test_a_url_without_the_folder_of_its_hidden_states_is_refused():
    with pytest.raises(ConfigError, match="target.yaml: server: url and spool go together"):
        validated(CaptureSpec, {"server": {"url": "http://127.0.0.1:9"}}, where="target.yaml")
