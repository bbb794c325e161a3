"""Masks, groups and flex's tiles, all made of the bounds of seen keys, say of every query and key what the rule says."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from coverings import gate_or_long
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from draftworks.drafts import attention
from draftworks.drafts.anchors import Blocks, place_blocks
from draftworks.drafts.attention import TILE, DraftAttention, GroupMasks, KeyValue, SeenKeys, Window
from draftworks.drafts.documents import Documents
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
    return place_blocks(candidates, size, Documents.from_lengths(lengths))


def tiles_of(mask: Tensor) -> Tensor:
    """(B, n, m) to (B, tiles, tiles, TILE · TILE), False beyond the edges."""
    rows, columns = (-size % TILE for size in mask.shape[1:])
    cut = F.pad(mask, (0, columns, 0, rows)).unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))
    return cut.transpose(2, 3).flatten(3)


def listed(count: Tensor, which: Tensor) -> Tensor:
    """flex's lists of tiles as bools."""
    named = torch.arange(which.shape[-1]) < count[..., None]
    return torch.zeros(which.shape, dtype=torch.bool).scatter(-1, which.long(), named)[:, 0]


def rule_of_blocks(blocks: Blocks, length: int, window: Window | None) -> Tensor:
    """(B, n, S + n): a token of the block at anchor a sees its document below a, and its block; with a window, of these the newest,
    or the newest below a, and the block up to itself or all of it."""
    offset = torch.arange(blocks.count * blocks.size) % blocks.size
    anchor, begin = (x.repeat_interleave(blocks.size, dim=1)[..., None] for x in (blocks.anchors, blocks.begins))
    number = torch.arange(len(offset)) // blocks.size
    place = torch.arange(length)
    context = (place < anchor) & (place >= begin)
    own = (number[:, None] == number).expand(len(anchor), -1, -1)
    if window is not None:
        behind = offset[:, None] - offset
        moved = 0 if window.from_anchor else offset[:, None]
        context = context & (anchor + moved - place < window.size + window.from_anchor)
        own = own & ((behind >= 0) | window.both_ways) & ((behind < window.size) | window.from_anchor)
    return torch.cat([context, own], dim=-1)


def rule_of_chains(chains: Chains) -> Tensor:
    """(1, R, N + R): a row sees the rows of its document up to its anchor, and its chain up to itself."""
    anchors, depths, begins = (x[:, None] for x in (chains.anchors, chains.depths, chains.begins))
    places = torch.arange(chains.batch * chains.length)
    own = (anchors == anchors.T) & (depths >= depths.T)
    return torch.cat([(places <= anchors) & (places >= begins), own], dim=1)[None]


@pytest.mark.parametrize("window", [None, Window(3), Window(40), Window(3, True), Window(40, True, True)], ids=str)
@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("row", ROWS)
def test_masks_groups_tiles_and_elements_are_those_of_the_rule(row, size, window):
    lengths, rows, anchors = ROWS[row]
    blocks = drawn(lengths, rows, anchors, size)
    seen, expected = blocks.make_seen_keys(sum(lengths)), rule_of_blocks(blocks, sum(lengths), window)
    assert torch.equal(seen.with_window(window).make_mask()[:, 0], expected)
    assert_groups_cover(seen, window, expected)
    assert_mask_is(seen.with_window(window).make_block_mask(), expected)


@pytest.mark.parametrize(("lengths", "rows"), [((300,), 2), ((150, 20, 5, 60), 1), ((9,), 1)])
def test_so_are_those_of_chains(lengths, rows):
    generator = torch.Generator().manual_seed(sum(lengths))
    alive = (torch.rand(4, rows, sum(lengths), generator=generator) < 0.6).cumprod(0).bool()
    chains = Chains.of(torch.cat([alive[:1], alive]), Documents.from_lengths(lengths))
    seen, expected = chains.make_seen_keys(), rule_of_chains(chains)
    assert torch.equal(seen.make_mask()[:, 0], expected)
    assert_groups_cover(seen, None, expected)
    assert_mask_is(seen.make_block_mask(), expected)


def assert_groups_cover(seen: SeenKeys, window: Window | None, expected: Tensor) -> None:
    """Groups are all tokens in order, each of one document and no longer than was asked; what they see is among their keys, and
    their masks say which of these."""
    groups = seen.with_window(window).make_groups(seen.split_tokens(50))
    assert [at for group in groups for at in range(expected.shape[1])[group.tokens]] == list(range(expected.shape[1]))
    for group in groups:
        assert 0 < group.tokens.stop - group.tokens.start <= 50
        assert len(seen.begin.amin(0)[group.tokens].unique()) == 1
        context, own = expected[:, group.tokens].split([seen.context, expected.shape[1]], dim=-1)
        inside = torch.cat([context[..., group.context], own[..., group.own]], dim=-1)
        assert inside.sum() == expected[:, group.tokens].sum()
        assert torch.equal(seen.with_window(window).make_mask(group)[:, 0], inside)


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
    found = blocks.make_seen_keys(2048).make_block_mask()
    partial, full = found.kv_num_blocks.sum(), found.full_kv_num_blocks.sum()
    assert partial < full
    assert partial + full < 0.4 * found.kv_indices.numel()


WINDOWS = [None, Window(5), Window(5, True, True)]


# That masks are those of the rule is asked above of all windows in all rows: here each row and each window meets the back ends.
@pytest.mark.parametrize(
    ("row", "window"),
    gate_or_long(
        product(ROWS, WINDOWS),
        lambda cell: (
            cell[0] == "several tiles" or cell in zip(("one tile", "documents", "blocks across tiles"), WINDOWS)
        ),
    ),
    ids=str,
)
def test_back_ends_attend_alike_and_groups_have_the_gradients_of_the_written_out_mask(row, window):
    lengths, rows, anchors = ROWS[row]
    blocks, generator = drawn(lengths, rows, anchors, 4), torch.Generator().manual_seed(0)
    counts = {"query": (4, 4 * blocks.count), "context": (2, sum(lengths)), "own": (2, 4 * blocks.count)}
    inputs = [
        torch.randn(rows, *counts[name], 8, generator=generator, requires_grad=True)
        for name in ("query", "context", "context", "own", "own")
    ]

    def attended(backend: str) -> Tensor:
        attend = DraftAttention(blocks.make_seen_keys(sum(lengths)), backend)
        query, *others = inputs if torch.is_grad_enabled() else [x.detach() for x in inputs]
        return attend(query, KeyValue(*others[:2]), KeyValue(*others[2:]), window)

    sums = {}
    for backend in ("sdpa", "eager"):
        output = attended(backend)
        sums[backend] = [output, *torch.autograd.grad(output.cos().sum(), inputs)]
    torch.testing.assert_close(sums["sdpa"], sums["eager"], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(attended("flex"), sums["eager"][0], rtol=1e-5, atol=1e-5)


def test_masks_are_kept_while_there_is_room_and_are_the_same_when_made_again(monkeypatch):
    blocks = drawn((300,), 2, 90, 4)
    seen = blocks.make_seen_keys(300)
    pieces = seen.split_tokens(128)
    kept = GroupMasks(seen, pieces)
    first = [kept.make(number) for number in range(len(pieces))]
    assert all(kept.make(number) is mask for number, mask in enumerate(first))
    monkeypatch.setattr(attention, "KEPT_MASKS", first[0].numel())
    scarce = GroupMasks(seen, pieces)
    again = [scarce.make(number) for number in range(len(pieces))]
    assert all(torch.equal(mask, other) for mask, other in zip(first, again, strict=True))
    assert [scarce.make(number) is mask for number, mask in enumerate(again)] == [True] + [False] * (len(pieces) - 1)


@torch.no_grad()
@pytest.mark.parametrize(("works", "anchors", "expected"), [(True, 40, "flex"), (True, 5, "sdpa"), (False, 40, "sdpa")])
def test_auto_is_flex_for_many_tokens_where_flex_works(monkeypatch, works, anchors, expected):
    taken = []
    monkeypatch.setattr("draftworks.drafts.attention.flex_works", lambda device, dtype, head_size: works)
    for name in ("flex", "sdpa"):
        monkeypatch.setattr(DraftAttention, f"_{name}", lambda self, *_, name=name: taken.append(name))
    blocks = drawn((64,), 1, anchors, 4)
    nothing = KeyValue(torch.zeros(1), torch.zeros(1))
    DraftAttention(blocks.make_seen_keys(64))(torch.zeros(1, 2, 4 * anchors, 8), nothing, nothing, None)
    assert taken == [expected]
