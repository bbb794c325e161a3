"""Targets and servers for the tests that run real SGLang."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from waiting import HANG_S

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.capture.engines.server_hosts import ManagedHost
from draftworks.capture.engines.sglang_engine import SGLangEngine
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.sglang.server import ServerOptions, SGLangServer
from draftworks.storage.identity import LayerTap

ROOT = Path(__file__).resolve().parents[2]
SGLANG = SGLangSpec(python=str(ROOT / ".venv-sglang" / "bin" / "python"), start_timeout_s=HANG_S, grace_s=10)
CPU = torch.device("cpu")
CHUNK = 16


def capture_spec(**server) -> CaptureSpec:
    return CaptureSpec(backend="sglang_server", compute_dtype="float32", dtype="float32", device="cpu", server=server)


def taps_of(target: TargetFiles) -> tuple[LayerTap, ...]:
    """All of them, the embeddings included."""
    return tuple(LayerTap(k) for k in range(target.num_layers))


def sglang_engine(target: TargetFiles, folder: Path, taps: tuple[LayerTap, ...] | None, **server) -> SGLangEngine:
    parts = partial(TargetParts.load, target)
    place = EnginePlace(folder, taps, lambda: parts().head, lambda: parts().embedding, SGLANG)
    engine = load_engine(target, capture_spec(**server), CPU, place)
    assert isinstance(engine, SGLangEngine)
    return engine


def random_qwen3(folder: Path, tokenizer: Path) -> TargetFiles:
    """A Qwen3 of random weights, with the tokenizer of another target."""
    config = Qwen3Config(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    return TargetFiles(
        name="qwen3", model=str(folder), tokenizer=str(folder), digest="0" * 16, tokenizer_digest="1" * 16,
        num_layers=4, hidden_size=64, vocab_size=2048, context=256,
    )  # fmt: skip


@dataclass(frozen=True)
class LossyOptions(ServerOptions):
    """A server as it starts by default, with a prefix cache and prompts in (short) chunks: it loses hidden states."""

    def build_arguments(self, port: int) -> list[str]:
        kept = [word for word in super().build_arguments(port) if word != "--disable-radix-cache"]
        return [*kept, "--chunked-prefill-size", str(CHUNK)]


def lossy_options(target: TargetFiles, folder: Path) -> LossyOptions:
    return LossyOptions(
        model=target.model, revision=None, tokenizer=target.tokenizer, context=target.context, dtype="float32",
        device="cpu", layer_ids=(1, 3), spool=folder / "spool", mem_fraction=0.8, max_total_tokens=2048,
    )  # fmt: skip


def assert_key_is_kept(url: str, key: str, pid: int, log: Path) -> None:
    """A server answers no request without its key, or with another; no log and no list of processes has the key."""
    with_key, wrong = {"Authorization": f"Bearer {key}"}, {"Authorization": f"Bearer {key[:-1]}"}
    asked = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
    with httpx.Client(base_url=url, timeout=HANG_S) as client:
        for headers in ({}, wrong):
            for path in ("/generate", "/v1/chat/completions", "/tokenize", "/update_weights_from_disk"):
                assert client.post(path, json=asked, headers=headers).status_code == 401
            for path in ("/server_info", "/model_info"):
                assert client.get(path, headers=headers).status_code == 401
        assert client.get("/health").status_code == 200
        assert client.post("/generate", json=asked, headers=with_key).status_code == 200
    server = psutil.Process(pid)
    for process in (server, *server.children(recursive=True)):
        assert key not in " ".join(process.cmdline())
    text = log.read_text(errors="replace")
    assert "api_key" in text
    assert key not in text


def list_servers(engine: SGLangEngine) -> list[psutil.Process]:
    """Return the processes of the servers that the engine has started and not ended."""
    hosts = [host for host in engine._host.list_members() if isinstance(host, ManagedHost)]
    return [psutil.Process(host.pid) for host in hosts if host.pid is not None and psutil.pid_exists(host.pid)]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    options = lossy_options(TargetFiles.model_validate_json(sys.argv[2]), folder)
    server = SGLangServer(Path(SGLANG.python), options, folder, SGLANG.start_timeout_s, SGLANG.grace_s)
    server.start()
    print(server.url, server.pid, flush=True)
    sys.stdin.read()
