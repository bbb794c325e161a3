"""A packed row gives what its samples give padded: losses, gradients, counts, proposals; and no sample knows of another."""

from __future__ import annotations

import pytest
import torch
from coverings import cover, gate_or_long
from draft_toys import HIDDEN, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_cases import Sample, find_cases, gradients, list_block_drafts, make, sample_for
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.evaluation.ladder.replay import replay
from draftworks.features.contracts import TrainBatch

VARIANTS = [(name, each) for name, cases in find_cases().items() for each in cases.packed]
EACH = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
EACH_STRATEGY = pytest.mark.parametrize("name", find_cases())
BLOCK_DRAFTS = list_block_drafts()
masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=5)


def samples_for(
    strategy: DraftStrategy, loss_masks: list[list[bool]], dtype: torch.dtype = torch.float64
) -> list[Sample]:
    return [sample_for(strategy, mask, seed, dtype) for seed, mask in enumerate(loss_masks)]


def names_of(samples: list) -> list[str]:
    return [f"s{number}" for number in range(len(samples))]


def packed(strategy: DraftStrategy, samples: list[dict[str, Tensor]]) -> TrainBatch:
    return strategy.pack(samples, names_of(samples))


def padded(strategy: DraftStrategy, samples: list[dict[str, Tensor]]) -> TrainBatch:
    return strategy.collate(samples, names_of(samples))


def assert_same_step(strategy: DraftStrategy, first: TrainBatch, second: TrainBatch, tolerance: float) -> None:
    ctx = StepContext(global_step=5, total_steps=9, training=True)
    outputs = [strategy.forward_loss(batch, ctx) for batch in (first, second)]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(outputs[0].loss_weight, outputs[1].loss_weight, **close)
    torch.testing.assert_close(outputs[0].metric_sums, outputs[1].metric_sums, **close)
    divisor = outputs[0].loss_weight.clamp(min=1)
    torch.testing.assert_close(*(output.loss_sum / divisor for output in outputs), **close)
    found, expected = ([grad / divisor for grad in gradients(strategy, output.loss_sum).values()] for output in outputs)
    torch.testing.assert_close(found, expected, **close)


@EACH
@settings(max_examples=6)
@given(loss_masks=masks)
def test_packed_trains_as_padded(name: str, options, loss_masks: list[list[bool]]) -> None:
    strategy = make(name, moved=0, **options)
    samples = samples_for(strategy, loss_masks)
    assert_same_step(strategy, packed(strategy, samples), padded(strategy, samples), 1e-9)


@pytest.mark.parametrize(("name", "options"), gate_or_long(VARIANTS, cover(VARIANTS, lambda cell: [cell[0]])), ids=str)
def test_packed_trains_as_padded_in_float32(name: str, options) -> None:
    strategy = make(name, torch.float32, moved=0, **options)
    samples = samples_for(strategy, [[length > 3] * length for length in (9, 30, 4, 9, 17)], torch.float32)
    # Logits of LiLiCorr are cosines of eight times their size.
    tolerance = 1e-5 if name == "lilicorr" else 1e-6
    assert_same_step(strategy, packed(strategy, samples), padded(strategy, samples), tolerance)


def test_packed_trains_as_padded_where_attention_goes_through_blocks_in_groups() -> None:
    """Groups that end within a document, with one, and beyond several."""
    strategy = make("dflash", moved=0, sliding_window=3, sliding_layers=[1], num_anchors=70)
    lengths = [150, 20, 5, 60, 4, 90]
    samples = samples_for(strategy, [[place > 1 for place in range(length)] for length in lengths])
    assert_same_step(strategy, packed(strategy, samples), padded(strategy, samples), 1e-9)


@EACH
@settings(max_examples=6)
@given(loss_masks=masks)
@torch.no_grad()
def test_packed_measures_as_padded(name: str, options, loss_masks: list[list[bool]]) -> None:
    """Teacher-forced counts, and the block counts and walks of every sample."""
    strategy = make(name, moved=0, **options)
    samples = samples_for(strategy, loss_masks)
    batches = packed(strategy, samples), padded(strategy, samples)
    counts = [strategy.forward_loss(batch, StepContext(training=False)).metric_sums for batch in batches]
    torch.testing.assert_close(*counts, rtol=1e-9, atol=1e-9)
    first, second = (replay(strategy, batch, 3) for batch in batches)
    assert first == second


@EACH
def test_every_row_proposes_what_it_does_alone_up_to_the_last_of_a_sample(name: str, options) -> None:
    strategy = make(name, moved=0, **options)
    samples = samples_for(strategy, [[True] * 6, [False] * 3, [True] * 9])
    batch = packed(strategy, samples)
    together = strategy.propose(batch, torch.ones(1, 18, dtype=torch.bool), 3)
    alone = [
        strategy.propose(padded(strategy, [sample]), torch.ones(1, len(sample["input_ids"]), dtype=torch.bool), 3)
        for sample in samples
    ]
    assert torch.equal(together, torch.cat(alone, dim=1))


@pytest.mark.parametrize("name", BLOCK_DRAFTS)
def test_a_packed_row_is_walked_in_as_few_passes_as_its_samples_padded(name: str) -> None:
    """Each goes over the context of the whole row."""
    strategy = make(
        name,
        moved=0,
    )
    samples = samples_for(strategy, [[True] * 90] * 3)
    first_layer, passes = strategy.fsdp_blocks()[0], []
    first_layer.register_forward_hook(lambda *_: passes.append(len(passes)))
    walks = replay(strategy, padded(strategy, samples), 3)
    needed = len(passes)
    assert replay(strategy, packed(strategy, samples), 3) == walks
    assert len(passes) - needed == needed > 1


@EACH
def test_no_sample_of_a_row_knows_of_another(name: str, options) -> None:
    """The middle one's loss, gradients and proposals are bit for bit the same whatever its neighbours on both sides are.

    Neighbours are unsupervised, so that all there is comes from the middle one, up to the very edges of it.
    """
    strategy = make(name, moved=0, **options)
    samples = samples_for(strategy, [[False] * 6, [True] * 11, [False] * 7])
    seen = [_middle_of(strategy, samples)]
    for other in (0, 2):
        samples[other] = {
            name: values + 1000
            if values.is_floating_point()
            else (values + 7) % VOCAB
            if name == "input_ids"
            else values
            for name, values in samples[other].items()
        }
    seen.append(_middle_of(strategy, samples))
    for before, after in zip(*seen, strict=True):
        assert torch.equal(before, after)


def _middle_of(strategy: DraftStrategy, samples: list[dict[str, Tensor]]) -> list[Tensor]:
    batch = packed(strategy, samples)
    output = strategy.forward_loss(batch, StepContext(training=True))
    rows = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    rows[0, 6:17] = True
    proposed = strategy.propose(batch, rows, 3)
    assert (proposed[0, 6:16] >= 0).all()
    return [
        output.loss_sum.detach(),
        *gradients(strategy, output.loss_sum).values(),
        *output.metric_sums.values(),
        proposed[0, 6:16],
    ]


@EACH_STRATEGY
def test_what_a_sample_reads_is_finite_beside_one_that_is_not(name: str) -> None:
    """Not even through a product with zero does a neighbour come in."""
    strategy = make(name, moved=0)
    samples = samples_for(strategy, [[True] * 9, [False] * 5])
    clean = strategy.forward_loss(packed(strategy, samples), StepContext(training=True)).loss_sum
    samples[1] = {name: v * float("nan") if v.is_floating_point() else v for name, v in samples[1].items()}
    assert strategy.forward_loss(packed(strategy, samples), StepContext(training=True)).loss_sum == clean


@EACH_STRATEGY
def test_a_row_is_its_samples_without_padding(name: str) -> None:
    strategy = make(name, moved=0)
    samples = samples_for(strategy, [[True] * 5, [False, True, True], [True] * 5])
    batch = packed(strategy, samples)
    assert batch.documents == (5, 3, 5)
    assert batch["input_ids"].tolist() == [[i for sample in samples for i in sample["input_ids"].tolist()]]
    assert batch["features"].shape == (1, 13, 3 * HIDDEN)
    assert batch.num_tokens == 13
