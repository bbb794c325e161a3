"""A packed row gives what its samples give padded: losses, gradients, counts, proposals; and no sample knows of another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from coverings import cover, gate_or_long
from draft_toys import DRAFT_VOCAB, HIDDEN, VOCAB, small_target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftworks.data.vocab import VocabMapping
from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.evaluation.ladder.replay import replay
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dflash2.options import DFlash2Options
from draftworks.strategies.dflash2.strategy import DFlash2Strategy
from draftworks.strategies.domino.options import DominoOptions
from draftworks.strategies.domino.strategy import DominoStrategy
from draftworks.strategies.dspark.options import DSparkOptions
from draftworks.strategies.dspark.strategy import DSparkStrategy
from draftworks.strategies.eagle3.options import Eagle3Options
from draftworks.strategies.eagle3.strategy import Eagle3Strategy
from draftworks.strategies.lilicorr.options import LiLiCorrOptions
from draftworks.strategies.lilicorr.strategy import LiLiCorrStrategy
from draftworks.strategies.peagle.options import PEagleOptions
from draftworks.strategies.peagle.strategy import PEagleStrategy
from draftworks.strategies.xpress.options import XPressOptions
from draftworks.strategies.xpress.strategy import XPressStrategy

STREAMS = ("hf2", "hf4", "hf5", "last")
VARIANTS = {
    "eagle3": ("eagle3", {}),
    "eagle3 eager": ("eagle3", {"attention": "eager", "feedback": "post_norm", "fc_norm": True}),
    "eagle3 sdpa lk_alpha": ("eagle3", {"attention": "sdpa", "objective": "lk_alpha"}),
    "eagle3 lk_lambda": ("eagle3", {"objective": "lk_lambda", "kl_scale": 3.0, "norm_output": False}),
    "eagle3 window": ("eagle3", {"sliding_window": 3, "norm_before_fc": True, "norm_before_residual": True}),
    "dflash": ("dflash", {"gamma": 2.0}),
    "dflash specforge": ("dflash", {"loss": "specforge"}),
    "dflash dpace": ("dflash", {"weighting": "dpace"}),
    "dflash specforge dpace eager": ("dflash", {"loss": "specforge", "weighting": "dpace", "attention": "eager"}),
    "dflash2": ("dflash2", {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}),
    "domino": ("domino", {"emb_dim": 6, "gru_hidden_dim": 5}),
    "dspark": ("dspark", {"markov_rank": 5, "gamma": 2.0}),
    "dspark rnn dpace": ("dspark", {"markov_rank": 5, "markov_head_type": "rnn", "weighting": "dpace"}),
    "lilicorr": ("lilicorr", {"candidate_topk": 16, "lattice_size": 8, "lattice_heads": 2, "margin_weight": 0.3}),
    "lilicorr convolved": ("lilicorr", {"lattice_size": 8, "conv_kernel_size": 2, "conv_group_size": 4}),
    "peagle": ("peagle", {"num_layers": 2}),
    "peagle window": ("peagle", {"sliding_window": 8}),
    "peagle eager": ("peagle", {"attention": "eager", "down_sample_ratio": 0.5, "train_embeddings": False}),
    "xpress": ("xpress", {"refiner_rank": 5}),
    "dflash window": ("dflash", {"sliding_window": 3, "sliding_layers": [1]}),
}
BLOCK_STRATEGIES = {
    "dflash": (DFlashStrategy, DFlashOptions),
    "dflash2": (DFlash2Strategy, DFlash2Options),
    "domino": (DominoStrategy, DominoOptions),
    "dspark": (DSparkStrategy, DSparkOptions),
    "xpress": (XPressStrategy, XPressOptions),
    "lilicorr": (LiLiCorrStrategy, LiLiCorrOptions),
}
REDUCED_VOCABULARY = {
    "eagle3": (Eagle3Strategy, Eagle3Options, "ttt_length"),
    "peagle": (PEagleStrategy, PEagleOptions, "num_depths"),
}
masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=5)


def strategy_of(variant: str, dtype: torch.dtype = torch.float64, **more: int) -> DraftStrategy:
    name, options = VARIANTS[variant]
    parts = small_target()
    parts = replace(parts, embedding=parts.embedding.to(dtype), head=parts.head.to(dtype))
    if name in BLOCK_STRATEGIES:
        make, typed = BLOCK_STRATEGIES[name]
        shape = {"block_size": 4, "num_layers": 2, "layer_ids": [2, 4, 5], "num_anchors": 4}
        strategy = make(typed(**shape | options | more), parts, None, seed=3)
    else:
        ids = np.sort(np.random.default_rng(2).permutation(VOCAB)[:DRAFT_VOCAB])
        vocab = VocabMapping(ids - np.arange(DRAFT_VOCAB), np.isin(np.arange(VOCAB), ids))
        make, typed, steps = REDUCED_VOCABULARY[name]
        strategy = make(typed(draft_vocab_size=DRAFT_VOCAB, **{steps: 4}, **options), parts, vocab, seed=3)
    strategy.model.to(dtype)
    return strategy


def samples_of(loss_masks: list[list[bool]], dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(len(loss_masks))
    samples = []
    for mask in loss_masks:
        features = {name: torch.randn(len(mask), HIDDEN, generator=generator).to(dtype) for name in STREAMS}
        ids = torch.randint(VOCAB, (len(mask),), generator=generator)
        samples.append({"input_ids": ids, "loss_mask": torch.tensor(mask), **features})
    return samples


def names_of(samples: list) -> list[str]:
    return [f"s{number}" for number in range(len(samples))]


def packed(strategy: DraftStrategy, samples: list[dict[str, Tensor]]) -> TrainBatch:
    return strategy.pack(samples, names_of(samples))


def padded(strategy: DraftStrategy, samples: list[dict[str, Tensor]]) -> TrainBatch:
    return strategy.collate(samples, names_of(samples))


def gradients(strategy: DraftStrategy, output: StepOutput) -> list[Tensor]:
    weights = [weight for weight in strategy.model.parameters() if weight.requires_grad]
    return list(torch.autograd.grad(output.loss_sum, weights, materialize_grads=True))


def assert_same_step(strategy: DraftStrategy, first: TrainBatch, second: TrainBatch, tolerance: float) -> None:
    ctx = StepContext(global_step=5, total_steps=9, training=True)
    outputs = [strategy.forward_loss(batch, ctx) for batch in (first, second)]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(outputs[0].loss_weight, outputs[1].loss_weight, **close)
    torch.testing.assert_close(outputs[0].metric_sums, outputs[1].metric_sums, **close)
    divisor = outputs[0].loss_weight.clamp(min=1)
    torch.testing.assert_close(*(output.loss_sum / divisor for output in outputs), **close)
    found, expected = ([grad / divisor for grad in gradients(strategy, output)] for output in outputs)
    torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=6)
@given(loss_masks=masks)
def test_packed_trains_as_padded(variant: str, loss_masks: list[list[bool]]) -> None:
    strategy, samples = strategy_of(variant), samples_of(loss_masks)
    assert_same_step(strategy, packed(strategy, samples), padded(strategy, samples), 1e-9)


@pytest.mark.parametrize("variant", gate_or_long(VARIANTS, cover(VARIANTS, lambda variant: [VARIANTS[variant][0]])))
def test_packed_trains_as_padded_in_float32(variant: str) -> None:
    strategy = strategy_of(variant, torch.float32)
    samples = samples_of([[length > 3] * length for length in (9, 30, 4, 9, 17)], torch.float32)
    # Logits of LiLiCorr are cosines of eight times their size.
    tolerance = 1e-5 if variant.startswith("lilicorr") else 1e-6
    assert_same_step(strategy, packed(strategy, samples), padded(strategy, samples), tolerance)


def test_packed_trains_as_padded_where_attention_goes_through_blocks_in_groups() -> None:
    """Groups that end within a document, with one, and beyond several."""
    strategy = strategy_of("dflash window", num_anchors=70)
    lengths = [150, 20, 5, 60, 4, 90]
    samples = samples_of([[place > 1 for place in range(length)] for length in lengths])
    assert_same_step(strategy, packed(strategy, samples), padded(strategy, samples), 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=6)
@given(loss_masks=masks)
@torch.no_grad()
def test_packed_measures_as_padded(variant: str, loss_masks: list[list[bool]]) -> None:
    """Teacher-forced counts, and the block counts and walks of every sample."""
    strategy, samples = strategy_of(variant), samples_of(loss_masks)
    batches = packed(strategy, samples), padded(strategy, samples)
    counts = [strategy.forward_loss(batch, StepContext(training=False)).metric_sums for batch in batches]
    torch.testing.assert_close(*counts, rtol=1e-9, atol=1e-9)
    first, second = (replay(strategy, batch, 3) for batch in batches)
    assert first == second


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_proposes_what_it_does_alone_up_to_the_last_of_a_sample(variant: str) -> None:
    strategy, samples = strategy_of(variant), samples_of([[True] * 6, [False] * 3, [True] * 9])
    batch = packed(strategy, samples)
    together = strategy.propose(batch, torch.ones(1, 18, dtype=torch.bool), 3)
    alone = [
        strategy.propose(padded(strategy, [sample]), torch.ones(1, len(sample["input_ids"]), dtype=torch.bool), 3)
        for sample in samples
    ]
    assert torch.equal(together, torch.cat(alone, dim=1))


@pytest.mark.parametrize("variant", ["dflash", "dflash2", "domino", "dspark", "lilicorr"])
def test_a_packed_row_is_walked_in_as_few_passes_as_its_samples_padded(variant: str) -> None:
    """Each goes over the context of the whole row."""
    strategy, samples = strategy_of(variant), samples_of([[True] * 90] * 3)
    first_layer, passes = strategy.fsdp_blocks()[0], []
    first_layer.register_forward_hook(lambda *_: passes.append(len(passes)))
    walks = replay(strategy, padded(strategy, samples), 3)
    needed = len(passes)
    assert replay(strategy, packed(strategy, samples), 3) == walks
    assert len(passes) - needed == needed > 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_sample_of_a_row_knows_of_another(variant: str) -> None:
    """The middle one's loss, gradients and proposals are bit for bit the same whatever its neighbours on both sides are.

    Neighbours are unsupervised, so that all there is comes from the middle one, up to the very edges of it.
    """
    strategy = strategy_of(variant)
    samples = samples_of([[False] * 6, [True] * 11, [False] * 7])
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
    return [output.loss_sum.detach(), *gradients(strategy, output), *output.metric_sums.values(), proposed[0, 6:16]]


@pytest.mark.parametrize("variant", ["eagle3", "dflash", "dspark", "lilicorr", "peagle"])
def test_what_a_sample_reads_is_finite_beside_one_that_is_not(variant: str) -> None:
    """Not even through a product with zero does a neighbour come in."""
    strategy = strategy_of(variant)
    samples = samples_of([[True] * 9, [False] * 5])
    clean = strategy.forward_loss(packed(strategy, samples), StepContext(training=True)).loss_sum
    samples[1] = {name: v * float("nan") if v.is_floating_point() else v for name, v in samples[1].items()}
    assert strategy.forward_loss(packed(strategy, samples), StepContext(training=True)).loss_sum == clean


@pytest.mark.parametrize("variant", ["eagle3", "dflash"])
def test_a_row_is_its_samples_without_padding(variant: str) -> None:
    strategy, samples = strategy_of(variant), samples_of([[True] * 5, [False, True, True], [True] * 5])
    batch = packed(strategy, samples)
    assert batch.documents == (5, 3, 5)
    assert batch["input_ids"].tolist() == [[i for sample in samples for i in sample["input_ids"].tolist()]]
    assert batch["features"].shape == (1, 13, 3 * HIDDEN)
    assert batch.num_tokens == 13
