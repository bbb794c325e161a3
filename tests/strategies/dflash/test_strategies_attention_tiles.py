"""The mask that flex is given says of every query and key what the written-out mask says, and leaves out no tile of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from draftworks.drafts.anchors import Blocks, all_blocks
from draftworks.drafts.documents import Documents
from draftworks.strategies.dflash.attention import BlockAttention, KeyValue, _sees
from draftworks.strategies.dflash.attention_tiles import TILE, SeenKeys
from draftworks.strategies.peagle.attention import _Group, seen_keys
from draftworks.strategies.peagle.chains import Chains

ROWS = {
    "several tiles": ((300,), 2, 90),
    "one tile": ((20,), 3, 5),
    "documents": ((150, 20, 5, 60, 4, 90), 1, 70),
    "blocks across tiles": ((400,), 1, 120),
}


def drawn(lengths: tuple[int, ...], rows: int, anchors: int, size: int) -> Blocks:
    """At random places, another number of them in every row."""
    generator = torch.Generator().manual_seed(anchors)
    length = sum(lengths)
    order = torch.rand(rows, length, generator=generator).argsort(dim=1)
    counts = torch.arange(anchors, anchors - rows, -1)[:, None]
    candidates = torch.zeros(rows, length, dtype=torch.bool).scatter(1, order, torch.arange(length) < counts)
    return all_blocks(candidates, size, Documents.after_each_other(lengths))


def tiles_of(mask: Tensor) -> Tensor:
    """(B, n, m) to (B, tiles, tiles, TILE · TILE), False beyond the edges."""
    rows, columns = (-size % TILE for size in mask.shape[1:])
    cut = F.pad(mask, (0, columns, 0, rows)).unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))
    return cut.transpose(2, 3).flatten(3)


def listed(count: Tensor, which: Tensor) -> Tensor:
    """flex's lists of tiles as bools."""
    named = torch.arange(which.shape[-1]) < count[..., None]
    return torch.zeros(which.shape, dtype=torch.bool).scatter(-1, which.long(), named)[:, 0]


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("row", ROWS)
def test_tiles_and_elements_are_those_of_the_written_out_mask(row, size, window):
    lengths, rows, anchors = ROWS[row]
    blocks = drawn(lengths, rows, anchors, size)
    expected = _sees(blocks, slice(0, sum(lengths)), window)[:, 0]
    assert_mask_is(SeenKeys.of(blocks, sum(lengths), window).block_mask(), expected)


@pytest.mark.parametrize(("lengths", "rows"), [((300,), 2), ((150, 20, 5, 60), 1), ((9,), 1)])
def test_so_are_those_of_chains(lengths, rows):
    generator = torch.Generator().manual_seed(sum(lengths))
    alive = (torch.rand(4, rows, sum(lengths), generator=generator) < 0.6).cumprod(0).bool()
    chains = Chains.of(torch.cat([alive[:1], alive]), Documents.after_each_other(lengths))
    context = rows * sum(lengths)
    expected = _Group(slice(0, chains.count), slice(0, context)).sees(chains)[None]
    assert_mask_is(seen_keys(chains, context).block_mask(), expected)


def assert_mask_is(found: BlockMask, expected: Tensor) -> None:
    """In elements, and in what tiles are taken whole, in part or not at all."""
    batch, query, key = (torch.arange(n) for n in expected.shape)
    seen = found.mask_mod(batch[:, None, None], torch.tensor(0), query[:, None], key)
    assert torch.equal(seen, expected)
    inside = tiles_of(expected)
    partial, full = (
        listed(found.kv_num_blocks, found.kv_indices),
        listed(found.full_kv_num_blocks, found.full_kv_indices),
    )
    assert not (partial & full).any()
    assert inside[full].all()
    assert not inside[~(partial | full)].any()


def test_most_of_a_long_context_is_whole_tiles_or_none():
    blocks = drawn((2048,), 1, 500, 4)
    found = SeenKeys.of(blocks, 2048, None).block_mask()
    partial, full = found.kv_num_blocks.sum(), found.full_kv_num_blocks.sum()
    assert partial < full
    assert partial + full < 0.4 * found.kv_indices.numel()


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("row", ["several tiles", "documents"])
def test_flex_attends_as_the_written_out_mask(row, window):
    lengths, rows, anchors = ROWS[row]
    blocks, generator = drawn(lengths, rows, anchors, 4), torch.Generator().manual_seed(0)

    def heads(count: int, places: int) -> Tensor:
        return torch.randn(rows, count, places, 8, generator=generator)

    query = heads(4, 4 * blocks.count)
    context, own = (KeyValue(heads(2, n), heads(2, n)) for n in (sum(lengths), 4 * blocks.count))
    found, expected = (
        BlockAttention(blocks, sum(lengths), backend)(query, context, own, window) for backend in ("flex", "eager")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("works", "anchors", "expected"), [(True, 40, "flex"), (True, 5, "sdpa"), (False, 40, "sdpa")])
def test_auto_is_flex_for_many_tokens_where_flex_works(monkeypatch, works, anchors, expected):
    taken = []
    monkeypatch.setattr("draftworks.strategies.dflash.attention.flex_works", lambda device, dtype, head_size: works)
    for name in ("flex", "sdpa"):
        monkeypatch.setattr(BlockAttention, f"_{name}", lambda self, *_, name=name: taken.append(name))
    blocks = drawn((64,), 1, anchors, 4)
    nothing = KeyValue(torch.zeros(1), torch.zeros(1))
    BlockAttention(blocks, 64)(torch.zeros(1, 2, 4 * anchors, 8), nothing, nothing, None)
    assert taken == [expected]
