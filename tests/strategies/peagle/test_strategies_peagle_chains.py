"""Chains are drawn by content: as many as the formula says, each only where it has been one depth before, and evenly.
Attention of chains: back ends agree, groups never reach into another document, and what is kept grows with rows alone.
Options of P-EAGLE: what is refused, before and without a target.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from draft_toys import HIDDEN, VOCAB
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from draftworks.config.strategies import TargetSizes
from draftworks.drafts.anchors import derive_sample_seed
from draftworks.drafts.attention import GROUP_TOKENS, DraftAttention, KeyValue
from draftworks.drafts.documents import Documents
from draftworks.drafts.objectives import specforge_label_mask, token_mean_label_mask
from draftworks.errors import ConfigError
from draftworks.strategies.peagle.chains import Chains, DepthSampling, TokensByDepth, draw_chains, keep_all_chains
from draftworks.strategies.peagle.options import PEAGLE, PEagleOptions

SEED = torch.tensor([derive_sample_seed(42, "sample")])
DEPTHS = 5
GATES = {"token_mean": token_mean_label_mask, "specforge": specforge_label_mask}
masks = st.lists(st.booleans(), min_size=1, max_size=40)
samplings = st.builds(DepthSampling, st.floats(0.1, 1.0), st.floats(0.0, 1.0))
both_modes = pytest.mark.parametrize("mode", GATES)


def drawn(mask: list[bool], mode: str, sampling: DepthSampling, step: int = 0) -> Tensor:
    """(D, S) of one sample."""
    documents = Documents.from_lengths((len(mask),))
    label_mask = GATES[mode](torch.tensor([mask]), DEPTHS, documents)
    return draw_chains(label_mask, SEED, step, sampling, documents)[:, 0]


@both_modes
@given(mask=masks, sampling=samplings, step=st.integers(0, 10**6))
def test_every_depth_keeps_as_many_as_the_formula_says_of_those_before_it(mode, mask, sampling, step):
    """speculators: int((valid - d) · max(r ** d, r_min)) of the candidates, all where these are fewer."""
    kept = drawn(mask, mode, sampling, step)
    label_mask = GATES[mode](torch.tensor([mask]), DEPTHS)[:, 0]
    assert torch.equal(kept[0], label_mask[0])
    valid, before = int(label_mask[0].sum()), torch.ones(len(mask), dtype=torch.bool)
    for depth in range(1, DEPTHS):
        candidates = before & label_mask[depth]
        assert not (kept[depth] & ~candidates).any()
        quota = int(max(0, valid - depth) * max(sampling.ratio**depth, sampling.least))
        assert kept[depth].sum() == min(quota, int(candidates.sum()))
        before = kept[depth]


@given(mask=masks)
def test_a_ratio_of_one_keeps_every_chain_that_counts(mask):
    kept = drawn(mask, "token_mean", DepthSampling(1.0, 0.2))
    assert torch.equal(kept, token_mean_label_mask(torch.tensor([mask]), DEPTHS)[:, 0])


@both_modes
@given(mask=masks, padding=st.integers(0, 9), before=st.integers(0, 7), sampling=samplings)
def test_a_sample_draws_the_same_whatever_is_around_it(mode, mask, padding, before, sampling):
    alone, length = drawn(mask, mode, sampling, step=3), len(mask)
    padded = torch.ones(2, length + padding, dtype=torch.bool)
    padded[1] = F.pad(torch.tensor(mask), (0, padding))
    seeds = torch.cat([SEED + 1, SEED])
    one_each = Documents.from_lengths((length + padding,))
    label_mask = GATES[mode](padded, DEPTHS, one_each)
    beside = draw_chains(label_mask, seeds, 3, sampling, one_each)[:, 1]
    assert torch.equal(beside[:, :length], alone)
    packed = Documents.from_lengths((before + 1, length))
    label_mask = GATES[mode](torch.tensor([[True] * (before + 1) + mask]), DEPTHS, packed)
    behind = draw_chains(label_mask, seeds, 3, sampling, packed)[:, 0]
    assert torch.equal(behind[:, before + 1 :], alone)


def test_every_chain_is_kept_equally_often():
    steps, length = 1000, 22
    seen = torch.zeros(DEPTHS, length)
    for step in range(steps):
        seen += drawn([True] * length, "token_mean", DepthSampling(0.6, 0.1), step)
    for depth in range(1, DEPTHS):
        possible = seen[depth, : length - 2 - depth]
        expected = steps * int((20 - depth) * 0.6**depth) / 20
        assert not seen[depth, length - 2 - depth :].any()
        assert ((possible - possible.mean()).abs() < 6 * expected**0.5).all()


@both_modes
def test_all_chains_go_on_until_a_row_that_does_not_count(mode):
    mask = [False, True, True, True, False, True, True, True, True, False]
    label_mask = GATES[mode](torch.tensor([mask]), DEPTHS)
    kept = keep_all_chains(label_mask)[:, 0]
    assert torch.equal(kept[0], label_mask[0, 0])
    for row in range(len(mask)):
        counted = label_mask[1:, 0, row].tolist()
        expected = counted.index(False) if False in counted else DEPTHS - 1
        assert kept[1:, row].tolist() == [depth < expected for depth in range(DEPTHS - 1)]


def test_masked_places_are_listed_chain_by_chain_and_found_again_by_depth():
    documents = Documents.from_lengths((4, 3))
    kept = torch.zeros(4, 2, 7, dtype=torch.bool)
    kept[0, :, :] = torch.tensor([1, 0, 1, 0, 1, 0, 0])
    kept[1, 0, [1, 5]] = kept[2, 0, 1] = kept[1, 1, 4] = kept[2, 1, 4] = kept[3, 1, 4] = True
    chains = Chains.of(kept, documents)
    assert chains.anchors.tolist() == [1, 1, 5, 11, 11, 11]
    assert chains.depths.tolist() == [1, 2, 1, 1, 2, 3]
    assert chains.positions.tolist() == [2, 3, 2, 1, 2, 3]
    assert chains.begins.tolist() == [0, 0, 4, 11, 11, 11]
    assert [(at.start, at.stop) for at in chains.make_seen_keys().split_tokens(100)] == [(0, 2), (2, 3), (3, 6)]
    by_depth = TokensByDepth.where(kept, chains)
    first, *deeper = by_depth.index.split(by_depth.sizes)
    assert first.tolist() == [0, 2, 4, 7, 9, 11]
    for depth, rows in enumerate(deeper, start=1):
        assert chains.anchors[rows - 14].tolist() == kept[depth].flatten().nonzero()[:, 0].tolist()
        assert all(one < other for one, other in pairwise(rows.tolist()))


HEADS, KV_HEADS, WIDTH = 4, 2, 6


def chains_of(lengths: tuple[int, ...], batch: int = 1, depths: int = 5, share: float = 0.6) -> Chains:
    """Chains at some rows, of random lengths."""
    generator = torch.Generator().manual_seed(sum(lengths))
    alive = torch.rand(depths - 1, batch, sum(lengths), generator=generator) < share
    kept = torch.cat([torch.ones_like(alive[:1]), alive.cumprod(0).bool()])
    return Chains.of(kept, Documents.from_lengths(lengths))


def inputs_of(chains: Chains) -> list[Tensor]:
    """Query, context key, context value, own key, own value."""
    generator = torch.Generator().manual_seed(0)
    rows, context = chains.count, chains.batch * chains.length
    shapes = [(HEADS, rows), (KV_HEADS, context), (KV_HEADS, context), (KV_HEADS, rows), (KV_HEADS, rows)]
    return [
        torch.randn(1, heads, count, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, count in shapes
    ]


def attended(chains: Chains, backend: str, inputs: list[Tensor]) -> Tensor:
    query, *others = inputs
    return DraftAttention(chains.make_seen_keys(), backend)(query, KeyValue(*others[:2]), KeyValue(*others[2:]))


@pytest.mark.parametrize(
    ("lengths", "batch"), [((7,), 1), ((90,), 2), ((3, 60, 1, 25), 1), ((200,), 1)], ids=lambda value: str(value)
)
def test_back_ends_agree_in_output_and_gradients(lengths, batch):
    chains = chains_of(lengths, batch)
    inputs = inputs_of(chains)
    results = {}
    for backend in ("eager", "sdpa"):
        output = attended(chains, backend, inputs)
        results[backend] = [output.detach(), *torch.autograd.grad(output.cos().sum(), inputs)]
    torch.testing.assert_close(results["sdpa"], results["eager"])
    with torch.no_grad():
        torch.testing.assert_close(attended(chains, "flex", [x.detach() for x in inputs]), results["eager"][0])


def test_without_a_masked_place_nothing_is_attended():
    chains = chains_of((9,), share=0.0)
    assert chains.count == 0
    for backend in ("eager", "sdpa"):
        inputs = inputs_of(chains)
        output = attended(chains, backend, inputs)
        assert output.shape == (1, HEADS, 0, WIDTH)
        gradients = torch.autograd.grad(output.sum(), inputs, materialize_grads=True)
        assert not any(gradient.any() for gradient in gradients)
    with torch.no_grad():
        assert attended(chains, "flex", inputs_of(chains)).shape == (1, HEADS, 0, WIDTH)


def test_not_even_a_product_with_zero_brings_in_another_document_or_what_comes_later():
    """An anchor's document begins at 40; NaN everywhere else that it must not look at."""
    chains = chains_of((40, 120, 40))
    inputs = inputs_of(chains)
    clean = attended(chains, "sdpa", inputs)
    in_middle = (chains.begins == 40).nonzero().squeeze(1)
    with torch.no_grad():
        for context in inputs[1:3]:
            context[:, :, :40] = context[:, :, 160:] = float("nan")
        for own in inputs[3:]:
            own[:, :, chains.begins != 40] = float("nan")
    assert torch.equal(attended(chains, "sdpa", inputs)[:, :, in_middle], clean[:, :, in_middle])


def saved_bytes(chains: Chains) -> int:
    """What is kept for the gradients."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = inputs_of(chains)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attended(chains, "sdpa", inputs)
    return sum(storages.values())


def test_what_is_kept_for_the_gradients_does_not_grow_with_rows_times_context():
    short, long = chains_of((150,)), chains_of((600,))
    assert short.count > GROUP_TOKENS["cpu"]
    rows = (long.count + long.length) / (short.count + short.length)
    assert saved_bytes(long) < 1.1 * rows * saved_bytes(short)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_a_compiled_layer_leaves_attention_to_itself(backend):
    """Otherwise the compiler would follow it into masks that are other ones in every batch, and into flex's own compilation."""
    graphs, chains = [], chains_of((30,))

    def recorded(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    inputs = [x.detach() for x in inputs_of(chains)]
    attend = DraftAttention(chains.make_seen_keys(), backend)
    layer = torch.compile(
        lambda query, *others: attend(query.cos(), KeyValue(*others[:2]), KeyValue(*others[2:])), backend=recorded
    )
    torch.testing.assert_close(layer(*inputs), attended(chains, backend, [inputs[0].cos(), *inputs[1:]]))
    assert (
        sum(node.op == "call_function" or node.op == "call_method" for graph in graphs for node in graph.graph.nodes)
        == 1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_depths": 0}, "num_depths"),
        ({"down_sample_ratio": 0.0}, "down_sample_ratio"),
        ({"down_sample_ratio_min": 1.5}, "down_sample_ratio_min"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"ttt_length": 7}, "ttt_length"),
        ({"sliding_window": 7}, "sliding_window 7 is shorter than a chain of num_depths 8"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        PEagleOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": 40}, r"peagle: mask_token_id 40 is outside the target's vocabulary, 0\.\.39"),
        ({"num_depths": 32}, "peagle: num_depths 32 does not fit into samples of at most 32 tokens"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_target_are_refused_before_any_work(options, message):
    sizes = TargetSizes(num_layers=8, hidden_size=HIDDEN, vocab_size=VOCAB, max_length=32)
    with pytest.raises(ConfigError, match=message):
        PEAGLE.check(PEagleOptions(**options), sizes)


def test_taps_are_eagle3s_and_only_the_mean_over_micro_batches_cannot_be_packed():
    assert PEAGLE.list_features(12, PEagleOptions()) == ("hf2", "hf6", "hf9", "last")
    with pytest.raises(ConfigError, match="peagle: configured layer ids .*outside"):
        PEAGLE.taps(8, PEagleOptions(layer_ids=[2, 9]))
    PEAGLE.check_packing(PEagleOptions(), "here")
    with pytest.raises(ConfigError, match="peagle with loss: specforge takes means over micro-batches"):
        PEAGLE.check_packing(PEagleOptions(loss="specforge"), "here")
