"""Futures of daemon threads: work that may block forever and must not keep the program from exiting."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

from draftworks.errors import EngineError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Other = TypeVar("Other")

_POLL_S = 0.5
_IDLE_S = 2.0
"""Seconds after which a worker's thread without work ends; the next work starts another one."""
_STOP_S = 20.0


def run_in_background(
    work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Future[Result]:
    """Run `work` in its own daemon thread and return the future of its result.

    An executor would wait for its threads when the program ends, and closing an HTTP client does not wake the threads
    that read a response from it.
    """
    future: Future[Result] = Future()
    threading.Thread(target=_fill, args=(future, work, args, kwargs), name="background", daemon=True).start()
    return future


def await_result(future: Future[Result]) -> Result:
    """Return a future's result. Unlike `Future.result`, a signal that another thread received is handled meanwhile."""
    while not wait([future], timeout=_POLL_S).done:
        pass
    return future.result()


class TransformedFuture(Future[Other]):
    """The future of `transform(result)` of another future, computed in the thread that completes that one."""

    def __init__(self, source: Future[Any], transform: Callable[[Any], Other]) -> None:
        super().__init__()
        self.source = source
        source.add_done_callback(lambda done: _fill(self, lambda: transform(done.result()), (), {}))


class BackgroundWorker:
    """One daemon thread that does what is submitted, in order. It runs only while there is work."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        with self._changed:
            self._waiting.append((future, work))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="background-worker", daemon=True)
                self._thread.start()
        return future

    def cancel(self, futures: Collection[Future[Any]]) -> None:
        """Cancel those that wait, and interrupt the one that runs as a signal would: between two steps of Python code.

        A thread that is inside torch while the interpreter ends would abort the process.
        """
        with self._changed:
            dropped = [entry for entry in self._waiting if entry[0] in futures]
            self._waiting = deque(entry for entry in self._waiting if entry[0] not in futures)
            running = self._running if self._running in futures else None
            if running is None or running.done():
                running = None
            elif self._thread is not None and self._thread.ident is not None:
                ident, stop = ctypes.c_ulong(self._thread.ident), ctypes.py_object(_StoppedError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, stop)
        for future, _ in dropped:
            future.cancel()
        if running is not None:
            wait([running], timeout=_STOP_S)

    def _run(self) -> None:
        going_on = True
        while going_on:
            try:
                going_on = self._run_next()
            except _StoppedError:
                if self._running is not None and not self._running.done():
                    self._running.set_exception(EngineError("what the engine was asked for was cancelled"))

    def _run_next(self) -> bool:
        with self._changed:
            self._running = None
            if not self._waiting:
                self._changed.wait(_IDLE_S)
            if not self._waiting:
                self._thread = None
                return False
            future, work = self._waiting.popleft()
            self._running = future
        _fill(future, work, (), {})
        return True


class _StoppedError(BaseException):
    """Raised inside the thread of a worker whose work is cancelled."""


def _fill(future: Future[Any], work: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        result = work(*args, **kwargs)
    except _StoppedError:
        raise
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
