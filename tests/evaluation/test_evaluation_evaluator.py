"""The evaluator adds up before it divides, and runs the same collectives on every rank.
Which fields are the identity of an evaluation; different identities have different keys.
The bigram baseline: a small example by hand, and comparison with a slow reference.
"""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.drafts.objectives import token_mean_label_mask
from draftworks.drafts.strategy import StepContext, StepOutput
from draftworks.errors import ConfigError, DataError
from draftworks.evaluation.baselines import BigramDraft
from draftworks.evaluation.eval_cache import EvalConfig
from draftworks.evaluation.evaluator import Evaluator
from draftworks.evaluation.result import EvalResult, find_metric
from draftworks.evaluation.rivals.proposers import BigramTable
from draftworks.features.contracts import TrainBatch


def batch(loss: float, corrects: list[float], denoms: list[float], ids: tuple[str, ...] = ("s",)) -> TrainBatch:
    """Return a batch that carries its own result."""
    tensors = {"loss": torch.tensor(loss), "corrects": torch.tensor(corrects), "denoms": torch.tensor(denoms)}
    return TrainBatch(tensors, ids, num_tokens=10)


def forward(batch: TrainBatch, ctx: StepContext) -> StepOutput:
    counts = {"acc_corrects": batch["corrects"], "acc_denoms": batch["denoms"]}
    return StepOutput(batch["loss"], batch["denoms"][0], counts)


def test_golden_values() -> None:
    result = Evaluator().run(forward, [batch(6.0, [3, 1], [4, 2]), batch(2.0, [1, 1], [4, 2])])
    assert result.avg_loss == 8.0 / 8
    assert result.per_position_acc == (0.5, 0.5)
    assert result.avg_acc == 0.5
    assert result.simulated_acc_len == 0.5 + 0.25
    assert result.supervised_tokens == 8
    assert result.tokens == 20
    assert result.metrics() == {
        "eval/avg_acc": 0.5,
        "eval/per_position_acc": [0.5, 0.5],
        "eval/simulated_acc_len": 0.75,
        "eval/supervised_tokens": 8,
        "eval/avg_loss": 1.0,
    }


def test_counts_are_summed_before_any_ratio() -> None:
    small_and_perfect, large_and_poor = batch(0.0, [1.0], [1.0]), batch(0.0, [0.0], [99.0])
    assert Evaluator().run(forward, [small_and_perfect, large_and_poor]).avg_acc == 0.01


def test_per_position_losses_and_acceptance_rates_are_reported_if_counted() -> None:
    counts = {
        "acc_corrects": (1.0,),
        "acc_denoms": (2.0,),
        "loss_sums": (6.0,),
        "loss_denoms": (2.0,),
        "acceptance_sums": (1.0,),
        "acceptance_denoms": (4.0,),
    }
    metrics = EvalResult(1.0, 2.0, 5, counts).metrics()
    assert metrics["eval/ploss_0"] == 3.0
    assert metrics["eval/acceptance_rate_0"] == 0.25


def test_of_a_reduced_vocabulary_the_acceptance_rate_says_over_which_positions_it_is() -> None:
    counts = {
        "acc_corrects": (2.0,),
        "acc_denoms": (8.0,),
        **{"acceptance_sums": (3.0,), "acceptance_denoms": (4.0,)},
        **{"unconditional_acceptance_sums": (4.0,), "unconditional_acceptance_denoms": (8.0,)},
    }
    metrics = EvalResult(1.0, 2.0, 5, counts).metrics()
    rates = {name: value for name, value in metrics.items() if "acceptance" in name}
    assert rates == {"eval/conditional_acceptance_rate_0": 0.75, "eval/unconditional_acceptance_rate_0": 0.5}
    assert find_metric(metrics, "eval/acceptance_rate_0") == 0.75  # as a `best_metric` may still be called
    assert find_metric({"eval/acceptance_rate_0": 0.5}, "eval/acceptance_rate_0") == 0.5
    assert find_metric(metrics, "eval/acceptance_rate_9") is None


def test_what_only_the_strategy_counts_is_reported_under_its_own_name() -> None:
    counts = {
        "acc_denoms": (4.0,),
        "accept_len_sums": (6.0,),
        "accept_len_denoms": (4.0,),
        "confidence_error_sums": (1.0, 0.5),
        "confidence_error_denoms": (4.0, 2.0),
        "without_denoms_sums": (1.0,),
    }
    metrics = EvalResult(1.0, 2.0, 5, counts).metrics()
    assert metrics["eval/accept_len"] == 1.5
    assert metrics["eval/confidence_error"] == [0.25, 0.25]
    assert "eval/without_denoms" not in metrics


def test_no_batches_is_no_result() -> None:
    assert Evaluator().run(forward, []) is None


def test_no_supervised_token_is_no_result() -> None:
    assert Evaluator().run(forward, [batch(0.0, [0.0], [0.0])]) is None


def test_padding_batches_are_run_and_not_counted() -> None:
    seen = []

    def watched(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        seen.append(batch)
        return forward(batch, ctx)

    result = Evaluator().run(watched, [batch(1.0, [1.0], [2.0]), batch(5.0, [5.0], [5.0], ids=())])
    assert len(seen) == 2
    assert result.supervised_tokens == 2


def test_draft_without_loss_has_no_loss_metric() -> None:
    def lossless(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        return StepOutput(torch.zeros(()), torch.zeros(()), forward(batch, ctx).metric_sums)

    result = Evaluator().run(lossless, [batch(1.0, [1.0], [2.0])])
    assert result.avg_loss is None
    assert "eval/avg_loss" not in result.metrics()


def test_loss_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(DataError, match="loss over 2 evaluated tokens is nan"):
        Evaluator().run(forward, [batch(float("nan"), [1.0], [2.0])])


def test_no_gradient_is_recorded() -> None:
    weight = torch.ones((), requires_grad=True)
    outputs = []

    def with_weight(batch: TrainBatch, ctx: StepContext) -> StepOutput:
        output = forward(batch, ctx)
        outputs.append(output.loss_sum * weight)
        return output

    Evaluator().run(with_weight, [batch(1.0, [1.0], [2.0])])
    assert not outputs[0].requires_grad


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8))
def test_simulated_acc_len_is_a_sum_of_products_within_its_bounds(pairs: list[tuple[int, int]]) -> None:
    corrects = tuple(float(min(pair)) for pair in pairs)
    denoms = tuple(float(max(pair)) for pair in pairs)
    result = EvalResult(0.0, 1.0, 1, {"acc_corrects": corrects, "acc_denoms": denoms})
    accuracies = torch.tensor(result.per_position_acc, dtype=torch.float64)
    assert result.simulated_acc_len == pytest.approx(accuracies.cumprod(0).sum().item())
    assert 0 <= result.simulated_acc_len <= len(pairs)


def test_results_add_up_and_survive_json() -> None:
    first = Evaluator().run(forward, [batch(6.0, [3, 1], [4, 2])])
    second = Evaluator().run(forward, [batch(2.0, [1, 1], [4, 2])])
    both = Evaluator().run(forward, [batch(6.0, [3, 1], [4, 2]), batch(2.0, [1, 1], [4, 2])])
    assert first + second == both == both + EvalResult.empty()
    assert EvalResult.from_json(json.loads(json.dumps(both.to_json()))) == both


def _with_unequal_shares(rank: int) -> None:
    everything = [batch(6.0, [3, 1], [4, 2]), batch(2.0, [1, 1], [4, 2])]
    expected = EvalResult(8.0, 8.0, 20, {"acc_corrects": (4.0, 2.0), "acc_denoms": (8.0, 4.0)})
    assert Evaluator().run(forward, everything[rank : rank + 1]) == expected
    assert Evaluator().run(forward, everything if rank == 1 else []) == expected
    assert Evaluator().run(forward, []) is None


def test_ranks_with_unequal_and_empty_shares_agree(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _with_unequal_shares)


def test_sums_over_fewer_draft_positions_add_nothing_to_the_others() -> None:
    two, three = (EvalResult(1.0, 1.0, 1, {"acc_corrects": (1.0,) * n}) for n in (2, 3))
    assert (two + three).correct == (three + two).correct == (2.0, 2.0, 1.0)
    assert (EvalResult.empty() + two).correct == two.correct


CONFIG = EvalConfig(
    eval_data_path="evals/chat.jsonl",
    target_model_path="org/model",
    target_revision="abc",
    tokenizer_path="org/tokenizer",
    chat_template="{{ messages }}",
    aux_hidden_state_layer_ids=(1, 3, 4),
    max_len=512,
)
TEXT_FIELDS = ("eval_data_path", "target_model_path", "target_revision", "tokenizer_path", "chat_template")


def test_the_identity_is_that_of_the_reference():
    expected = ("evals/chat.jsonl", "org/model", "abc", "org/tokenizer", "{{ messages }}", "1,3,4", "512")
    assert CONFIG.identity_fields() == expected
    assert EvalConfig("x").identity_fields() == ("x", "", "", "", "", "", "2048")


def test_keys_stay_what_they_were():
    assert CONFIG.cache_key == "22f155f3c86d982e"
    assert replace(CONFIG, eval_data_path="évals/聊天.jsonl").cache_key == "a35315c861e06246"


CHANGES = [*((name, "other") for name in TEXT_FIELDS), ("aux_hidden_state_layer_ids", (1, 34)), ("max_len", 511)]


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_every_identity_field_is_in_the_key(name: str, value: object):
    assert replace(CONFIG, **{name: value}).cache_key != CONFIG.cache_key


@pytest.mark.parametrize(("name", "value"), [("micro_batch_size", 64), ("cache_dir", "/elsewhere")])
def test_how_and_where_it_runs_is_not_in_the_key(name: str, value: object):
    assert replace(CONFIG, **{name: value}).cache_key == CONFIG.cache_key


def test_no_revision_and_an_empty_one_are_the_same():
    assert replace(CONFIG, target_revision=None).cache_key == replace(CONFIG, target_revision="").cache_key


def test_a_list_of_layers_is_as_good_as_a_tuple():
    listed = replace(CONFIG, aux_hidden_state_layer_ids=[1, 3, 4])
    assert listed == CONFIG
    assert hash(listed) == hash(CONFIG)


def test_a_config_does_not_change():
    with pytest.raises(FrozenInstanceError):
        CONFIG.max_len = 1


def test_a_shifted_boundary_is_another_key():
    left, right = EvalConfig("a|b", target_model_path="c"), EvalConfig("a", target_model_path="b|c")
    assert "|".join(left.identity_fields()[:2]) == "|".join(right.identity_fields()[:2])
    assert left.cache_key != right.cache_key


@given(
    pieces=st.lists(st.text(max_size=3), min_size=6, max_size=6),
    separator=st.sampled_from(["|", ",", '"', '","', '", "', "\\", "\\u0022", ""]),
)
def test_texts_that_join_to_the_same_have_different_keys(pieces: list[str], separator: str):
    """Six pieces make five fields in five ways, by which two neighbours are one field; joined they are all the same."""
    cuts = [(*pieces[:at], separator.join(pieces[at : at + 2]), *pieces[at + 2 :]) for at in range(len(TEXT_FIELDS))]
    assert len({separator.join(cut) for cut in cuts}) == 1
    keys = {EvalConfig(**dict(zip(TEXT_FIELDS, cut))).cache_key for cut in cuts}
    assert len(keys) == len(set(cuts))


CONFIGS = st.builds(
    EvalConfig,
    **{name: st.text(alphabet="a|", max_size=2) for name in TEXT_FIELDS},
    aux_hidden_state_layer_ids=st.lists(st.integers(0, 1), max_size=2).map(tuple),
    max_len=st.integers(1, 2),
)
"""Few letters, so that what could collide does."""


@given(st.lists(CONFIGS, min_size=2, max_size=40))
def test_keys_are_equal_where_identities_are(configs: list[EvalConfig]):
    assert len({c.cache_key for c in configs}) == len({c.identity_fields() for c in configs})


@pytest.mark.parametrize("ids", [("1,2",), (1.0,), (True,)])
def test_layers_that_are_no_integers_are_refused(ids: tuple):
    with pytest.raises(ConfigError, match="aux_hidden_state_layer_ids: expected integers, found"):
        EvalConfig("x", aux_hidden_state_layer_ids=ids)


@pytest.mark.parametrize("path", ["\ud83d\ude00", "latin-\udce9", Path("x")])
def test_texts_that_utf8_cannot_write_are_refused(path: object):
    with pytest.raises(ConfigError, match="expected strings valid in UTF-8, found"):
        EvalConfig(path)


VOCAB = 6


def tokenized(folder: Path, *samples: tuple[list[int], list[int]]) -> TokenizedSet:
    """Samples of ids and masks."""
    rows = [
        TokenRow(f"s{index}", np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))
        for index, (ids, mask) in enumerate(samples)
    ]
    write_tokens(folder, rows)
    return TokenizedSet.open(folder)


def test_table_counts_supervised_successors(tmp_path: Path) -> None:
    tokens = tokenized(
        tmp_path,
        ([0, 1, 2, 1, 2, 1, 3], [0, 0, 1, 1, 1, 1, 1]),
        ([3, 5, 5], [1, 0, 1]),
    )
    # 0 -> 1 is not supervised, 3 -> 3 would cross samples: both fall back to 1, the lowest of the most frequent 1, 2, 3.
    assert BigramTable.count(tokens, VOCAB).successor.tolist() == [1, 2, 1, 1, 1, 5]


def test_ties_go_to_the_lowest_id(tmp_path: Path) -> None:
    tokens = tokenized(tmp_path, ([0, 4, 0, 3], [0, 1, 0, 1]))
    assert BigramTable.count(tokens, VOCAB).successor[0] == 3


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="belongs to another target"):
        BigramTable.count(tokenized(tmp_path, ([0, 9], [0, 1])), VOCAB)


def example_batch(ids: list[list[int]], mask: list[list[int]], argmax: list[list[int]]) -> TrainBatch:
    """Return a batch whose target argmax at each position is `argmax`, with the identity as head."""
    last = torch.nn.functional.one_hot(torch.tensor(argmax), VOCAB).float()
    tensors = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask).bool(), "last": last}
    return TrainBatch(tensors, ("s",), 0)


def test_hand_made_example() -> None:
    table = BigramTable(np.array([1, 2, 3, 4, 5, 0]))
    draft = BigramDraft(table, torch.eye(VOCAB), partial(token_mean_label_mask, steps=2))
    #            position  0  1  2  3  4
    batch = example_batch([[0, 1, 2, 3, 3]], [[0, 1, 1, 1, 1]], [[1, 2, 3, 0, 0]])
    # Step 0: rows 0, 1, 2 propose after tokens 1, 2, 3 (positions 1 to 3): 2 ok, 3 ok, 4 where the target says 0.
    # Step 1: rows 0, 1 propose after positions 2 and 3.
    result = Evaluator().run(draft, [batch])
    assert result.metric_sums == {"acc_corrects": (2.0, 1.0), "acc_denoms": (3.0, 2.0)}
    assert result.avg_loss is None


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_counts_are_those_of_the_definition(seed: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids, argmax = torch.randint(0, VOCAB, (2, 2, 9), generator=generator)
    mask = torch.rand(2, 9, generator=generator) < 0.7
    table = torch.randint(0, VOCAB, (VOCAB,), generator=generator)
    draft = BigramDraft(BigramTable(table.numpy()), torch.eye(VOCAB), partial(token_mean_label_mask, steps=steps))
    output = draft(example_batch(ids.tolist(), mask.int().tolist(), argmax.tolist()), StepContext(training=False))
    for step in range(steps):
        supervised = correct = 0
        for row in range(2):
            for t in range(9 - 2 - step):
                if mask[row, t + 1 : t + 3 + step].all():
                    supervised += 1
                    correct += int(table[ids[row, t + 1 + step]] == argmax[row, t + 1 + step])
        assert output.metric_sums["acc_denoms"][step] == supervised
        assert output.metric_sums["acc_corrects"][step] == correct
