"""vLLM inside this process: one `LLMEngine` on its own thread, which steps it while there is work.

A worker copies the hidden states of a finished request at the engine's next step, after its answer. So the thread steps on
until the scheduler has nothing left; `LLM.generate` stops before, and loses those of the last requests.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, NoReturn

from draftworks.errors import CaptureError, ConfigError, DraftworksError, EngineError
from draftworks.servers.client import GenerateRequest, Generation
from draftworks.servers.environment import set_environment
from draftworks.vllm.server import VLLMServerOptions

WHERE = "vLLM in this process"
_POLL_S = 0.5
"""Interval at which a thread that waits for an answer checks whether the engine has failed or was closed."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Batch:
    """Requests of one call, the answers that have come by request id, and the future of all of them."""

    requests: Sequence[GenerateRequest]
    answers: dict[str, Generation] = field(default_factory=dict)
    done: Future[list[Generation]] = field(default_factory=Future)


class EmbeddedVLLM:
    """One engine that any number of threads can use; it computes in this process, on one thread.

    Where this process is a rank of several, or the target is on several GPUs, vLLM starts processes of its own.

    Args:
        options: the same options that a server would be started with.
        start_timeout_s: seconds until it has to be ready.
        request_timeout_s: seconds until it has to have answered.
        grace_s: seconds for an orderly shutdown.
        in_process: whether the engine's core runs in this process; else in one that vLLM starts.
    """

    def __init__(
        self,
        options: VLLMServerOptions,
        start_timeout_s: float,
        request_timeout_s: float,
        grace_s: float,
        in_process: bool = True,
    ) -> None:
        self._options = options
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self._grace_s = grace_s
        self._in_process = in_process
        self._asked: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._running: dict[str, _Batch] = {}
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_thread, name="vllm-engine", daemon=True)
        self._fault: str | None = None

    def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises:
            ConfigError: vLLM does not know one of the arguments.
            EngineError: it failed, or was not ready in time.
        """
        self._thread.start()
        try:
            self._ready.result(self._start_timeout_s)
        except TimeoutError as error:
            self.fail("it was not ready in time")
            raise EngineError(
                f"{WHERE} was not ready within {self._start_timeout_s:g} s (vllm.start_timeout_s of the deployment)"
            ) from error

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Return one answer for each request, in their order; the engine processes them together with those of others.

        Raises:
            EngineError: it failed, was closed, or did not answer in time.
            CaptureError: it refuses a request.
        """
        self.require_sound()
        batch = _Batch(requests)
        self._asked.put(batch)
        deadline = time.monotonic() + self._request_timeout_s
        while not wait([batch.done], timeout=_POLL_S).done:
            self.require_sound()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{WHERE} did not answer within {self._request_timeout_s:g} s (vllm.request_timeout_s of the deployment)"
                )
        return batch.done.result()

    def fail(self, reason: str) -> None:
        """Make all waiting and later calls of `generate` fail with this reason; the first reason is kept."""
        self._fault = self._fault or reason

    def require_sound(self) -> None:
        """Raise EngineError if it has failed or was closed."""
        if self._fault is not None:
            raise EngineError(f"{WHERE} cannot answer any more: {self._fault}")

    def close(self) -> None:
        """End the engine, after the step that it is at."""
        self.fail("the engine was closed")
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join(self._grace_s)

    def _run_thread(self) -> None:
        """Create the engine, answer until `close`, then shut it down; the body of the thread."""
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self._in_process else "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        try:
            with set_environment(self._options.build_environment() | own):
                engine = _make_engine(self._options)
        except DraftworksError as error:
            self._ready.set_exception(error)
            return
        except BaseException as error:
            message = f"{WHERE} did not start: {type(error).__name__}: {error}. Its own messages are above in this log"
            self._ready.set_exception(EngineError(message))
            return
        self._ready.set_result(None)
        try:
            self._answer(engine)
        except BaseException as error:
            log.exception("%s failed", WHERE)
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            _shut_down(engine, self._in_process)

    def _answer(self, engine: Any) -> None:
        core = getattr(engine.engine_core, "engine_core", None)  # in a process of its own the core steps by itself
        while True:
            batch: _Batch | None = None
            busy = engine.has_unfinished_requests() or (core is not None and core.scheduler.has_requests())
            if not busy or not self._asked.empty():
                batch = self._asked.get()
                if batch is None:
                    return
                self._add(engine, batch)
                continue
            for output in engine.step():
                if output.finished:
                    self._note_answer(output)

    def _add(self, engine: Any, batch: _Batch) -> None:
        import vllm as installed  # installed in vLLM's environment only

        vllm: Any = installed
        added: list[str] = []
        try:
            for request in batch.requests:
                prompt = {"prompt_token_ids": list(request.input_ids)}
                engine.add_request(request.request_id, prompt, vllm.SamplingParams(**request.sampling))
                added.append(request.request_id)
        except (ValueError, TypeError) as error:
            engine.abort_request(added)
            batch.done.set_exception(CaptureError(f"{WHERE} refused a request: {error}"))
            return
        self._running.update(dict.fromkeys(added, batch))
        if not added:
            batch.done.set_result([])

    def _note_answer(self, output: Any) -> None:
        batch = self._running.pop(output.request_id, None)
        if batch is None:  # of a batch that vLLM refused
            return
        batch.answers[output.request_id] = read_output(output)
        if len(batch.answers) == len(batch.requests):
            batch.done.set_result([batch.answers[request.request_id] for request in batch.requests])


def read_output(output: Any) -> Generation:
    """Return the answer in vLLM's `RequestOutput`, with the logits of its first token if they were asked for."""
    (answer,) = output.outputs
    logits: list[float] | None = None
    if answer.logprobs:
        first = answer.logprobs[0]
        logits = [first[token].logprob for token in range(len(first))]
    return Generation(tuple(answer.token_ids), str(answer.finish_reason), output.num_cached_tokens or 0, logits)


def _make_engine(options: VLLMServerOptions) -> Any:
    """Create an engine from the same arguments that a server would be started with."""
    import vllm as installed  # installed in vLLM's environment only
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore[reportMissingImports]

    vllm: Any = installed

    class Parser(FlexibleArgumentParser):  # pyright: ignore[reportUntypedBaseClass]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"capture.server.args: {message}")

    parser = vllm.EngineArgs.add_cli_args(Parser(prog="vllm"))
    parsed = parser.parse_args(options.build_engine_arguments())
    return vllm.LLMEngine.from_engine_args(vllm.EngineArgs.from_cli_args(parsed))


def _shut_down(engine: Any, in_process: bool) -> None:
    """End an engine, so that this process can create another. Process groups of another program's own are left alone."""
    from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    try:
        engine.engine_core.shutdown()
        if in_process:
            cleanup_dist_env_and_memory()
    except Exception:
        log.exception("%s could not be shut down in order", WHERE)
