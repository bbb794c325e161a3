"""Masks, groups and flex's tiles, all made of the bounds of seen keys, say of every query and key what the rule says.
Documents of a row: where they begin and end, and that nothing looks beyond.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from coverings import gate_or_long
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from draftworks.drafts import attention
from draftworks.drafts.anchors import Blocks, place_blocks
from draftworks.drafts.attention import TILE, DraftAttention, GroupMasks, KeyValue, SeenKeys, Window
from draftworks.drafts.documents import ActivePositions, Documents, Run
from draftworks.drafts.objectives import make_teacher_plan, specforge_label_mask, token_mean_label_mask
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


MASKS = [[[0, 1, 1], [1, 0, 1]], [[1, 1, 1], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]]]


@pytest.mark.parametrize("mask", MASKS)
def test_spread_puts_rows_back_where_take_found_them(mask):
    mask = torch.tensor(mask, dtype=torch.bool)
    active = ActivePositions.where(mask)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(active.gather(x), x[mask])
    assert torch.equal(active.scatter(active.gather(x)), x * mask[..., None])
    torch.autograd.gradcheck(active.gather, x)
    torch.autograd.gradcheck(active.scatter, x[mask].detach().requires_grad_())


def test_renumber_gives_places_and_keeps_minus_one():
    active = ActivePositions.where(torch.tensor([[False, True, True], [True, False, True]]))
    assert active.renumber(torch.tensor([[5, 1, -1], [2, 3, 1]])).tolist() == [[3, 0, -1], [1, 2, 0]]


@pytest.mark.parametrize("distance", [0, 1, 7])
@pytest.mark.parametrize("mask", [[[0, 1, 1, 0, 1], [1, 0, 1, 0, 1]], [[1] * 5] * 2])
def test_rows_taken_ahead_are_those_so_many_positions_after(mask, distance):
    mask, values = torch.tensor(mask, dtype=torch.bool), torch.arange(10).view(2, 5, 1)
    taken = ActivePositions.where(mask).shift(distance, Documents.from_lengths((2, 3))).gather(values)
    last = [1, 1, 4, 4, 4]
    expected = [5 * row + min(place + distance, last[place]) for row, place in mask.nonzero().tolist()]
    assert taken.flatten().tolist() == expected


def test_looking_ahead_ends_with_the_document_that_a_row_is_in():
    documents = Documents.from_lengths((2, 3))
    active = ActivePositions.where(torch.tensor([[True, True, False, True, False], [False, True, True, False, True]]))
    assert active.shift(0, documents).index.tolist() == active.index.tolist() == [0, 1, 3, 6, 7, 9]
    assert active.shift(1, documents).index.tolist() == [1, 1, 4, 6, 8, 9]
    assert active.shift(7, documents).index.tolist() == [1, 1, 4, 6, 9, 9]


lengths = st.lists(st.integers(1, 7), min_size=1, max_size=6).map(tuple)


@given(lengths)
def test_every_place_knows_its_document(lengths):
    documents = Documents.from_lengths(lengths)
    places = [(number, place) for number, length in enumerate(lengths) for place in range(length)]
    assert documents.document_ids.tolist() == [number for number, _ in places]
    assert documents.positions.tolist() == [place for _, place in places]
    assert documents.begins.tolist() == [sum(lengths[:number]) for number, _ in places]
    assert documents.ends.tolist() == [sum(lengths[: number + 1]) for number, _ in places]


@given(lengths, st.integers(0, 9), st.booleans())
def test_ahead_is_ahead_in_every_document_by_itself(lengths, distance, mask):
    documents = Documents.from_lengths(lengths)
    values = torch.arange(1, 2 * sum(lengths) + 1).view(2, -1)
    values = values % 2 == 0 if mask else values
    fill = False if mask else -1
    expected = [part[distance:] + [fill] * min(distance, len(part)) for part in _lists(documents.split(values))]
    assert _lists(documents.split(documents.shift_left(values, distance, fill))) == expected


@given(lengths)
def test_runs_are_the_documents_in_order_with_equal_neighbours_together(lengths):
    runs = Documents.from_lengths(lengths).runs
    assert tuple(run.length for run in runs for _ in range(run.count)) == lengths
    assert [run.begin for run in runs] == [sum(r.count * r.length for r in runs[:i]) for i in range(len(runs))]
    assert all(first.length != second.length for first, second in zip(runs, runs[1:]))


def test_a_row_that_is_one_document_is_one_run():
    assert Documents.from_lengths((9,)).runs == (Run(0, 1, 9),)


def _lists(parts: list[torch.Tensor]) -> list[list]:
    return [part.tolist() for part in parts]


masks = st.lists(st.booleans(), min_size=1, max_size=12)


def test_token_mean_supervises_what_a_server_would_propose():
    # tokens:              0  1  2  3  4  5  6       the answer is 2, 3, 4
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0]]).bool()
    label_mask = token_mean_label_mask(mask, 3).int().tolist()
    assert label_mask[0] == [[0, 1, 1, 0, 0, 0, 0]]  # after the target said 2, row 1 proposes 3; row 2 proposes 4
    assert label_mask[1] == [[0, 1, 0, 0, 0, 0, 0]]  # row 1 goes on to 4; row 2 would propose 5, beyond the answer
    assert label_mask[2] == [[0, 0, 0, 0, 0, 0, 0]]


def test_specforge_gates_are_the_mask_shifted_by_the_step():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0]]).bool()
    label_mask = specforge_label_mask(mask, 3).int().tolist()
    assert label_mask == [[[0, 0, 1, 1, 1, 0, 0]], [[0, 1, 1, 1, 0, 0, 0]], [[1, 1, 1, 0, 0, 0, 0]]]


@given(masks, st.integers(1, 14))
def test_a_row_supervised_at_a_step_was_supervised_at_every_earlier_one(mask, steps):
    label_mask = token_mean_label_mask(torch.tensor([mask]), steps)
    assert label_mask.shape == (steps, 1, len(mask))
    assert all((later <= earlier).all() for earlier, later in zip(label_mask, label_mask[1:]))


@given(masks, masks, st.integers(1, 14), st.booleans())
def test_teacher_plan_lists_every_gated_row_once_under_its_teacher_position(first, second, steps, specforge):
    length = max(len(first), len(second))
    mask = torch.tensor([row + [False] * (length - len(row)) for row in (first, second)])
    mask[:, -1] &= not specforge
    label_mask = (specforge_label_mask if specforge else token_mean_label_mask)(mask, steps)
    plan = make_teacher_plan(label_mask)
    for step in range(steps):
        taught = plan.draft_positions[step] >= 0
        rows = plan.draft_positions[step][taught]
        assert rows.tolist() == label_mask[step].flatten().nonzero().squeeze(1).tolist()
        assert (plan.teacher_positions[taught] == rows + 1 + step).all()
        assert (plan.teacher_positions[taught] // length == rows // length).all()
    assert ((plan.draft_positions >= 0).any(0)).all()
