"""EAGLE-3.1 and other numbers of taps: training, proposing at every row and the live draft compute one and the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from coverings import gate_or_long
from eagle3_reference import MASKS, assert_trains_as_read, read_logits, run
from pydantic import ValidationError
from torch import Tensor

from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.draft_io import load_draft, read_draft_config, save_draft
from draftworks.errors import StoreError
from draftworks.strategies.eagle3.options import EAGLE3, Eagle3Options

HIDDEN, VOCAB = 16, 40


@dataclass(frozen=True)
class Variant:
    options: dict[str, Any]
    taps: tuple[str, ...] = field(default=("hf2", "hf4", "hf5"))


VARIANTS = {
    "published": Variant({}),
    "fc_norm": Variant({"fc_norm": True}),
    "unnormed_output": Variant({"norm_output": False}),
    "fed_back_normed": Variant({"feedback": "post_norm"}),
    "eagle3_1": Variant({"fc_norm": True, "feedback": "post_norm"}),
    "one_tap": Variant({"layer_ids": [3], "fc_norm": True}, ("hf3",)),
    "five_taps": Variant({"layer_ids": [1, 2, 4, 5, 7]}, ("hf1", "hf2", "hf4", "hf5", "hf7")),
    "normed_before_fc": Variant({"norm_before_fc": True}),
    "normed_residual": Variant({"norm_before_residual": True}),
    "window": Variant({"sliding_window": 3}),
    "as_speculators_train": Variant(
        {"norm_before_fc": True, "norm_before_residual": True, "feedback": "post_norm", "sliding_window": 4}
    ),
    "four_taps_unnormed": Variant(
        {"layer_ids": [0, 2, 4, 6], "fc_norm": True, "norm_output": False}, ("hf0", "hf2", "hf4", "hf6")
    ),
}


LOSSES = "token_mean", "specforge"


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request) -> Variant:
    return request.param


def samples_of(variant: Variant, dtype=torch.float64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        {
            "input_ids": torch.randint(VOCAB, (len(mask),), generator=generator),
            "loss_mask": torch.tensor(mask, dtype=torch.bool),
            **{name: torch.randn(len(mask), HIDDEN, generator=generator).to(dtype) for name in (*variant.taps, "last")},
        }
        for mask in MASKS
    ]


# What a loss weighs knows nothing of norms and taps.
@pytest.mark.parametrize(
    ("variant", "loss"),
    gate_or_long(
        (pytest.param(one, loss, id=f"{name}-{loss}") for name, one in VARIANTS.items() for loss in LOSSES),
        lambda cell: cell[1] == "token_mean" or cell[0] is VARIANTS["as_speculators_train"],
    ),
    indirect=["variant"],
)
def test_training_is_what_the_reader_of_exports_computes(make_strategy, variant, loss):
    strategy = make_strategy(torch.float64, loss=loss, **variant.options)
    assert_trains_as_read(strategy, samples_of(variant))


def test_proposing_at_every_row_equals_proposing_on_a_live_sequence(make_strategy, variant):
    strategy, sample = make_strategy(torch.float64, **variant.options), samples_of(variant)[0]
    batch, drafter = strategy.collate([sample], ["s"]), strategy.drafter()
    rows = torch.ones_like(batch["loss_mask"])
    rows[0, -1] = False
    at_once = strategy.propose(batch, rows, 6)[0]
    for row, token in enumerate(sample["input_ids"][1:]):
        drafter.extend({name: sample[name][row : row + 1] for name in variant.taps}, token[None])
        assert drafter.propose(6, 0.0, None).tokens.tolist() == at_once[row].tolist()


@torch.no_grad()
def test_a_sampled_proposal_comes_with_the_readers_distributions(make_strategy, variant):
    strategy, sample = make_strategy(torch.float64, **variant.options), samples_of(variant)[0]
    drafter, tokens = strategy.drafter(), sample["input_ids"][1:10]
    for start, end in ((0, 4), (4, 5), (5, 9)):
        drafter.extend({name: sample[name][start:end] for name in variant.taps}, tokens[start:end])
    proposal = drafter.propose(4, 0.7, torch.Generator().manual_seed(0))
    features = torch.cat([sample[name][:9] for name in variant.taps], dim=-1)
    expected = (read_logits(strategy, features, tokens, proposal.tokens) / 0.7).softmax(-1)
    torch.testing.assert_close(proposal.probabilities[:, strategy.model.t2d], expected)


@torch.no_grad()
def test_training_on_its_own_proposals_says_them_again(make_strategy, variant):
    """What is trained at step i is what is proposed at step i."""
    strategy, sample = make_strategy(torch.float64, **variant.options), samples_of(variant)[0]
    batch, row, steps = strategy.collate([sample], ["s"]), 5, strategy.options.ttt_length
    here = torch.zeros_like(batch["loss_mask"])
    here[0, row] = True
    proposals = strategy.propose(batch, here, steps)[0, row]
    batch["input_ids"][0, row + 2 : row + 2 + steps] = proposals
    states = strategy.model.unroll(
        batch["input_ids"], batch["features"], steps, ActivePositions.where(here), Documents.of(batch)
    )
    said = [strategy.model.draft_ids[strategy.model.lm_head(state).argmax(-1)].item() for state in states]
    assert said == proposals.tolist()


def test_the_options_are_what_decides_the_tensors(make_strategy, variant):
    published, tensors = make_strategy().model.state_dict(), make_strategy(**variant.options).model.state_dict()
    norms = {f"fc_norm.{i}.weight": HIDDEN for i in range(len(variant.taps))} if variant.options.get("fc_norm") else {}
    if variant.options.get("norm_before_fc"):
        norms["input_norm.weight"] = HIDDEN * len(variant.taps)
    assert tensors.keys() == published.keys() | norms.keys()
    assert all(tensors[name].shape == (size,) for name, size in norms.items())
    assert tensors["fc.weight"].shape == (HIDDEN, len(variant.taps) * HIDDEN)


def test_a_norm_that_nothing_reads_is_kept_as_it_is(make_strategy):
    strategy = make_strategy(norm_output=False, shift_norms=False)
    run(strategy, samples_of(VARIANTS["unnormed_output"], torch.float32)).loss_sum.backward()
    untrained = [name for name, p in strategy.model.named_parameters() if p.grad is None]
    assert untrained == ["norm.weight"]
    assert not strategy.model.norm.weight.requires_grad
    assert (strategy.model.norm.weight == 1).all()


def test_a_saved_draft_says_enough_to_build_it_again(make_strategy, variant, tmp_path):
    strategy, samples = make_strategy(**variant.options), samples_of(variant, torch.float32)
    save_draft(tmp_path, strategy, "target")
    written = read_draft_config(tmp_path).draft
    assert written["feature_names"] == [*variant.taps, "last"]
    options = EAGLE3.parse_options(written["options"], where="test")
    assert options == strategy.options
    again = make_strategy(seed=99, **options.model_dump())
    load_draft(tmp_path, again, "target")
    batch = strategy.collate(samples, ["a", "b", "c"])
    everywhere = torch.ones_like(batch["loss_mask"])
    assert torch.equal(again.propose(batch, everywhere, 4), strategy.propose(batch, everywhere, 4))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "published"])
def test_a_draft_of_other_options_is_not_loaded(make_strategy, tmp_path, name):
    save_draft(tmp_path, make_strategy(), "target")
    with pytest.raises(StoreError, match="expected"):
        load_draft(tmp_path, make_strategy(**VARIANTS[name].options), "target")


@pytest.mark.parametrize(
    "later",
    [{"fc_norm": True}, {"norm_output": False}, {"feedback": "post_norm"}, {"objective": "lk_alpha"}]
    + [{"norm_before_fc": True}, {"norm_before_residual": True}, {"sliding_window": 64}]
    + [{"objective": "lk_lambda", "kl_scale": 3.0}, {"objective": "lk_lambda", "kl_decay": 3.0}],
)
def test_options_that_change_the_draft_change_its_identity(later):
    assert Eagle3Options(**later).to_identity() == Eagle3Options().to_identity() | later


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_output": False, "feedback": "post_norm"}, "feeds back the normed output, but norm_output is false"),
        ({"feedback": "normed"}, "pre_norm.*post_norm"),
        ({"fc_norm": True, "norm_before_fc": True}, "both norm the taps before they are fused: set one of them"),
        ({"sliding_window": 1}, "greater than 1"),
        ({"layer_ids": []}, "at least 1 item"),
    ],
)
def test_options_that_say_nothing_definite_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        Eagle3Options(**options)
