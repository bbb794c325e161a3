"""Futures of daemon threads: work that may block forever and must not keep the program from exiting."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

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


def transform_result(future: Future[Result], transform: Callable[[Result], Other]) -> Future[Other]:
    """Return the future of `transform(result)`, computed in the thread that completes `future`."""
    transformed: Future[Other] = Future()
    future.add_done_callback(lambda done: _fill(transformed, lambda: transform(done.result()), (), {}))
    return transformed


class BackgroundWorker:
    """One daemon thread that does what is submitted, in order. It runs only while there is work."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
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

    def stop(self) -> None:
        """Cancel what waits, and interrupt what runs as a signal would: between two steps of Python code.

        A thread that is inside torch while the interpreter ends would abort the process.
        """
        with self._changed:
            thread, dropped = self._thread, list(self._waiting)
            self._waiting.clear()
        for future, _ in dropped:
            future.cancel()
        if thread is not None and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_StoppedError))
            thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            while (entry := self._wait_for_work()) is not None:
                future, work = entry
                _fill(future, work, (), {})
                del entry, future, work  # a result is not kept until the next one comes
        except _StoppedError:
            with self._changed:
                self._thread = None

    def _wait_for_work(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            if not self._waiting:
                self._changed.wait(_IDLE_S)
            if not self._waiting:
                self._thread = None
                return None
            return self._waiting.popleft()


class _StoppedError(BaseException):
    """Raised inside the thread of a worker that is stopped."""


def _fill(future: Future[Any], work: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        result = work(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
        if isinstance(error, _StoppedError):
            raise
    else:
        future.set_result(result)
