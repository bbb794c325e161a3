"""torch.compile for functions that are called with many kinds of arguments."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

KINDS = 64
"""Kinds of arguments that a function is compiled for. One batch row or several, one tile or several, a window or none,
two strategies in one process: they multiply.
"""


def compile_for_many_kinds(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, **options)` with room for KINDS kinds of arguments.

    torch's own limit is eight for all functions that share code. Beyond it, it runs them uncompiled, with no more than
    a line in the log: slowly, and flex attention then holds every score.
    """
    fast = torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=KINDS):
            return fast(*args, **kwargs)

    return call


def without_compile(function: Function) -> Function:
    """Return a function at which graphs break: `torch.compiler.disable`, applied when something may be compiled.

    Applied at once it would import torch._dynamo, with sympy and DTensor: two seconds of each program that compiles
    nothing.
    """
    made: list[Function] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not made:
            made.append(cast(Function, torch.compiler.disable(function)))
        return made[0](*args, **kwargs)

    return cast(Function, call)
