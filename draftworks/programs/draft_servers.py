"""Live servers that speculate with an exported draft, for rung 6: one interface for SGLang and vLLM, started or running."""

from __future__ import annotations

import filecmp
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftworks.config.run_files import ServeRun
from draftworks.distributed.collectives import resolve_device
from draftworks.errors import ConfigError, EngineError
from draftworks.export.conventions import DRAFT_FOLDER, PROVENANCE
from draftworks.programs.program import ProgramContext
from draftworks.servers.client import Counters, GenerateRequest, Sampling, SpeculatedAnswer
from draftworks.servers.process import ServerProcess
from draftworks.sglang.environment import require_cpu_speculation
from draftworks.sglang.server import ServerOptions, SGLangServer
from draftworks.sglang.speculation import (
    DRAFT,
    SpeculatingClient,
    Speculation,
    read_accept_length,
    read_verified_tokens,
    require_cpu_dtype,
)
from draftworks.storage.files import parse_json
from draftworks.vllm.client import VLLMClient, read_speculation
from draftworks.vllm.server import VLLMServer, VLLMServerOptions
from draftworks.vllm.speculation import parse_speculation, require_cpu_support

CPU_MEMORY_SHARE = 0.8
"""Upper limit, as a share of main memory; the number of tokens in the KV cache decides how much is used."""
_SPARE_TOKENS = 16
"""Of the context, beside the proposals: where it ends, vLLM proposes fewer tokens."""
_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's KV cache on a CPU, of which every request may have one that is not full."""
CONFIG = "config.json"


class DraftServer(ABC):
    """A running server that speculates with the draft.

    Attributes:
        version: of the engine, as the server says.
        algorithm: its name of the kind of draft.
        samples: whether it verifies sampled answers by a rule of sampling.
        compared: whether the server's files of the draft were compared with ours; False where it does not name them, or
            they lie on another machine.
    """

    version: str
    algorithm: str
    compared: bool
    samples: bool = True

    @abstractmethod
    def answer(self, prompt: tuple[int, ...], sampling: Sampling) -> SpeculatedAnswer:
        """Return the answer to a prompt with its counters. Raises EngineError as clients do."""

    @abstractmethod
    def get_counters(self) -> Counters:
        """Return the server's own counters. Raises EngineError if it has none."""

    def read_accept_length(self) -> float | None:
        """Return tokens per pass as the server itself averages them; None if it does not."""
        return None


@contextmanager
def open_draft_server(run: ServeRun, ctx: ProgramContext) -> Iterator[DraftServer]:
    """Connect to the server of the run: one that runs at `run.url`, or one of our own that is stopped in any case.

    Raises:
        ConfigError: the draft is of another target, the engine is not there, or cannot speculate with this kind of draft here;
            a running server has another draft.
        EngineError: the server does not start or ends, proposes another number of tokens than the walk, or does not count.
    """
    require_draft_of(run)
    opened = _open_sglang(run, ctx) if run.engine == "sglang" else _open_vllm(run, ctx)
    with opened as server:
        yield server


def require_draft_of(run: ServeRun) -> None:
    """Raise ConfigError if the draft's config.json says that it was trained for another target."""
    provenance = _read_config(run).get(PROVENANCE)
    trained = provenance.get("target_digest") if isinstance(provenance, Mapping) else None
    if trained not in (None, run.target.digest):
        raise ConfigError(
            f"{run.draft / CONFIG}: a draft of the target with digest {trained}, expected {run.target.digest} "
            f"({run.target.name}): serve a draft that was trained for this target"
        )


def _read_config(run: ServeRun) -> dict[str, Any]:
    """Return the draft's config.json; empty where there is none that can be read, of which the server says what it misses."""
    path = run.draft / CONFIG
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _SGLang(DraftServer):
    def __init__(self, client: SpeculatingClient, run: ServeRun, algorithm: str) -> None:
        self._client, info = client, client.get_raw_info()
        proposed = read_verified_tokens(info) - 1
        if proposed != run.draft_tokens:
            raise EngineError(_describe_proposals("SGLang", proposed, run.draft_tokens))
        self.version, self.algorithm = str(info.get("version")), algorithm
        # srt/speculative/eagle_utils.py, _verify_uses_greedy: on these devices every answer is verified greedily.
        self.samples = info.get("device") not in ("cpu", "xpu")
        loaded = info.get(DRAFT.removeprefix("--").replace("-", "_"))
        self.compared = _require_same_draft(loaded, run, f"SGLang at {client.url}")

    def answer(self, prompt: tuple[int, ...], sampling: Sampling) -> SpeculatedAnswer:
        words = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_ids),
        }
        return self._client.answer(GenerateRequest(uuid.uuid4().hex, prompt, words))

    def get_counters(self) -> Counters:
        return self._client.get_counters()

    def read_accept_length(self) -> float | None:
        return read_accept_length(self._client.get_raw_info())


@contextmanager
def _open_sglang(run: ServeRun, ctx: ProgramContext) -> Iterator[DraftServer]:
    device = resolve_device(run.serving.device).type
    speculation = Speculation.of_command(run.command, DRAFT_FOLDER, run.draft).with_draft_tokens(run.draft_tokens)
    if run.url is None:
        speculation.require_supported(device)
        if device == "cpu":
            require_cpu_dtype(run.serving.compute_dtype)
            require_cpu_speculation(Path(run.sglang.python))
    options = _make_sglang_options(run, device, speculation)
    process = SGLangServer(Path(run.sglang.python), options, run.logs, run.sglang.start_timeout_s, run.sglang.grace_s)
    with _run_process(process, run, ctx, speculation.algorithm) as url:
        client = SpeculatingClient(url, run.sglang.request_timeout_s)
        try:
            yield _SGLang(client, run, speculation.algorithm)
        finally:
            client.close()


def _make_sglang_options(run: ServeRun, device: str, speculation: Speculation) -> ServerOptions:
    server, on_gpu = run.serving.server, device == "cuda"
    return ServerOptions(
        model=run.target.model,
        revision=run.target.revision,
        tokenizer=run.target.tokenizer,
        context=run.target.context,
        dtype=run.serving.compute_dtype,
        device=device,
        layer_ids=(),
        spool=run.logs / "spool",
        tp_size=server.tp_size,
        dp_size=server.dp_size,
        mem_fraction=server.mem_fraction or (None if on_gpu else CPU_MEMORY_SHARE),
        max_total_tokens=server.max_total_tokens
        or (None if on_gpu else (run.serving.concurrency + 1) * 2 * run.target.context),
        extra=tuple(server.args),
        draft=speculation,
    )


class _VLLM(DraftServer):
    def __init__(self, client: VLLMClient, run: ServeRun, algorithm: str) -> None:
        self._client, self._draft_tokens = client, run.draft_tokens
        self._model = client.list_models()[0].name
        client.get_counters()  # before any answer: a server that does not count is of no use
        self.version, self.algorithm = client.get_version(), algorithm
        where = f"vLLM at {client.url}"
        # vllm/utils/cpu_triton_utils.py of 0.32.0, _expand_kernel_impl: temperatures are written into an integer copy that
        # is dropped, so that proposals are verified at whatever the memory held.
        self.samples = run.url is not None or resolve_device(run.serving.device).type != "cpu"
        speculative = (client.get_config() or {}).get("speculative_config") if run.url is not None else None
        named = speculative if isinstance(speculative, Mapping) else {}
        proposed = named.get("num_speculative_tokens", run.draft_tokens)
        if proposed != run.draft_tokens:
            raise EngineError(_describe_proposals("vLLM", proposed, run.draft_tokens))
        self.compared = _require_same_draft(named.get("model") if run.url is not None else run.draft, run, where)

    def answer(self, prompt: tuple[int, ...], sampling: Sampling) -> SpeculatedAnswer:
        found = read_speculation(self._client.complete(self._model, prompt, sampling))
        proposed = len(found.histogram) - 1  # vLLM's has an entry for every number of tokens that a pass may accept
        if found.passes and proposed != self._draft_tokens:
            raise EngineError(_describe_proposals("vLLM", proposed, self._draft_tokens))
        return found

    def get_counters(self) -> Counters:
        return self._client.get_counters()


@contextmanager
def _open_vllm(run: ServeRun, ctx: ProgramContext) -> Iterator[DraftServer]:
    device = resolve_device(run.serving.device).type
    speculative = parse_speculation(run.command, DRAFT_FOLDER, run.draft, run.draft_tokens)
    if run.url is None and device == "cpu":
        require_cpu_support(_read_config(run))
    options = _make_vllm_options(run, device, speculative)
    process = VLLMServer(Path(run.vllm.python), options, run.logs, run.vllm.start_timeout_s, run.vllm.grace_s)
    algorithm = str(speculative.get("method"))
    with _run_process(process, run, ctx, algorithm) as url:
        client = VLLMClient(url, run.vllm.request_timeout_s)
        try:
            yield _VLLM(client, run, algorithm)
        finally:
            client.close()


def _make_vllm_options(run: ServeRun, device: str, speculative: Mapping[str, Any]) -> VLLMServerOptions:
    server, target = run.serving.server, run.target
    context = min(target.context, run.max_length + run.draft_tokens + _SPARE_TOKENS)
    tokens = server.max_total_tokens or (run.serving.concurrency + 1) * (context + _BLOCK_TOKENS)
    # Of every layer a key and a value, of at most the hidden size, in four bytes; the draft has few layers more.
    cache_bytes = tokens * (target.num_layers + 1) * target.hidden_size * 2 * 4
    return VLLMServerOptions(
        model=target.model,
        revision=target.revision,
        tokenizer=target.tokenizer,
        name=f"draftworks-{uuid.uuid4().hex}",
        context=context,
        dtype=run.serving.compute_dtype,
        device=device,
        speculative=speculative,
        max_requests=run.serving.concurrency,
        tp_size=server.tp_size,
        dp_size=server.dp_size,
        mem_fraction=server.mem_fraction,
        cache_gb=math.ceil(cache_bytes / 2**30),
        counts_requests=True,
        extra=tuple(server.args),
    )


@contextmanager
def _run_process(process: ServerProcess[Any], run: ServeRun, ctx: ProgramContext, algorithm: str) -> Iterator[str]:
    """Yield the address of the run's server: the process is started and stopped unless there is a running one."""
    name = process.SOFTWARE.name
    if run.url is not None:
        ctx.log(f"{name} at {run.url} is asked, which speculates by itself")
        yield run.url
        return
    ctx.log(f"starting {name} with {algorithm}, its log is {process.log}")
    with ctx.doing(f"{name} is starting"):
        process.start()
    try:
        yield process.url
    except EngineError as error:
        raise process.explain(error) from error
    finally:
        process.stop()


def _require_same_draft(loaded: Any, run: ServeRun, where: str) -> bool:
    """Compare the draft that a server has loaded with ours, file by file, and return whether that was possible.

    Raises:
        ConfigError: a file differs.
    """
    folder = Path(str(loaded)) if loaded else None
    if folder == run.draft:
        return True
    if folder is None or not folder.is_dir():
        return False
    files = [path for path in sorted(run.draft.glob("*")) if path.name == CONFIG or path.suffix == ".safetensors"]
    for path in files:
        theirs = folder / path.name
        if not theirs.is_file() or not filecmp.cmp(path, theirs, shallow=False):
            raise ConfigError(
                f"{where} has loaded the draft {folder}, whose {path.name} is not that of {run.draft}: expected the exported "
                "draft that is to be measured. Start the server with it, or leave evaluation.serving.urls out"
            )
    return True


def _describe_proposals(engine: str, proposed: int, walked: int) -> str:
    return (
        f"{engine} proposes {proposed} tokens per pass, the walk that it is compared with {walked}: expected the same. Leave "
        "evaluation.draft_tokens out for a draft whose own config sets how many it proposes"
    )
