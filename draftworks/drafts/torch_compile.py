"""torch.compile for what is called with many kinds of arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

KINDS = 64
"""Kinds of arguments that a function is compiled for. One row or several, one tile or several, a window or none, two strategies
in one process: they multiply."""


def compile_for_many_kinds(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile(function, **options)` for up to KINDS kinds of arguments.

    torch's own limit is eight of them for all that share a function's code. Any more it runs as they are, with no more than a line
    in the log: slowly, and flex attention then holds every score.
    """
    fast = torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=KINDS):
            return fast(*args, **kwargs)

    return call
