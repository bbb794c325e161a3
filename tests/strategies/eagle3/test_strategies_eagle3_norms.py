"""EAGLE-3.1 and other numbers of taps: training, proposing at every row and the live draft compute one and the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from coverings import gate_or_long
from eagle3_reference import MASKS, assert_trains_as_read, read_logits, run
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from ttt_toys import outputs_and_gradients, random_inputs, sizes

from draftworks.drafts.documents import ActivePositions, Documents
from draftworks.drafts.draft_io import load_draft, read_draft_config, save_draft
from draftworks.errors import ConfigError, StoreError
from draftworks.strategies.eagle3.attention import (
    _FusedTttAttention,
    eager_ttt_attention,
    flex_ttt_attention,
    fused_kernel_works,
    fused_ttt_attention,
    sdpa_ttt_attention,
    ttt_attention,
)
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


CPU = torch.device("cpu")
SIX = Documents.from_lengths((6,))


@pytest.mark.skipif(not fused_kernel_works(CPU, torch.float64, 4), reason="this torch lacks the fused CPU kernel")
@given(size=sizes, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_fused_equals_eager_in_value_and_every_gradient(size, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for found, expected in zip(
        outputs_and_gradients(fused_ttt_attention, size, dtype), outputs_and_gradients(eager_ttt_attention, size, dtype)
    ):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=20)
@given(size=sizes)
def test_sdpa_equals_eager_in_value_and_every_gradient(size):
    for found, expected in zip(
        outputs_and_gradients(sdpa_ttt_attention, size, torch.float64),
        outputs_and_gradients(eager_ttt_attention, size, torch.float64),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(
    "size", [(2, 2, 2, (7,), 8, 3), (1, 1, 1, (130,), 16, 1), (1, 1, 3, (80, 3, 67), 16, 4)], ids=str
)
@pytest.mark.parametrize("bounds", [(), (5,)], ids=["all", "window"])
def test_flex_equals_eager(size, bounds):
    query, *rest = (x.detach() for x in random_inputs(*size, torch.float32)[1])
    keys, values = rest[: size[-1]], rest[size[-1] :]
    documents = Documents.from_lengths(size[3])
    attends = (flex_ttt_attention, eager_ttt_attention)
    found, expected = (attend(query, keys, values, documents, *bounds) for attend in attends)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("lengths", [(11,), (4, 10, 5)], ids=["one", "several"])
def test_a_row_sees_the_window_that_ends_with_it_and_its_own_later_keys(backend, lengths):
    documents, window = Documents.from_lengths(lengths), 3
    _, (query, *rest) = random_inputs(1, 2, 2, lengths, 4, 3, torch.float64)
    changed, row = [x.detach().clone() for x in rest], 7
    for x in (changed[0], changed[3]):  # keys and values of step 0
        x[:, :, : row - window + 1] += 5
        x[:, :, row + 1 :] -= 5
    for x in (*changed[1:3], *changed[4:]):
        x[:, :, :row] += 5
        x[:, :, row + 1 :] -= 5
    found = [ttt_attention(query, x[:3], x[3:], documents, backend, window)[:, :, row] for x in (rest, changed)]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    wider = ttt_attention(query, changed[:3], changed[3:], documents, backend, window + 1)[:, :, row]
    assert not torch.allclose(found[0], wider)


def test_a_window_that_leaves_nothing_out_costs_nothing(monkeypatch):
    _, (query, *rest) = random_inputs(1, 1, 1, (6,), 4, 2, torch.float32)
    fused = "draftworks.strategies.eagle3.attention.fused_ttt_attention"
    monkeypatch.setattr(fused, lambda query, keys, values, documents: query + 1)
    assert torch.equal(ttt_attention(query, rest[:2], rest[2:], SIX, window=6), query + 1)
    assert not torch.equal(ttt_attention(query, rest[:2], rest[2:], SIX, window=5), query + 1)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "flex"])
def test_every_back_end_is_the_one_named(backend, monkeypatch):
    _, (query, *rest) = random_inputs(1, 1, 1, (6,), 4, 2, torch.float32)
    used = {"auto": "fused", "sdpa": "sdpa", "eager": "eager", "flex": "flex"}[backend]
    module = "draftworks.strategies.eagle3.attention"
    monkeypatch.setattr(f"{module}.{used}_ttt_attention", lambda query, keys, values, documents: query + 1)
    with torch.no_grad():
        assert torch.equal(ttt_attention(query, rest[:2], rest[2:], SIX, backend), query + 1)


def test_flex_with_gradients_on_a_cpu_is_refused():
    _, (query, *rest) = random_inputs(1, 1, 1, (6,), 4, 2, torch.float32)
    with pytest.raises(ConfigError, match="eagle3: attention flex has no gradients on a CPU: set options.attention"):
        ttt_attention(query, rest[:2], rest[2:], SIX, "flex")


def test_fused_equals_eager_beyond_one_block_of_the_kernel():
    size = (1, 1, 2, (800,), 8, 4)
    for found, expected in zip(
        outputs_and_gradients(fused_ttt_attention, size, torch.float64),
        outputs_and_gradients(eager_ttt_attention, size, torch.float64),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_later_rows_other_samples_and_other_documents_are_never_seen(backend):
    documents = Documents.from_lengths((4, 10, 5))
    _, (query, *rest) = random_inputs(2, 2, 2, documents.lengths, 4, 3, torch.float64)
    query, rest = query.detach(), [x.detach().clone() for x in rest]
    before = ttt_attention(query, rest[:3], rest[3:], documents, backend)
    for x in rest:
        x[:, :, 10:14] += 5
        x[1] -= 2
    after = ttt_attention(query, rest[:3], rest[3:], documents, backend)
    same = torch.tensor([True] * 10 + [False] * 4 + [True] * 5)
    torch.testing.assert_close(before[0, :, same], after[0, :, same], rtol=0, atol=0)
    assert not torch.allclose(before[0, :, ~same], after[0, :, ~same])


def test_without_the_private_kernel_auto_is_sdpa(monkeypatch):
    size = (2, 2, 2, (4, 3), 4, 3)
    expected = outputs_and_gradients(ttt_attention, size, torch.float64)
    fused_kernel_works.cache_clear()

    def absent(*_args, **_kwargs):
        raise AttributeError("no such operator")

    monkeypatch.setattr(_FusedTttAttention, "forward", staticmethod(absent))
    try:
        assert not fused_kernel_works(CPU, torch.float64, 4)
        for found, value in zip(outputs_and_gradients(ttt_attention, size, torch.float64), expected):
            torch.testing.assert_close(found, value)
    finally:
        fused_kernel_works.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("head_size", [6, 64, 128])
def test_probe_accepts_a_right_kernel_at_every_head_size(dtype, head_size):
    assert fused_kernel_works(CPU, dtype, head_size)


def test_a_device_without_a_kernel_is_told():
    assert not fused_kernel_works(torch.device("meta"), torch.bfloat16, 8)
