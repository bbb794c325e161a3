"""SGLang hosts of an engine, and what each must answer before it captures."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from draftworks.capture.engines.hosts import EngineHost
from draftworks.capture.engines.server_hosts import ManagedHost, is_same_model
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import EngineError
from draftworks.sglang.client import ServerInfo, SGLangClient
from draftworks.sglang.embedded import EmbeddedSGLang
from draftworks.sglang.environment import SGLANG, require_capturing
from draftworks.sglang.hook import format_hook_option
from draftworks.sglang.layers import choose_capture_convention, read_architecture, resolve_captured_layers
from draftworks.sglang.server import ServerOptions, SGLangServer

log = logging.getLogger(__name__)


def make_managed_host(python: Path, options: ServerOptions, folder: Path, sglang: SGLangSpec) -> ManagedHost:
    """Return a server that Draftworks runs, not started; see `ManagedHost`."""
    server = SGLangServer(python, options, folder, sglang.start_timeout_s, sglang.grace_s)
    key = options.read_key()

    def connect(url: str) -> SGLangClient:
        return SGLangClient(url, sglang.request_timeout_s, key)

    return ManagedHost(server, connect, options.spool, options.layer_ids)


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
        self.version = SGLANG.require_here()
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


def _find_model_problems(info: ServerInfo, target: TargetFiles, capture: CaptureSpec) -> list[str]:
    problems = []
    expected = capture.server.model or target.model
    if not is_same_model(info.model, expected):
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
