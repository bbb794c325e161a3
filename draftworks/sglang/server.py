"""SGLang server as a child process: start, readiness, log and stop; it ends at the latest with this process."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from draftworks.distributed import stop_signals
from draftworks.errors import ConfigError, EngineError
from draftworks.sglang import server_start
from draftworks.sglang.environment import LAUNCHER_VARIABLES, link_package, require_capturing, require_version
from draftworks.sglang.hook import format_hook_option
from draftworks.sglang.server_start import build_command
from draftworks.sglang.speculation import Speculation
from draftworks.storage.http_call import HttpAnswer, HttpClient, NoAnswerError

LOOPBACK = "127.0.0.1"
LOG_TAIL_LINES = 30
_LOG_TAIL_BYTES = 32 << 10
_POLL_S = 0.25
_ANSWER_TIMEOUT_S = 10
_LOG_EVERY_S = 30.0
_SPARE_CONTEXT = 16
"""Positions added to the context: SGLang reserves some, and a sample as long as the target's context has to fit."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerOptions:
    """Options of an SGLang server; an Engine in this process takes the same.

    Attributes:
        layer_ids: layers (0-based) whose outputs are captured, ascending; empty for a server that only generates.
        spool: where hidden states are written; see draftworks.handover.spool.
        device: `cpu` or `cuda`.
        dp_size: number of copies of the target in the server, each on `tp_size` GPUs.
        first_gpu: index of the first of the server's GPUs.
        draft: draft to speculate with; None on a server that captures.
        convention: speculative algorithm by whose convention SGLang counts `layer_ids`.
        mooncake: address file of the Mooncake store that hidden states go through instead of the spool.
        host: address of this machine that the server listens on.
        key_file: file with the key that every request has to carry; None for a server without a key.
    """

    model: str
    revision: str | None
    tokenizer: str
    context: int
    dtype: str
    device: str
    layer_ids: tuple[int, ...]
    spool: Path
    tp_size: int = 1
    dp_size: int = 1
    first_gpu: int = 0
    mem_fraction: float | None = None
    max_total_tokens: int | None = None
    extra: tuple[str, ...] = ()
    draft: Speculation | None = None
    convention: str = "EAGLE3"
    mooncake: Path | None = None
    host: str = LOOPBACK
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if self.draft is not None and self.layer_ids:
            raise ConfigError("a server captures hidden states or speculates, not both: SGLang has one option for both")

    @property
    def gpus(self) -> int:
        """Number of ranks of the server; on a CPU each rank has one core."""
        return self.tp_size * self.dp_size

    def build_arguments(self, port: int) -> list[str]:
        """Return the arguments of `sglang.launch_server`.

        The prefix cache and chunked prefill are off, because a cached prefix or a chunked prompt loses hidden states.
        """
        values: dict[str, str | int | float | None] = {
            "--model-path": self.model,
            "--revision": self.revision,
            "--tokenizer-path": self.tokenizer,
            "--host": self.host,
            "--port": port,
            "--device": self.device,
            "--dtype": self.dtype,
            "--context-length": self.context + _SPARE_CONTEXT,
            "--tp-size": self.tp_size,
            "--dp-size": self.dp_size if self.dp_size > 1 else None,
            "--base-gpu-id": self.first_gpu if self.device == "cuda" else None,
            "--mem-fraction-static": self.mem_fraction,
            "--max-total-tokens": self.max_total_tokens,
            "--chunked-prefill-size": -1,
        }
        words = [str(word) for name, value in values.items() if value is not None for word in (name, value)]
        purpose = self._build_capture_arguments() if self.draft is None else self.draft.build_arguments(self.device)
        return [*words, "--disable-radix-cache", "--sleep-on-idle", *purpose, *self.extra]

    def build_environment(self) -> dict[str, str]:
        """Return the environment variables that SGLang's processes need in addition to the inherited ones."""
        own = {
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        if self.key_file is not None:
            own[server_start.VARIABLE] = str(self.key_file)
        if self.revision is None:
            own["HF_HUB_OFFLINE"] = "1"
        if self.device == "cpu" and self.gpus > 1:
            own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.gpus)))  # one core for each rank
        return own if self.draft is None else own | self.draft.build_environment(self.device)

    def read_key(self) -> str | None:
        """Return the key that requests have to carry; None if there is none."""
        return None if self.key_file is None else server_start.read_key(self.key_file)

    def _build_capture_arguments(self) -> list[str]:
        if not self.layer_ids:
            return []
        capture = ["--enable-return-aux-hidden-states", "--speculative-algorithm", self.convention]  # without a draft
        layers = ["--return-aux-hidden-state-layer-ids", *map(str, self.layer_ids)]
        # A replayed CUDA graph calls no hook, and hidden states are captured in the prefill.
        graphs = ["--disable-prefill-cuda-graph"] if self.device == "cuda" else []
        return [*capture, *layers, *graphs, "--forward-hooks", format_hook_option(self.spool, self.mooncake)]


class SGLangServer:
    """One server on an address of this machine, which is that of the loopback interface unless the options say so.

    Args:
        python: Python of the environment that SGLang is installed in.
        folder: folder for the log, a link to this package and the script that starts the server's processes; created if
            absent. No other server may use it at the same time.
        start_timeout_s: seconds until the server has to be ready.
        grace_s: seconds between the request to end and the kill.
        port: None chooses a port that is free when the server starts.
    """

    def __init__(
        self,
        python: Path,
        options: ServerOptions,
        folder: Path,
        start_timeout_s: float,
        grace_s: float,
        port: int | None = None,
    ) -> None:
        self._python = python
        self._options = options
        self._folder = folder
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends a server when the *thread* that started it ends, so this object keeps a thread for that.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sglang-starter")
        self.url = ""
        self.version = ""

    @property
    def log(self) -> Path:
        return self._folder / "sglang.log"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait until it serves.

        Raises:
            ConfigError: `python` has no SGLang, or one that cannot return the hidden states to be captured.
            EngineError: the server ended or was not ready in time (the message has the end of its log), or another
                server has its port.
        """
        self.version = require_version(self._python)
        if self._options.layer_ids:
            require_capturing(self.version, f"{self._python}")
        port = self._port or find_free_port(self._options.host)
        self.url = format_url(self._options.host, port)
        for folder in (self._folder, self._options.spool):
            folder.mkdir(parents=True, exist_ok=True)
        launcher = build_command(self._folder.resolve(), "sglang.launch_server")
        command = [str(self._python), *launcher, *self._options.build_arguments(port)]
        self._process = self._starter.submit(self._spawn, command).result()
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def is_running(self) -> bool:
        process = self._process  # a local copy, because another thread may be in `stop`
        return process is not None and process.poll() is None

    def stop(self) -> None:
        """End the server and all its processes: SIGTERM first, then a kill after `grace_s` seconds."""
        process = self._process
        if process is None:
            return
        tree = _list_descendants(process.pid)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            tree = {*tree, *_list_descendants(process.pid)}
            process.kill()
            process.wait()
        for process_left in tree:
            with suppress(psutil.Error):
                process_left.kill()
        psutil.wait_procs(tree, timeout=self._grace_s)
        self._process = None

    def read_log_tail(self) -> str:
        """Return the last lines of the server's log, indented."""
        with self.log.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = stream.read().decode("utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*stop_signals.build_shim_command(), *command],
                env=self._build_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        started = logged = time.monotonic()
        while time.monotonic() < started + self._start_timeout_s:
            if time.monotonic() > logged + _LOG_EVERY_S:
                logged = time.monotonic()
                log.info("SGLang has been starting for %.0f s; its own messages are in %s", logged - started, self.log)
            if not self.is_running():
                code = self._process.returncode if self._process else None
                raise EngineError(
                    f"SGLang ended with code {code} before it was ready. The end of {self.log}:\n{self.read_log_tail()}"
                )
            if self._is_ready():
                return
            time.sleep(_POLL_S)
        raise EngineError(
            f"SGLang was not ready within {self._start_timeout_s:g} s (sglang.start_timeout_s of the deployment). "
            f"The end of {self.log}:\n{self.read_log_tail()}"
        )

    def _is_ready(self) -> bool:
        headers = server_start.build_headers(self._options.read_key())
        with suppress(NoAnswerError), HttpClient(self.url, _ANSWER_TIMEOUT_S, headers) as http:
            if http.call("GET", "/health").is_success:
                self._require_ours(http.call("GET", "/server_info"))
                return True
        return False

    def _require_ours(self, answer: HttpAnswer) -> None:
        """Raise EngineError unless the answer of /server_info comes from the server that was started.

        The port was free when it was chosen, but another server may have taken it before SGLang did.

        Raises:
            EngineError: the server that answers serves another model, or captures to another spool, as another server
                of the same model does.
        """
        found = _parse_object(answer)
        expected: dict[str, Any] = {"model_path": self._options.model}
        if self._options.layer_ids:
            expected["forward_hooks"] = json.loads(format_hook_option(self._options.spool, self._options.mooncake))
        served = {name: found.get(name) for name in expected}
        if served != expected:
            raise EngineError(
                f"{self.url} is answered by another server than the one that was started: expected {expected}, found "
                f"{served}. It took the port before SGLang did: run again, and another free port is chosen"
            )

    def _build_environment(self) -> dict[str, str]:
        """Return this process's environment without its process group's variables, and with this package on PYTHONPATH.

        SGLang imports its hook from there. The folder on PYTHONPATH has only a link to the package, so that SGLang sees
        none of the libraries that are installed beside it.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
        package = link_package(self._folder / "package")
        return {**inherited, "PYTHONPATH": str(package), **self._options.build_environment()}


def find_free_port(host: str = LOOPBACK) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])


def format_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _parse_object(answer: HttpAnswer) -> dict[str, Any]:
    """Return the JSON object of an answer; empty if the answer is not a JSON object."""
    try:
        found = answer.parse()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _list_descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()
