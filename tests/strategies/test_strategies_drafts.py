"""Every draft trains and proposes what the independent reader of its exports computes, whatever the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_toys import DRAFT_VOCAB
from reference_readers import propose_greedily
from strategy_cases import (
    HALFWAY,
    MASKS,
    NAMES,
    Sample,
    find_cases,
    gradients,
    is_of_blocks,
    list_block_drafts,
    list_options,
    make,
    reduced_vocabulary,
    sample_for,
    samples_for,
    side_by_side,
)

from draftworks.config.strategies import TargetSizes, resolve_strategy
from draftworks.drafts.draft_io import load_draft, save_draft
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.errors import ConfigError, DataError, StoreError

EACH = pytest.mark.parametrize("name", find_cases())
EACH_OF_BLOCKS = pytest.mark.parametrize("name", list_block_drafts())
VARIANTS = [(name, each) for name, cases in find_cases().items() for each in (*cases.objectives, *cases.variants)]
ANY_NUMBER = 4
"""What a chain that proposes any number of tokens is asked for."""
PACKED = [(name, each) for name, cases in find_cases().items() for each in cases.packed]
CHAINS = [(name, options) for name, options in PACKED if not is_of_blocks(name)]
BLOCKS = [
    (name, options | {"loss": loss, "weighting": weighting, "num_anchors": 3, "gamma": None})
    for loss, weighting in (("token_mean", "uniform"), ("specforge", "dpace"))
    for name, options in PACKED
    if is_of_blocks(name)
]
"""SpecForge's loss of a chain is a mean over a batch, which depends on the cut: see the tests of the chains."""
SERVED = [(name, each) for name, each in PACKED if each.get("norm_output", True)]
"""Without those that no reader of files can be."""


def half_easy(strategy: DraftStrategy) -> list[Sample]:
    """The samples with answers of which the draft says a part: what it proposes itself after some of the tokens."""
    easy, reader = [], find_cases()[strategy.name].read(strategy)
    for one in samples_for(strategy):
        ids = one["input_ids"].clone()
        for anchor in range(3, len(ids) - 1, 4):
            after = slice(anchor + 1, anchor + 1 + (strategy.max_draft_tokens or ANY_NUMBER))
            known = (side_by_side(strategy, one)[:anchor], ids[1 : anchor + 1])
            ids[after] = torch.tensor(propose_greedily(reader, *known, len(ids[after])))
        easy.append({**one, "input_ids": ids})
    return easy


def taps_of(strategy: DraftStrategy) -> list[str]:
    """Return what a server has when the draft proposes."""
    return [name for name in strategy.feature_names if name != "last"]


@pytest.mark.parametrize("training", [True, False], ids=["trained", "evaluated"])
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_loss_gradients_and_metric_sums_are_those_of_the_reader(name: str, options: dict[str, Any], training: bool):
    strategy = make(name, moved=0.2, **options)
    samples = half_easy(strategy)
    ctx = StepContext(HALFWAY.global_step, HALFWAY.total_steps, training=training)
    output, expected = strategy.forward_loss(strategy.collate(samples, NAMES), ctx), None
    expected = find_cases()[name].expect(strategy, samples, ctx)
    torch.testing.assert_close(output.loss_sum, expected.loss, rtol=1e-6, atol=1e-6)
    found, wanted = gradients(strategy, output.loss_sum), gradients(strategy, expected.loss)
    for weight, gradient in wanted.items():
        scale = max(1.0, float(gradient.norm()))
        torch.testing.assert_close(found[weight], gradient, rtol=0, atol=1e-6 * scale, msg=weight)
        assert gradient.any() or options, f"{weight} learns nothing"
    sums = output.metric_sums
    for place, values in expected.by_place.items():
        torch.testing.assert_close(sums[place], values, rtol=1e-6, atol=1e-6)
    for place in strategy.spec.metric_sums(strategy.options).by_block:
        assert sums[f"{place}_sums"].item() == pytest.approx(expected.by_block[place], rel=1e-6)
        assert sums[f"{place}_denoms"].item() == expected.by_block["blocks"]
    named = {place.removesuffix("_sums") for place in sums if place.endswith("_sums")}
    assert {place.removesuffix("_denoms") for place in sums if place.endswith("_denoms")} == named | {"acc"}


@EACH
def test_evaluating_measures_the_same_whether_autograd_records_or_not(name: str):
    strategy = make(name)
    batch = strategy.collate(samples_for(strategy), NAMES)
    recorded = strategy.forward_loss(batch, StepContext(training=False))
    with torch.no_grad():
        unrecorded = strategy.forward_loss(batch, StepContext(training=False))
    assert recorded.loss_sum == unrecorded.loss_sum
    torch.testing.assert_close(recorded.metric_sums, unrecorded.metric_sums, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False], ids=["trained", "evaluated"])
@pytest.mark.parametrize(("name", "options"), [*CHAINS, *BLOCKS], ids=str)
def test_sums_do_not_depend_on_batching_order_or_padding(name: str, options: dict[str, Any], training: bool):
    strategy, ctx = make(name, **options), replace(HALFWAY, training=training)
    samples = samples_for(strategy)

    def run(*picked: int, extra: int = 0):
        chosen, names = [samples[i] for i in picked], [NAMES[i] for i in picked]
        if extra:
            chosen, names = [*chosen, sample_for(strategy, [0] * extra, 9)], [*names, "nothing"]
        return strategy.forward_loss(strategy.collate(chosen, names), ctx)

    with torch.set_grad_enabled(training):
        whole, parts = run(2, 0, 1, extra=30), [run(0), run(1), run(2)]
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts))
    # Of samples, the one without a label too.
    more = 1 if (options.get("loss"), options.get("weighting")) == ("specforge", "dpace") else 0
    torch.testing.assert_close(whole.loss_weight, sum(part.loss_weight for part in parts) + more)
    for place, total in whole.metric_sums.items():
        torch.testing.assert_close(total, sum(part.metric_sums[place] for part in parts))


@EACH
def test_what_is_behind_a_sample_has_no_part_in_it(name: str):
    strategy = make(name)
    samples = [samples_for(strategy)[1], sample_for(strategy, [0] * 20, 9)]
    batch, end = strategy.collate(samples, NAMES[:2]), len(MASKS[1])
    clean = strategy.forward_loss(batch, HALFWAY)
    for stream in {"features", "last"} & batch.tensors.keys():
        batch[stream][0, end:] = 1e3
    batch["input_ids"][0, end:] = 7
    torch.testing.assert_close(strategy.forward_loss(batch, HALFWAY).loss_sum, clean.loss_sum, rtol=0, atol=0)


@EACH_OF_BLOCKS
def test_evaluation_looks_at_the_same_blocks_whatever_the_step_and_the_seed(name: str):
    strategy, other = make(name, num_anchors=2), make(name, num_anchors=2, seed=8)
    other.model.load_state_dict(strategy.model.state_dict())

    def loss(made: DraftStrategy, step: int, training: bool) -> float:
        batch = made.collate(samples_for(made), NAMES)
        return made.forward_loss(batch, StepContext(step, 20, training=training)).loss_sum.item()

    assert loss(strategy, 0, False) == loss(strategy, 5, False) == loss(other, 5, False)
    assert loss(strategy, 0, True) != loss(strategy, 5, True)


@pytest.mark.parametrize("mask", [[0] * 6, [0], [0, 1]], ids=str)
@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
@EACH
def test_a_batch_without_a_supervised_token_still_has_a_gradient_for_every_weight(
    name: str, loss: str, mask: list[int]
):
    """A loss is of tokens after the first, or it is SpecForge's and of none here."""
    strategy = make(name, loss=loss)
    if loss == "specforge":
        mask = [0] * len(mask)
    output = strategy.forward_loss(strategy.collate([sample_for(strategy, mask, 1)], ["a"]), HALFWAY)
    output.loss_sum.backward()
    assert output.loss_sum == 0
    assert output.loss_weight == 0 or loss == "specforge"
    assert all(weight.grad is not None and not weight.grad.any() for weight in strategy.model.parameters())


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_proposals_are_the_readers_first_choices_and_a_drafter_fed_in_pieces_makes_the_same(name: str, options):
    strategy = make(name, moved=0.2, **options)
    samples, reader, count = (
        samples_for(strategy),
        find_cases()[name].read(strategy),
        strategy.max_draft_tokens or ANY_NUMBER,
    )
    batch = strategy.collate(samples, NAMES)
    rows = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
    rows[0, [0, 3, 9]] = rows[1, 2] = True
    found = strategy.propose(batch, rows, count)
    for b, t in rows.nonzero().tolist():
        ids, features = samples[b]["input_ids"], side_by_side(strategy, samples[b])
        assert found[b, t].tolist() == propose_greedily(reader, features[: t + 1], ids[1 : t + 2], count)
    assert (found[~rows] == -1).all()
    assert torch.equal(strategy.propose(batch, rows, min(2, count)), found[..., :2])
    drafter, begin, one = strategy.drafter(), 0, samples[0]
    for end in (1, 4, 10):
        features = {tap: one[tap][begin:end] for tap in taps_of(strategy)}
        drafter.extend(features, one["input_ids"][begin + 1 : end + 1])
        assert drafter.propose(count, 0.0, None).tokens.tolist() == found[0, end - 1].tolist()
        begin = end


@pytest.mark.parametrize(("name", "options"), SERVED, ids=str)
def test_a_sampled_proposal_comes_with_the_distributions_it_was_drawn_from(name: str, options):
    strategy = make(name, moved=0.2, **options)
    one, drafter = samples_for(strategy)[0], strategy.drafter()
    drafter.extend({tap: one[tap][:6] for tap in taps_of(strategy)}, one["input_ids"][1:7])
    proposal = drafter.propose(3, 0.7, torch.Generator().manual_seed(0))
    reader, known = find_cases()[name].read(strategy), (side_by_side(strategy, one)[:6], one["input_ids"][1:7])
    expected = torch.zeros_like(proposal.probabilities)
    expected[:, reader.vocabulary.ids] = (reader.logits(*known, proposal.tokens) / 0.7).softmax(-1)
    torch.testing.assert_close(proposal.probabilities, expected)
    assert (proposal.probabilities.gather(1, proposal.tokens[:, None]) > 0).all()


@EACH
def test_weights_depend_on_the_seed_alone(name: str):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = make(name, moved=0).model.state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    again, other = make(name, moved=0).model.state_dict(), make(name, moved=0, seed=4).model.state_dict()
    assert all(torch.equal(first[weight], again[weight]) for weight in first)
    assert not all(torch.equal(first[weight], other[weight]) for weight in first)


@EACH
def test_a_draft_is_the_same_after_saving_and_nothing_to_start_from_for_one_that_computes_otherwise(name, tmp_path):
    strategy = make(name, torch.float32)
    save_draft(tmp_path, strategy, target_digest="t")
    chunked = {"objective_chunk_blocks": 2, "num_anchors": 7} if is_of_blocks(name) else {}
    other = make(name, torch.float32, seed=99, attention="eager", **chunked)
    load_draft(tmp_path, other, target_digest="t", to_train=True)
    weights, loaded = strategy.model.state_dict(), other.model.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[weight], loaded[weight]) for weight in weights)
    for structural in find_cases()[name].structural:
        with pytest.raises(StoreError, match=next(iter(structural))):
            load_draft(tmp_path, make(name, torch.float32, **structural), target_digest="t", to_train=True)
    stranger = next(each for each in find_cases() if each != name)
    with pytest.raises(StoreError, match=f"strategy: expected {stranger}, found {name}"):
        load_draft(tmp_path, make(stranger, torch.float32), target_digest="t")


@pytest.mark.parametrize(("name", "options"), SERVED, ids=str)
def test_weights_in_bfloat16_beside_buffers_in_float32_give_nearly_the_same(name: str, options):
    """As sharding leaves them."""
    wide, narrow = make(name, torch.float32, **options), make(name, torch.float32, **options)
    for weight in narrow.model.parameters():
        weight.data = weight.data.bfloat16()
    samples = samples_for(wide, torch.float32)
    losses = [one.forward_loss(one.collate(samples, NAMES), HALFWAY).loss_sum for one in (wide, narrow)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0)
    exact, rounded = (gradients(one, loss) for one, loss in zip((wide, narrow), losses))
    for weight, gradient in rounded.items():
        assert gradient.isfinite().all()
        near = torch.nn.functional.cosine_similarity(gradient.flatten(), exact[weight].flatten(), dim=0)
        assert near > 0.98 or is_of_blocks(name), weight  # a rounding may choose other candidates of a block
    said = narrow.propose(narrow.collate(samples, NAMES), torch.ones(3, 12, dtype=torch.bool), 3)
    assert (said[:, :-1] >= 0).all()


@EACH
def test_no_block_sees_its_own_answer(name: str):
    """Features and tokens from the anchor on must not matter, nor those of other blocks."""
    strategy = make(name)
    batch = strategy.collate(samples_for(strategy)[:1], ["a"])
    rows = torch.zeros(1, 12, dtype=torch.bool)
    rows[0, [2, 6]] = True
    before = strategy.propose(batch, rows, 3)
    batch["features"][0, 7:] = 100.0
    batch["input_ids"][0, 8:] = 0
    assert torch.equal(strategy.propose(batch, rows, 3), before)


@EACH
def test_bad_input_is_refused_in_the_name_of_the_strategy(name: str):
    strategy = make(name)
    samples, most = samples_for(strategy), strategy.max_draft_tokens
    batch = strategy.collate(samples, NAMES)
    if most is not None:
        with pytest.raises(ConfigError, match=f"{name}: the draft proposes {most} tokens, asked for {most + 1}"):
            strategy.propose(batch, torch.ones(3, 12, dtype=torch.bool), most + 1)
    with pytest.raises(ConfigError, match=f"{name}: attention flex has no gradients on a CPU"):
        make(name, attention="flex").forward_loss(batch, HALFWAY)
    for feature in strategy.feature_names:
        with pytest.raises(
            DataError, match=rf"sample a: feature {feature}: expected shape \(12, 16\), found \(5, 16\)"
        ):
            strategy.collate([{**samples[0], feature: torch.zeros(5, 16)}], ["a"])


@EACH
def test_a_vocabulary_mapping_that_does_not_fit_is_refused(name: str):
    strategy = make(name)
    load = strategy.spec.load_factory()
    if not strategy.spec.uses_vocab_mapping:
        with pytest.raises(ConfigError, match=f"{name} predicts .* no vocabulary mapping"):
            load(strategy.options, strategy.target, reduced_vocabulary(), 0)
        return
    with pytest.raises(ConfigError, match=f"{name} predicts over a reduced vocabulary.*found none"):
        load(strategy.options, strategy.target, None, 0)
    with pytest.raises(
        ConfigError, match=f"{name}: draft_vocab_size is 30, the vocabulary mapping holds {DRAFT_VOCAB}"
    ):
        make(name, draft_vocab_size=30)


@EACH_OF_BLOCKS
def test_a_mask_token_that_the_target_has_not_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name}: mask_token_id 40"):
        make(name, mask_token_id=40)


REFUSED = [(name, *each) for name in find_cases() for each in find_cases()[name].refused]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=str)
def test_options_that_do_not_go_together_are_refused(name: str, options: dict[str, Any], message: str):
    sizes = TargetSizes(num_layers=8, hidden_size=16, vocab_size=40, max_length=64)

    def check() -> None:
        typed = resolve_strategy(name).options(**list_options(name) | options)
        resolve_strategy(name).check(typed, sizes)
        make(name, **options)

    with pytest.raises((ValueError, ConfigError), match=message):
        check()
