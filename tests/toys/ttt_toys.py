"""Queries, keys and values of an unroll over rows of documents."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from draftworks.drafts.documents import Documents


def random_inputs(batch, kv_heads, group, lengths, dim, steps, dtype):
    """For rows that hold documents of these lengths."""
    length = sum(lengths)
    generator = torch.Generator().manual_seed(length + steps)
    full = (batch, length, kv_heads * group, dim)
    shapes = [full, *[(batch, length, kv_heads, dim), *[full] * (steps - 1)] * 2]
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return leaves, [leaf.transpose(1, 2) for leaf in leaves]


def outputs_and_gradients(attend, size, dtype):
    leaves, (query, *rest) = random_inputs(*size, dtype)
    steps = size[-1]
    output = attend(query, rest[:steps], rest[steps:], Documents.from_lengths(size[3]))
    seed = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    return [output, *torch.autograd.grad(output, leaves, seed)]


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple)
sizes = st.tuples(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), lengths, st.integers(1, 9), st.integers(1, 8)
)
