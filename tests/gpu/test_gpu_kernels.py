"""Attention kernels on a device: every back end is the written-out one, and a packed row is its documents by themselves."""

from __future__ import annotations

import pytest
import torch
from gpu_toys import gpu_only
from torch import Tensor

from draftworks.drafts.anchors import Blocks, place_blocks
from draftworks.drafts.attention import DraftAttention, KeyValue, Window, flex_works
from draftworks.drafts.documents import Documents
from draftworks.strategies.eagle3.attention import (
    fused_kernel_works,
    fused_ttt_attention,
    packed_kernel_works,
    ttt_attention,
)

LENGTHS = (170, 65, 65, 40)
FP32, HALF = 1e-4, 0.03
"""Of a difference's norm, relative: of numbers of four bytes, and of two."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unroll(documents: Documents, steps: int, head_size: int) -> list[Tensor]:
    """Query, keys and values of some steps, heads 4 and 2."""
    length = sum(documents.lengths)
    heads = [4, 2, *[4] * (steps - 1), 2, *[4] * (steps - 1)]
    return [drawn(2, length, count, head_size, seed=i).transpose(1, 2) for i, count in enumerate(heads)]


def with_gradients(attend, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attend(leaves)
    return [x.detach().float().cpu() for x in (output, *torch.autograd.grad(output.float().square().sum(), leaves))]


def assert_all_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= tolerance * float(other.norm())


def test_a_packed_row_is_its_documents_by_themselves(device):
    dtype, tolerance = (torch.float32, FP32) if device.type == "cpu" else (torch.bfloat16, HALF)
    documents = Documents.from_lengths(LENGTHS, device)
    inputs = [x.to(device, dtype) for x in unroll(documents, 3, 64)]
    assert fused_kernel_works(device, dtype, 64)
    together = with_gradients(lambda x: fused_ttt_attention(x[0], x[1:4], x[4:], documents), inputs)
    alone = []
    for parts in zip(*(x.split(LENGTHS, dim=2) for x in inputs), strict=True):
        one = Documents.from_lengths((parts[0].shape[2],), device)
        alone.append(with_gradients(lambda x, one=one: fused_ttt_attention(x[0], x[1:4], x[4:], one), list(parts)))
    assert_all_near(together, [torch.cat(parts, dim=2) for parts in zip(*alone, strict=True)], tolerance)


@gpu_only
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 128])
def test_a_gpu_has_the_kernels_that_are_taken_without_being_asked_for(cuda, dtype, head_size):
    assert fused_kernel_works(cuda, dtype, head_size)
    assert packed_kernel_works(cuda, dtype, head_size)
    assert flex_works(cuda, dtype, head_size)


@gpu_only
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, HALF), (torch.bfloat16, HALF), (torch.float32, FP32)])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex"])
def test_unrolled_attention_is_the_written_out_one(cuda, backend, dtype, tolerance):
    documents = Documents.from_lengths(LENGTHS, cuda)
    inputs = [x.to(cuda, dtype) for x in unroll(documents, 3, 64)]
    exact = [x.float() for x in inputs]
    found, expected = (
        with_gradients(lambda x, name=name: ttt_attention(x[0], x[1:4], x[4:], documents, name), given)
        for name, given in ((backend, inputs), ("eager", exact))
    )
    assert_all_near(found, expected, tolerance)


@gpu_only
@pytest.mark.parametrize("window", [None, Window(40), Window(40, True)], ids=str)
@pytest.mark.parametrize("size", [7, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, HALF), (torch.float32, FP32)])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex"])
def test_block_attention_is_the_written_out_one(cuda, backend, dtype, tolerance, size, window):
    blocks = blocks_on(cuda, size)
    shapes = [(4, blocks.count * size), *[(2, sum(LENGTHS))] * 2, *[(2, blocks.count * size)] * 2]
    inputs = [drawn(1, *shape, 64, seed=i).to(cuda, dtype) for i, shape in enumerate(shapes)]

    def attend(x: list[Tensor], name: str) -> Tensor:
        attention = DraftAttention(blocks.make_seen_keys(sum(LENGTHS)), name)
        return attention(x[0], KeyValue(*x[1:3]), KeyValue(*x[3:]), window)

    exact = [x.float() for x in inputs]
    found, expected = (
        with_gradients(lambda x, name=name: attend(x, name), given)
        for name, given in ((backend, inputs), ("eager", exact))
    )
    assert_all_near(found, expected, tolerance)


def blocks_on(device: torch.device, size: int) -> Blocks:
    """At every third place of a packed row."""
    candidates = torch.arange(sum(LENGTHS), device=device)[None] % 3 == 0
    return place_blocks(candidates, size, Documents.from_lengths(LENGTHS, device))
