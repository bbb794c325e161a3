from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsdp_worker import make
from safetensors.torch import load_file, save_file

from draftworks.drafts.strategy import StepContext

WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.mark.parametrize("name", ["eagle3", "dflash", "domino"])
def test_two_sharded_ranks_sum_to_the_gradients_of_one_process(name, make_sample, vocab, tmp_path):
    samples = [make_sample([0, 0] + [1] * 10, 0), make_sample([0, 1, 1, 1, 1, 1], 1)]
    for rank, sample in enumerate(samples):
        save_file(sample, tmp_path / f"sample{rank}.safetensors")
    vocab.save(tmp_path / "vocab.safetensors")
    command = [sys.executable, str(WORKER)]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path), name]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]

    strategy = make(name, vocab)
    strategy.forward_loss(strategy.collate(samples, ["0", "1"]), StepContext()).loss_sum.backward()
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        found = load_file(tmp_path / f"{dtype}.safetensors")
        for parameter_name, parameter in strategy.model.named_parameters():
            error = torch.linalg.vector_norm(found[parameter_name] - parameter.grad)
            assert error <= tolerance * torch.linalg.vector_norm(parameter.grad), (dtype, parameter_name)
