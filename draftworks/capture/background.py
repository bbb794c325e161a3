"""Futures of daemon threads: work that may block forever and must not keep the program from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def run_in_background(
    work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Future[Result]:
    """Run `work` in its own daemon thread and return the future of its result.

    An executor would wait for its threads when the program ends, and closing an HTTP client does not wake the threads
    that read a response from it.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="background", daemon=True).start()
    return future
