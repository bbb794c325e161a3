"""What is compiled for many kinds of arguments is, and flex attention that cannot be compiled says why."""

from __future__ import annotations

import logging
import subprocess

import pytest
import torch

from draftworks.drafts import flex
from draftworks.drafts.layers import compile_for_many_kinds

KINDS = [torch.ones([2] * dimensions) for dimensions in range(1, 13)]


def test_more_kinds_of_arguments_than_torch_allows_by_itself_are_compiled():
    ran = []

    def recorded(graph, _inputs):
        def run(*args):
            ran.append(graph)
            return graph.forward(*args)

        return run

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    fast = compile_for_many_kinds(twice, backend=recorded)
    assert all(torch.equal(fast(kind), kind * 2) for kind in KINDS)
    assert len(ran) == len(set(ran)) == len(KINDS) > torch._dynamo.config.recompile_limit


@pytest.mark.parametrize(
    "fault", [subprocess.CalledProcessError(1, ["cc", "-I/usr/include"]), RuntimeError("no Triton")]
)
def test_flex_that_cannot_be_compiled_says_why(monkeypatch, caplog, fault):
    def failing(*_args):
        raise fault

    monkeypatch.setattr(flex, "_flex_equals_sdpa", failing)
    with caplog.at_level(logging.WARNING):
        assert not flex.flex_works.__wrapped__(torch.device("cuda"), torch.bfloat16, 128)
    assert type(fault).__name__ in caplog.text
    assert "using sdpa, which is slower" in caplog.text
