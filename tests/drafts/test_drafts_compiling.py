"""Blocks compiled once serve batches of all shapes: torch compiles a function a few times, and then runs it as it is.
What is compiled for many kinds of arguments is, and flex attention that cannot be compiled says why.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator

import pytest
import torch
from coverings import gate_or_long
from objective_toys import HIDDEN, Case, strategy_of
from torch import fx

from draftworks.drafts import attention
from draftworks.drafts.layers import compile_for_many_kinds
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.features.contracts import TrainBatch
from draftworks.training.trainer import compile_blocks

VOCAB = 32
CASES = [Case("eagle3"), Case("peagle", {"num_layers": 1}), Case("dspark"), Case("peagle", {"num_layers": 3})]
SEEN, NEW = ((14, 4, 9), (13, 10)), ((17, 6), (8, 19, 16))
"""Lengths of the samples of batches."""


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batch_of(strategy: DraftStrategy, lengths: tuple[int, ...]) -> TrainBatch:
    generator, samples = torch.Generator().manual_seed(0), []
    for length in lengths:
        features = {name: torch.randn(length, HIDDEN, generator=generator) for name in strategy.feature_names}
        ids = torch.randint(VOCAB // 2, (length,), generator=generator)
        samples.append({"input_ids": ids, "loss_mask": torch.arange(length) > 1, **features})
    return strategy.collate(samples, [str(number) for number in range(len(samples))])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", gate_or_long(CASES, [Case("eagle3"), Case("peagle", {"num_layers": 1})]), ids=str)
def test_batches_of_other_shapes_need_no_other_code(case: Case) -> None:
    graphs: list[fx.GraphModule] = []

    def recorded(graph: fx.GraphModule, _inputs: list[torch.Tensor]) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    def compiled_for(*batches: tuple[int, ...]) -> int:
        """How many graphs are made for a step on each of these."""
        graphs.clear()
        for step, lengths in enumerate(batches):
            strategy.forward_loss(batch_of(strategy, lengths), StepContext(step, training=True)).loss_sum.backward()
        return len(graphs)

    strategy = strategy_of(case, VOCAB)
    assert compile_blocks(strategy, torch.device("cpu"), recorded)
    assert compiled_for(*SEEN) > 1
    assert compiled_for(*NEW) == 0


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

    monkeypatch.setattr(attention, "_flex_equals_sdpa", failing)
    with caplog.at_level(logging.WARNING):
        assert not attention.flex_works.__wrapped__(torch.device("cuda"), torch.bfloat16, 128)
    assert type(fault).__name__ in caplog.text
    assert "using sdpa, which is slower" in caplog.text
