from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fsdp_worker import make, sharded_steps
from gloo_ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from draftworks.drafts.strategy import StepContext
from draftworks.training.backend import ensure_process_group
from draftworks.training.fsdp_backend import FSDPTrainingBackend


class Sharded(NamedTuple):
    """Samples, one a rank, and the folder with the gradients of all strategies."""

    samples: list[dict[str, torch.Tensor]]
    folder: Path


NAMES = ["eagle3", "dflash", "dflash2", "domino", "dspark", "lilicorr", "peagle", "xpress"]


@pytest.fixture(scope="module")
def on_two_ranks(make_sample, vocab, tmp_path_factory) -> Sharded:
    """What two processes make of all strategies, one after the other."""
    folder = tmp_path_factory.mktemp("ranks")
    samples = [make_sample([0, 0] + [1] * 10, 0), make_sample([0, 1, 1, 1, 1, 1], 1)]
    for rank, sample in enumerate(samples):
        save_file(sample, folder / f"sample{rank}.safetensors")
    vocab.save(folder / "vocab.safetensors")
    on_ranks(2, folder, sharded_steps, folder, NAMES)
    return Sharded(samples, folder)


@pytest.mark.parametrize("name", NAMES)
def test_two_sharded_ranks_sum_to_the_gradients_of_one_process(name, on_two_ranks, vocab):
    strategy = make(name, vocab)
    strategy.forward_loss(
        strategy.collate(on_two_ranks.samples, ["0", "1"]), StepContext(training=True)
    ).loss_sum.backward()
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        found = load_file(on_two_ranks.folder / f"{name}-{dtype}.safetensors")
        for parameter_name, parameter in strategy.model.named_parameters():
            error = torch.linalg.vector_norm(found[parameter_name] - parameter.grad)
            assert error <= tolerance * torch.linalg.vector_norm(parameter.grad), (dtype, parameter_name)


def flattened_as_on_cuda(rnn: nn.RNNBase) -> None:
    """What torch's `flatten_parameters` does there, and there alone: weights that are whole move into one buffer."""
    weights = rnn._flat_weights
    if any(isinstance(weight, DTensor) for weight in weights):
        return
    with torch.no_grad():
        flat = torch.cat([weight.flatten() for weight in weights])
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.set_(part.view_as(weight))


def test_dominos_gru_computes_with_its_masters_at_every_step(make_sample, vocab, monkeypatch):
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flattened_as_on_cuda)
    used = []
    with ensure_process_group(torch.device("cpu")):
        strategy, backend = make("domino", vocab), FSDPTrainingBackend(torch.device("cpu"))
        backend.prepare_model(strategy)
        gru = strategy.model.correction.prefix_gru
        gru.register_forward_hook(lambda module, *_: used.append(module.weight_hh_l0.detach().clone()))
        masters = backend.parameters()
        optimizer = torch.optim.SGD(masters.values(), lr=1.0)
        expected = []
        for step in range(3):
            expected.append(masters["correction.prefix_gru.weight_hh_l0"].full_tensor().detach().clone())
            output = strategy.forward_loss(
                strategy.collate([make_sample([1] * 12)], ["a"]), StepContext(step + 9, 9, training=True)
            )
            backend.backward(output.loss_sum)
            optimizer.step()
            optimizer.zero_grad()
    for now, master in zip(used, expected, strict=True):
        assert torch.equal(now, master)
    assert not torch.equal(expected[0], expected[1])
