"""An engine's HTTP server as a child process: start, readiness, log and stop; it ends at the latest with this process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import psutil

from draftworks.distributed import stop_signals
from draftworks.errors import EngineError
from draftworks.servers import start
from draftworks.servers.environment import EngineSoftware, hide_process_group, link_package
from draftworks.storage.http_call import HttpAnswer, HttpClient, NoAnswerError

LOOPBACK = "127.0.0.1"
LOG_TAIL_LINES = 30
_LOG_TAIL_BYTES = 32 << 10
_POLL_S = 0.25
_ANSWER_TIMEOUT_S = 10
_LOG_EVERY_S = 30.0
_DYING_S = 5.0
"""A server whose engine ended still answers for a moment, with errors."""
log = logging.getLogger(__name__)


class StartOptions(Protocol):
    """What decides how a server is started."""

    @property
    def host(self) -> str:
        """Address of this machine that the server listens on."""
        ...

    @property
    def key_file(self) -> Path | None:
        """File with the key that every request has to carry; None for a server without a key."""
        ...

    def build_arguments(self, port: int) -> list[str]:
        """Return the arguments of the server's module."""
        ...

    def build_environment(self) -> dict[str, str]:
        """Return the environment variables that the server's processes need in addition to the inherited ones."""
        ...


Options = TypeVar("Options", bound=StartOptions)


class ServerProcess(ABC, Generic[Options]):
    """One server on an address of this machine, which is that of the loopback interface unless the options say so.

    Args:
        python: Python of the environment that the engine is installed in.
        folder: folder for the log, a link to this package and the script that starts the server's processes; created if
            absent. No other server may use it at the same time.
        start_timeout_s: seconds until the server has to be ready.
        grace_s: seconds between the request to end and the kill.
        port: None chooses a port that is free when the server starts.
    """

    SOFTWARE: ClassVar[EngineSoftware]
    MODULE: ClassVar[str]
    """The module that is the server."""
    INFO_PATH: ClassVar[str]
    """Path of an answer from which it is seen whether the server is the one that was started."""

    def __init__(
        self,
        python: Path,
        options: Options,
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
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self.SOFTWARE.key}-starter")
        self.url = ""
        self.version = ""

    @property
    def log(self) -> Path:
        return self._folder / f"{self.SOFTWARE.key}.log"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and wait until it serves.

        Raises:
            ConfigError: `python` has no such engine, or one that cannot do what the options ask for.
            EngineError: the server ended or was not ready in time (the message has the end of its log), or another
                server has its port.
        """
        self.version = self.SOFTWARE.require_version(self._python)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._prepare()
        port = self._port or find_free_port(self._options.host)
        self.url = format_url(self._options.host, port)
        launcher = start.build_command(self._folder.resolve(), self.MODULE)
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

    def explain(self, error: EngineError) -> EngineError:
        """Return what is to be told of a request that failed: the end of the server, if it is that."""
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(min(self._grace_s, _DYING_S))
        return error if self.is_running() else EngineError(self._describe_end(f"while it answered ({error})"))

    def _describe_end(self, when: str) -> str:
        code = None if self._process is None else self._process.returncode
        name = self.SOFTWARE.name
        return f"{name} ended with code {code} {when}. The end of {self.log}:\n{self.read_log_tail()}"

    def read_log_tail(self) -> str:
        """Return the last lines of the server's log, indented."""
        with self.log.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = stream.read().decode("utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])

    def _prepare(self) -> None:
        """Check that this version can do what the options ask for, and make what the server needs. Raises ConfigError."""

    @abstractmethod
    def _expect(self) -> Mapping[str, Any]:
        """Return what the answer of `INFO_PATH` says of the server that was started."""

    def _read_info(self, answer: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of these names in the answer of `INFO_PATH`, which any server may have given."""
        return {name: answer.get(name) for name in names}

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
        name = self.SOFTWARE.name
        started = logged = time.monotonic()
        while time.monotonic() < started + self._start_timeout_s:
            if time.monotonic() > logged + _LOG_EVERY_S:
                logged = time.monotonic()
                log.info(
                    "%s has been starting for %.0f s; its own messages are in %s", name, logged - started, self.log
                )
            if not self.is_running():
                raise EngineError(self._describe_end("before it was ready"))
            if self._is_ready():
                return
            time.sleep(_POLL_S)
        raise EngineError(
            f"{name} was not ready within {self._start_timeout_s:g} s ({self.SOFTWARE.key}.start_timeout_s of the "
            f"deployment). The end of {self.log}:\n{self.read_log_tail()}"
        )

    def _is_ready(self) -> bool:
        key = None if self._options.key_file is None else start.read_key(self._options.key_file)
        with suppress(NoAnswerError), HttpClient(self.url, _ANSWER_TIMEOUT_S, start.build_headers(key)) as http:
            if http.call("GET", "/health").is_success:
                self._require_ours(http.call("GET", self.INFO_PATH))
                return True
        return False

    def _require_ours(self, answer: HttpAnswer) -> None:
        """Raise EngineError unless the answer comes from the server that was started.

        The port was free when it was chosen, but another server may have taken it before the engine did.
        """
        expected = dict(self._expect())
        served = self._read_info(_parse_object(answer), expected)
        if served != expected:
            raise EngineError(
                f"{self.url} is answered by another server than the one that was started: expected {expected}, found "
                f"{served}. It took the port before {self.SOFTWARE.name} did: run again, and another free port is chosen"
            )

    def _build_environment(self) -> dict[str, str]:
        """Return this process's environment without its process group's variables, and with this package on PYTHONPATH.

        Engines import our part of them from there. The folder on PYTHONPATH has only a link to the package, so that they
        see none of the libraries that are installed beside it.
        """
        package = link_package(self._folder / "package")
        own = {"PYTHONPATH": str(package), **self._options.build_environment()}
        if self._options.key_file is not None:
            own[start.VARIABLE] = str(self._options.key_file)
        return {**hide_process_group(dict(os.environ)), **own}


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
