"""SGLang hosts of an engine (started here, external, in this process), and what each must answer before it captures."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from draftworks.capture.engine import TargetEngine
from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.verify import check_head
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import CaptureError, ConfigError, EngineError
from draftworks.sglang.client import ServerInfo, SGLangClient
from draftworks.sglang.embedded import EmbeddedSGLang, require_sglang_here
from draftworks.sglang.environment import SGLANG, require_capturing
from draftworks.sglang.hook import format_hook_option
from draftworks.sglang.layers import choose_capture_convention, read_architecture, resolve_captured_layers
from draftworks.sglang.server import ServerOptions, SGLangServer

log = logging.getLogger(__name__)


class ManagedHost(EngineHost[SGLangClient]):
    """A server that Draftworks runs: started by `start` and stopped by `close`, which may be called while it starts.

    Args:
        folder: used by this host only: log, spool, and the link through which SGLang finds the hook. After `close` only
            the log is left.
    """

    def __init__(self, python: Path, options: ServerOptions, folder: Path, sglang: SGLangSpec) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._sglang = sglang
        self._key = options.read_key()
        self._server = SGLangServer(python, options, folder, sglang.start_timeout_s, sglang.grace_s)
        self.spool = options.spool
        self.layer_ids = options.layer_ids
        self._open_client: SGLangClient | None = None

    def start(self) -> ManagedHost:
        """Start the server and return when it serves.

        Raises:
            ConfigError, EngineError: see `SGLangServer.start`.
        """
        shutil.rmtree(self.spool, ignore_errors=True)  # files of an earlier server; no request waits for them
        log.info("starting SGLang, its log is %s", self._server.log)
        self._server.start()
        self.version = self._server.version
        log.info("SGLang serves at %s, process %s", self._server.url, self._server.pid)
        self.client = self._open_client = SGLangClient(self._server.url, self._sglang.request_timeout_s, self._key)
        return self

    @property
    def pid(self) -> int | None:
        return self._server.pid

    @property
    def is_running(self) -> bool:
        return self._server.is_running()

    def require_running(self) -> None:
        if not self._server.is_running():
            raise EngineError(f"SGLang ended before it had written what it announced. See {self._server.log}")

    def revive(self, error: EngineError) -> None:
        state = "hangs" if self._server.is_running() else "has ended"
        log.warning(
            "%s\nSGLang %s and is restarted. The end of its log:\n%s", error, state, self._server.read_log_tail()
        )
        self._server.stop()
        self.start()

    def close(self) -> None:
        if self._server.pid is not None:
            log.info("stopping SGLang. The end of its log:\n%s", self._server.read_log_tail())
        self._server.stop()  # first: closing the client would not wake threads that wait for an answer
        if self._open_client is not None:
            self._open_client.close()
        shutil.rmtree(self.spool, ignore_errors=True)


class ExternalHost(EngineHost[SGLangClient]):
    """An external server, which Draftworks did not start: after an error, requests to it can only be tried again."""

    def __init__(self, client: SGLangClient, spool: Path, layer_ids: tuple[int, ...]) -> None:
        self.client = client
        self.spool = spool
        self.layer_ids = layer_ids

    def require_running(self) -> None:
        self.client.require_reachable()

    def revive(self, error: EngineError) -> None:
        log.warning("%s. Trying again", error)

    def close(self) -> None:
        self.client.close()


class EmbeddedHost(EngineHost[EmbeddedSGLang]):
    """SGLang in this process, started by the constructor and stopped by `close`; call both in the main thread.

    When one of SGLang's processes fails, it sends SIGQUIT to the process that started it. Without a handler, the signal
    would end this process without a message.
    """

    def __init__(self, options: ServerOptions, sglang: SGLangSpec) -> None:
        self._options = options
        self._sglang = sglang
        self.spool = options.spool
        self.layer_ids = options.layer_ids
        self.version = require_sglang_here()
        if options.layer_ids:
            require_capturing(self.version, f"this Python, {sys.executable},")
        self.client = self._make_client()
        self._previous_handler = signal.signal(signal.SIGQUIT, self._note_failure)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def require_running(self) -> None:
        self.client.require_sound()

    def revive(self, error: EngineError) -> None:
        log.warning("%s\nSGLang is restarted", error)
        self.client.close()
        self.client = self._make_client()
        self._start()

    def close(self) -> None:
        self.client.close()
        shutil.rmtree(self.spool, ignore_errors=True)
        signal.signal(signal.SIGQUIT, self._previous_handler)

    def _make_client(self) -> EmbeddedSGLang:
        timeouts = (self._sglang.start_timeout_s, self._sglang.request_timeout_s, self._sglang.grace_s)
        return EmbeddedSGLang(self._options, *timeouts)

    def _start(self) -> None:
        shutil.rmtree(self.spool, ignore_errors=True)
        log.info("starting SGLang in this process")
        self.client.start()

    def _note_failure(self, signum: int, frame: FrameType | None) -> None:
        self.client.fail("one of its processes failed; its own messages are in this log")


PROBE_TOKENS = 64
PROBE_TEXT = "Zwölf naïve def f(x):\n\treturn x**2  # 3.14159 — 你好, 12345"


def require_server(
    client: SGLangClient, target: TargetFiles, capture: CaptureSpec, layer_ids: tuple[int, ...], longest: int = 0
) -> ServerInfo:
    """Return the server's information after checking that it matches the registry.

    Args:
        longest: number of tokens of the longest sequence that will be requested; 0 if it is not known.

    Raises:
        ConfigError: a capture is configured, and the server cannot return hidden states.
        EngineError: the server serves another model or in another dtype, or is set up so that hidden states get lost.
            The message names every difference and the argument that corrects it.
    """
    info = client.get_info()
    where = f"SGLang at {client.url}"
    SGLANG.check_version(info.version, where)
    if layer_ids:
        require_capturing(info.version, where)
    if info.layer_ids:
        layers = resolve_captured_layers(info.layer_ids, info.convention, read_architecture(target))
        info = replace(info, layer_ids=layers)
    problems = _find_model_problems(info, target, capture)
    if info.context is not None and info.context <= longest:
        problems.append(
            f"its context is {info.context} tokens, expected more than {longest}: --context-length {longest + 16}"
        )
    if layer_ids:
        convention = choose_capture_convention(read_architecture(target))
        problems += _find_capture_problems(info, layer_ids, convention)
        problems += _find_hand_over_problems(info, capture.server.spool)
    if problems:
        raise EngineError(
            "\n".join([f"{where} cannot be used for target {target.name}:", *(f"  {p}" for p in problems)])
        )
    return info


def probe_server(engine: TargetEngine, client: SGLangClient, target: TargetFiles, captures: bool) -> None:
    """Check with test requests that the server uses the target's tokenizer and weights and keeps all hidden states.

    Raises:
        EngineError: its tokenizer gives other ids, it lost positions of a prompt that it had seen before, or its logits
            differ from those of the registry's head on its own hidden states.
    """
    where = f"SGLang at {client.url} cannot be used for target {target.name}"
    expected, found = _tokenize_probe(target), client.tokenize(PROBE_TEXT)
    if expected != found:
        raise EngineError(
            f"{where}: its tokenizer gives {found[:8]}… for {PROBE_TEXT[:12]!r}…, that of the registry "
            f"({target.tokenizer}) {expected[:8]}…"
        )
    if not captures:
        return
    sequence = [(7919 * (index + 1)) % target.vocab_size for index in range(min(PROBE_TOKENS, target.context))]
    try:
        engine.capture([sequence], [])
        repeated = engine.capture([sequence], [])[0]  # now a prefix could come from the cache
        check_head(engine, ["probe"], [sequence], [repeated["last"]])
    except CaptureError as error:
        raise EngineError(f"{where}: {error}") from error


def _find_model_problems(info: ServerInfo, target: TargetFiles, capture: CaptureSpec) -> list[str]:
    problems = []
    expected = capture.server.model or target.model
    if not _is_same_model(info.model, expected):
        started = f" (it was started with {info.started_with})" if info.started_with != info.model else ""
        problems.append(
            f"it serves the model {info.model}{started}, expected {expected}. If it is the same model under another "
            "name, set capture.server.model to that name; what it captures is still compared with the registry's "
            "weights"
        )
    elif capture.server.model is None and info.revision != target.revision:
        problems.append(f"it serves revision {info.revision}, expected {target.revision}: --revision {target.revision}")
    if info.dtype != capture.compute_dtype:
        problems.append(
            f"it computes in {info.dtype}, expected {capture.compute_dtype}: --dtype {capture.compute_dtype}"
        )
    undeclared = {
        name: value for name, value in info.numerics.items() if not {name, f"{name}={value}"} & {*capture.server.args}
    }
    for name, value in undeclared.items():
        problems.append(
            f"it runs with {name} {value}, which changes its numerical results: start it without that argument, or "
            f"make it part of the feature keys by capture.server.args: [{name}, {value}]"
        )
    return problems


def _find_capture_problems(info: ServerInfo, layer_ids: tuple[int, ...], convention: str) -> list[str]:
    problems = []
    if info.radix_cache:
        problems.append("its prefix cache is on, and a cached prefix has no hidden states: --disable-radix-cache")
    if info.chunked_prefill:
        problems.append(
            "it cuts long prompts into chunks and loses hidden states between them: --chunked-prefill-size -1"
        )
    if info.attention_dp > 1:
        problems.append(
            f"it has {info.attention_dp} groups of attention data parallelism, and only the first rank of all writes "
            "hidden states: start it without --attn-dp-size and --enable-dp-attention"
        )
    lacking = sorted(set(layer_ids) - set(info.layer_ids or ()))
    if lacking:
        problems.append(
            f"it captures the layers {list(info.layer_ids or ())}, expected {list(layer_ids)} among them: "
            f"--enable-return-aux-hidden-states --speculative-algorithm {convention} "
            "--return-aux-hidden-state-layer-ids " + " ".join(map(str, layer_ids))
        )
    return problems


def _find_hand_over_problems(info: ServerInfo, spool_name: str | None) -> list[str]:
    """Return what is wrong with the way of hidden states: through the folder `spool_name`, or through Mooncake."""
    problems = []
    if spool_name is None:
        if not info.mooncake:
            problems.append(
                f"its hook writes to {info.spool or 'nowhere (it is not loaded)'}, expected Mooncake: --forward-hooks "
                f"'{format_hook_option(Path(), Path('ADDRESS_FILE'))}', with the address file of capture.server.mooncake as "
                "that machine has it"
            )
        return problems
    spool = Path(spool_name)
    if info.spool is None or info.spool.resolve() != spool.resolve():
        problems.append(
            f"its hook writes to {info.spool or 'nowhere (it is not loaded)'}, expected {spool}: "
            f"--forward-hooks '{format_hook_option(spool)}', with the package draftworks on its PYTHONPATH"
        )
    if not spool.is_dir():
        problems.append(f"the folder capture.server.spool, {spool}, does not exist: create it")
    return problems


def _is_same_model(found: str, expected: str) -> bool:
    return found == expected or (Path(expected).is_dir() and Path(found).resolve() == Path(expected).resolve())


def _tokenize_probe(target: TargetFiles) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.tokenizer, revision=target.tokenizer_revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"target {target.name}: tokenizer {target.tokenizer} cannot be read: {error}") from error
    return tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
