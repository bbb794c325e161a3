"""SGLang inside this process: one `sglang.Engine` on its own thread, and the processes that it starts."""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, NoReturn

import psutil

from draftworks.errors import CaptureError, ConfigError, DraftworksError, EngineError
from draftworks.servers.client import GenerateRequest, Generation
from draftworks.servers.environment import set_environment
from draftworks.servers.process import find_free_port
from draftworks.servers.start import tie_children_to_parent
from draftworks.sglang.client import parse_generation
from draftworks.sglang.server import ServerOptions

WHERE = "SGLang in this process"
_POLL_S = 0.5
"""Interval at which a thread that waits for an answer checks whether the Engine has failed or was closed."""


class EmbeddedSGLang:
    """One Engine that any number of threads can use; its processes end with this process.

    It runs on its own thread for three reasons: an Engine belongs to the event loop that it is created in, on the main
    thread it would replace the signal handlers of this process, and the kernel ends its processes with the thread that
    started them.

    Args:
        options: the same options that a server would be started with.
        start_timeout_s: seconds until it has to be ready.
        request_timeout_s: seconds until it has to have answered.
        grace_s: seconds for an orderly shutdown, before its processes are killed.
    """

    def __init__(
        self, options: ServerOptions, start_timeout_s: float, request_timeout_s: float, grace_s: float
    ) -> None:
        self._options = options
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self._grace_s = grace_s
        self._loop = asyncio.new_event_loop()
        self._engine: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run_thread, name="sglang-engine", daemon=True)
        self._earlier_children = set(psutil.Process().children(recursive=True))
        self._fault: str | None = None

    def start(self) -> None:
        """Start the Engine and wait until it is ready.

        Raises:
            ConfigError: SGLang does not know one of the arguments.
            EngineError: it failed, or was not ready in time.
        """
        self._options.spool.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        try:
            self._engine.result(self._start_timeout_s)
        except TimeoutError as error:
            self.close()
            raise EngineError(
                f"{WHERE} was not ready within {self._start_timeout_s:g} s (sglang.start_timeout_s of the deployment)"
            ) from error
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return one answer for each request, in their order; the Engine processes them together.

        Raises:
            EngineError: it failed, was closed, or did not answer in time.
            CaptureError: it refuses a request.
        """
        self.require_sound()
        generation = self._engine.result(0).async_generate(
            input_ids=[list(request.input_ids) for request in requests],
            sampling_params=[request.sampling for request in requests],
            rid=[request.request_id for request in requests],
        )
        answer = asyncio.run_coroutine_threadsafe(generation, self._loop)
        try:
            self._wait_for(answer)
            return [parse_generation(each) for each in answer.result()]
        except DraftworksError:
            answer.cancel()
            raise
        except ValueError as error:
            raise CaptureError(f"{WHERE} refused a request: {error}") from error
        except Exception as error:
            self.require_sound()  # closing the Engine cancels requests that are still running
            raise EngineError(f"{WHERE} failed: {type(error).__name__}: {error}") from error

    def fail(self, reason: str) -> None:
        """Make all waiting and later calls of `generate` fail with this reason; the first reason is kept."""
        self._fault = self._fault or reason

    def close(self) -> None:
        """End the Engine and all its processes."""
        self.fail("the engine was closed")
        if not self._thread.is_alive():
            return
        if self._engine.done():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._grace_s)
        deadline = time.monotonic() + self._grace_s
        while self._thread.is_alive() and time.monotonic() < deadline:  # an unfinished start may start more of them
            self._kill_processes()
            self._thread.join(_POLL_S)
        self._kill_processes()

    def _run_thread(self) -> None:
        """Create the Engine, run its event loop until `close` stops it, then shut it down; the body of the thread."""
        asyncio.set_event_loop(self._loop)
        try:
            with (
                set_environment(self._options.build_environment()),
                tie_children_to_parent(self._options.spool.parent),
            ):
                engine = _make_engine(self._options)
        except DraftworksError as error:
            self._engine.set_exception(error)
            return
        except BaseException as error:
            message = f"{WHERE} did not start: {type(error).__name__}: {error}. Its own messages are above in this log"
            self._engine.set_exception(EngineError(message))
            return
        self._engine.set_result(engine)
        self._loop.run_forever()
        engine.shutdown()
        waiting = asyncio.all_tasks(self._loop)
        for task in waiting:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))

    def _wait_for(self, answer: Future[Any]) -> None:
        deadline = time.monotonic() + self._request_timeout_s
        while not wait([answer], timeout=_POLL_S).done:
            self.require_sound()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{WHERE} did not answer within {self._request_timeout_s:g} s (sglang.request_timeout_s of the "
                    "deployment)"
                )

    def require_sound(self) -> None:
        """Raise EngineError if it has failed or was closed."""
        if self._fault is not None:
            raise EngineError(f"{WHERE} cannot answer any more: {self._fault}")

    def _kill_processes(self) -> None:
        """Kill all child processes that were started since `__init__`.

        This is safe because this process starts no other children while an Engine runs.
        """
        processes = set(psutil.Process().children(recursive=True)) - self._earlier_children
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=self._grace_s)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"capture.server.args: {message}")


def _make_engine(options: ServerOptions) -> Any:
    """Create an Engine from the same arguments that a server would be started with."""
    import sglang as installed  # installed in SGLang's environment only

    sglang: Any = installed
    logging.getLogger("sglang").setLevel(logging.WARNING)  # for this process; below is SGLang's own level
    parser = _Parser(prog="sglang")
    sglang.ServerArgs.add_cli_args(parser)
    parsed = vars(parser.parse_args(["--log-level", "warning", *options.build_arguments(find_free_port())]))
    return sglang.Engine(**{name: value for name, value in parsed.items() if value != parser.get_default(name)})
