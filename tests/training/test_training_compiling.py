"""Compiled blocks: the same weights to rounding, and where nothing can be compiled a training that says so and goes on."""

from __future__ import annotations

import logging

import pytest
import torch
from training_toys import HIDDEN, ToyStrategy, eval_loader, ragged_samples, train_loader

from draftworks.config.registry_files import TrainingSpec
from draftworks.training.trainer import Trainer, compile_blocks

CPU = torch.device("cpu")
SPEC = TrainingSpec(global_batch_size=4, max_steps=3, lr=0.02, compute_dtype="float32")


def trained(spec: TrainingSpec) -> dict[str, torch.Tensor]:
    strategy, samples = ToyStrategy(), ragged_samples(12)
    trainer = Trainer(strategy, train_loader(strategy, samples, 4, 4), eval_loader(strategy, samples, 4), spec, CPU)
    trainer.fit()
    return trainer.weights()


def no_compiler(*_args, **_kwargs):
    raise RuntimeError("no compiler for you\nand a long trace")


@pytest.mark.usefixtures("one_rank")
def test_compiled_trains_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_function = [], torch.compile

    def traced(function, **_options):
        """All of torch.compile but the compiler, which takes its time; tests/gpu has it do its work."""
        compiled.append(function)
        return compile_function(function, backend="aot_eager")

    expected = trained(SPEC)
    monkeypatch.setattr(torch, "compile", traced)
    found = trained(SPEC.model_copy(update={"compile": True}))
    assert [function.__name__ for function in compiled] == ["<lambda>", "forward"]
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_without_a_compiler_the_training_says_so_and_goes_on(monkeypatch, caplog) -> None:
    expected = trained(SPEC)
    monkeypatch.setattr(torch, "compile", no_compiler)
    with caplog.at_level(logging.WARNING):
        found = trained(SPEC.model_copy(update={"compile": True}))
    assert "training.compile: torch.compile does not work here on cpu" in caplog.text
    assert "RuntimeError: no compiler for you. Install" in caplog.text
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


def test_a_compiler_with_wrong_gradients_is_not_used(caplog) -> None:
    def halves(graph, _inputs):
        return lambda *inputs: tuple(output / 2 for output in graph(*inputs))

    strategy = ToyStrategy()
    with caplog.at_level(logging.WARNING):
        assert not compile_blocks(strategy, CPU, backend=halves)
    assert f"torch {torch.__version__} compiles a small block whose gradient is 0.07148, not 0.2859" in caplog.text
    assert strategy.model.block.forward == type(strategy.model.block).forward.__get__(strategy.model.block)


def test_what_is_compiled_is_training_and_no_evaluation() -> None:
    graphs = []

    def recorded(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    block = (strategy := ToyStrategy()).model.block
    states, plain = torch.randn(2, HIDDEN), block.forward
    assert compile_blocks(strategy, CPU, backend=recorded)
    graphs.clear()
    with torch.no_grad():
        assert torch.equal(block(states), plain(states))
    assert not graphs
    assert torch.equal(block(states), plain(states))
    assert len(graphs) == 1


def test_whether_blocks_are_compiled_does_not_identify_a_training() -> None:
    assert SPEC.to_identity() == SPEC.model_copy(update={"compile": True}).to_identity()
