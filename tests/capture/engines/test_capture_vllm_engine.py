"""What vLLM is told, and what is made of its parts, without vLLM: ids, cache, the final norm, logits, sampling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_families import CONTEXT, HIDDEN, LAYERS, save_family

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.vllm_engine import VLLMEngine
from draftworks.capture.engines.vllm_loading import build_server_options, make_engine
from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError, EngineError
from draftworks.handover.spool import Part, take_parts, write_part
from draftworks.servers.client import GenerateRequest, Generation
from draftworks.storage.identity import LayerTap

CPU = torch.device("cpu")
CAPTURE = CaptureSpec(backend="vllm", compute_dtype="float32", device="cpu")
IDS = [5, 9, 7]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetFiles:
    return save_family(request.param, tmp_path_factory.mktemp(request.param))


class FakeHost(EngineHost[Any]):
    """Writes the states of transformers as vLLM does: the last before the final norm, logits with the answer."""

    version = "0.32.0+cpu"

    def __init__(self, target: TargetFiles, spool: Path, cached: int = 0) -> None:
        self.spool, self.cached = spool, cached
        self.layer_ids = (-1, 1, 3)
        self.client = SimpleNamespace(generate=self.generate)
        self.asked: list[GenerateRequest] = []
        hf = load_engine(target, CaptureSpec(compute_dtype="float32", device="cpu"), CPU)
        self.model = hf.model
        self.before: list[torch.Tensor] = []
        hf.model.base_model.norm.register_forward_pre_hook(lambda norm, args: self.before.append(args[0][0]))

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        answers = []
        for request in requests:
            self.asked.append(request)
            ids = torch.tensor(list(request.input_ids))
            found = self.model(ids[None], output_hidden_states=True)
            taps = torch.stack([found.hidden_states[layer + 1][0] for layer in self.layer_ids])
            write_part(self.spool, request.request_id, Part(self.cached, ids, taps, self.before[-1]))
            logits = found.logits[0, -1].tolist() if "logprobs" in request.sampling else None
            answers.append(Generation((1,), "length", self.cached, logits))
        return answers

    def revive(self, error: EngineError) -> None:
        raise error

    def close(self) -> None:
        pass


def make(target: TargetFiles, host: FakeHost) -> VLLMEngine:
    return make_engine(target, CAPTURE, host, EnginePlace(host.spool))


def test_streams_are_named_as_everywhere_and_last_is_after_the_final_norm(target: TargetFiles, tmp_path: Path):
    engine = make(target, FakeHost(target, tmp_path))
    assert engine.tested
    taps = [LayerTap(0), LayerTap(4)]
    hf = load_engine(target, CaptureSpec(compute_dtype="float32", device="cpu"), CPU)
    (found,), (expected,) = engine.capture([IDS], taps), hf.capture([IDS], taps)
    assert list(found) == list(expected) == ["hf0", "hf4", "last"]
    assert all(torch.allclose(found[name], stream, atol=1e-6) for name, stream in expected.items())
    assert torch.allclose(engine.logits([IDS])[0], hf.logits([IDS])[0][-1:], atol=1e-5)
    with pytest.raises(CaptureError, match="tap hf5 is not among those that the server captures: hf0, hf2, hf4"):
        engine.capture([IDS], [LayerTap(5)])


def test_rows_from_the_prefix_cache_are_refused(target: TargetFiles, tmp_path: Path):
    engine = make(target, FakeHost(target, tmp_path, cached=2))
    with pytest.raises(CaptureError, match="vLLM took 2 of a sequence's 3 tokens .* --no-enable-prefix-caching"):
        engine.capture([IDS], [])
    assert not any(tmp_path.iterdir())


def test_sampling_options_have_vllms_names(target: TargetFiles, tmp_path: Path):
    host = FakeHost(target, tmp_path)
    engine = make(target, host)
    engine.generate([IDS], ResponseSpec(max_new_tokens=9, temperature=0.5, top_k=7, seed=3), ["a"], 8, end_ids={4, 2})
    sampled = host.asked[-1].sampling
    take_parts(tmp_path, host.asked[-1].request_id)
    assert (sampled["max_tokens"], sampled["top_k"], sampled["stop_token_ids"]) == (5, 7, [2, 4])
    engine.generate([IDS], ResponseSpec(), ["a"], 8)
    greedy = host.asked[-1].sampling
    assert (greedy["temperature"], greedy["top_k"], "seed" in greedy, "seed" in sampled) == (0.0, 0, False, True)


def test_vllm_is_told_indices_of_hidden_states_and_room_for_a_sample_of_the_whole_context(target, tmp_path: Path):
    options = build_server_options(target, CAPTURE, CPU, tmp_path / "spool", (-1, 1, 3))
    assert options.speculative["draft_model_config"] == {
        "hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4, LAYERS]}
    }
    assert options.kv_transfer["kv_connector_extra_config"] == {"spool": str(tmp_path / "spool")}
    assert options.kv_transfer["kv_connector_module_path"] == "draftworks.vllm.connector"
    assert options.context > CONTEXT
    assert "--no-enable-prefix-caching" in options.build_engine_arguments()
    plain = build_server_options(target, CAPTURE, CPU, tmp_path, None)
    assert (plain.speculative, plain.kv_transfer) == (None, None)
    many = CAPTURE.model_copy(update={"batch_tokens": 10**7})
    tokens, values = 10**7, LAYERS * HIDDEN
    assert build_server_options(target, many, CPU, tmp_path, (0,)).cache_gb << 30 > 4 * tokens * values


def test_a_python_without_vllm_is_told(target: TargetFiles, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"backend vllm runs vLLM .* has none.*vllm.python of the deployment"):
        load_engine(target, CAPTURE, CPU, EnginePlace(tmp_path))
