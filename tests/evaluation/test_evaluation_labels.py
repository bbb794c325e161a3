"""What is shown of a measurement: the acceptance length, which counts the target's own token, and how exact it is.
An evaluation gives the same result from any kind of feature store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.target_parts import TargetParts
from draftworks.evaluation.acceptance_length import (
    count_own_token,
    format_change,
    format_interval,
    format_length,
    name_metric,
)
from draftworks.evaluation.evaluator import Evaluator, collate_labels, count_labels
from draftworks.evaluation.labels import Exactness, LabelCounts, judge_exactness
from draftworks.evaluation.result import EvalResult
from draftworks.features.contracts import FeatureStore, SampleRef, TrainBatch
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.loader import FeatureDataLoader
from draftworks.features.local_store import LocalFeatureStore
from draftworks.features.wrapped_store import JoinedStore
from draftworks.strategies.eagle3.options import Eagle3Options
from draftworks.strategies.eagle3.strategy import Eagle3Strategy

HEAD = torch.eye(8)
CPU = torch.device("cpu")


def sample(ids: list[int], answered_from: int, said: list[int]) -> dict[str, Tensor]:
    """Return a sample; `said` are the target's greedy tokens after each token."""
    mask = torch.arange(len(ids)) >= answered_from
    return {"input_ids": torch.tensor(ids), "loss_mask": mask, "last": HEAD[torch.tensor(said)]}


RIGHT_TWICE_OF_THREE = sample([1, 2, 3, 4, 5], 2, said=[0, 3, 4, 0, 0])
RIGHT_ONCE_OF_ONE = sample([1, 7], 1, said=[7, 0])


def batch(*samples: dict[str, Tensor]) -> TrainBatch:
    return collate_labels(samples, [str(index) for index in range(len(samples))])


def test_tokens_of_answers_are_counted_not_samples() -> None:
    assert count_labels([batch(RIGHT_TWICE_OF_THREE, RIGHT_ONCE_OF_ONE)], HEAD, CPU).agreement == 3 / 4
    assert count_labels([batch(RIGHT_TWICE_OF_THREE), batch(RIGHT_ONCE_OF_ONE)], HEAD, CPU).agreement == 3 / 4


@pytest.mark.parametrize("answered_from", [0, 1])
def test_first_token_of_a_sample_was_said_by_nobody(answered_from: int) -> None:
    assert count_labels([batch(sample([1, 7], answered_from, said=[7, 0]))], HEAD, CPU).agreement == 1.0


def test_nothing_to_agree_on_is_no_agreement() -> None:
    silent = {**RIGHT_ONCE_OF_ONE, "loss_mask": torch.zeros(2, dtype=torch.bool)}
    assert count_labels([batch(silent)], HEAD, CPU).agreement == 0.0
    assert count_labels([], HEAD, CPU).agreement == 0.0


@pytest.mark.parametrize(
    ("label_logit", "near"), [(63.0, 1), (62.9, 0), (-64.0, 0)], ids=["two steps of bfloat16", "more", "another sign"]
)
def test_a_near_tie_is_a_gap_of_two_steps_of_bfloat16(label_logit: float, near: int) -> None:
    last = torch.zeros(2, 8)
    last[0, 3], last[0, 7] = 64.0, label_logit
    one = {"input_ids": torch.tensor([1, 7]), "loss_mask": torch.tensor([False, True]), "last": last}
    found = count_labels([batch(one), batch(RIGHT_TWICE_OF_THREE)], HEAD, CPU)
    assert found == LabelCounts(tokens=4, differing=2, near_ties=near)


@pytest.mark.parametrize(
    ("counts", "greedy", "found"),
    [
        (None, True, Exactness.UNKNOWN),
        (LabelCounts(1000, 0, 0), None, Exactness.EXACT),
        (LabelCounts(1000, 2, 2), True, Exactness.ROUNDING),
        (LabelCounts(1000, 10, 0), True, Exactness.ROUNDING),
        (LabelCounts(1000, 11, 0), True, Exactness.UNEXPLAINED),
        (LabelCounts(1000, 400, 400), True, Exactness.ROUNDING),
        (LabelCounts(1000, 2, 2), False, Exactness.OTHER_ANSWERS),
        (LabelCounts(1000, 2, 2), None, Exactness.OTHER_ANSWERS),
    ],
)
def test_only_the_targets_own_greedy_answers_differ_by_rounding(counts, greedy, found: Exactness) -> None:
    agreement = None if counts is None else counts.agreement
    assert judge_exactness(agreement, counts, greedy) is found


def test_a_report_from_before_labels_were_counted_is_not_taken_for_rounding() -> None:
    assert judge_exactness(0.998, None, True) is Exactness.OTHER_ANSWERS


def _with_unequal_shares(rank: int) -> None:
    mine = [batch(RIGHT_TWICE_OF_THREE), batch(RIGHT_ONCE_OF_ONE)] if rank == 1 else []
    assert count_labels(mine, HEAD, CPU).agreement == 3 / 4


def test_ranks_with_unequal_shares_agree(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, _with_unequal_shares)


accepted = st.floats(0.0, 50.0)


@given(accepted, accepted)
def test_a_difference_of_two_lengths_is_that_of_what_was_accepted(a: float, b: float) -> None:
    """So margins, which are differences, mean the same in both."""
    assert count_own_token(a) - count_own_token(b) == pytest.approx(a - b, abs=1e-9)


@given(accepted, st.integers(1, 400))
def test_it_is_the_tokens_that_a_pass_yields(length: float, passes: int) -> None:
    """vLLM: 1 + accepted / drafts; SGLang: completion tokens / verifications."""
    taken = round(length * passes)
    assert count_own_token(taken / passes) == pytest.approx((taken + passes) / passes)


def test_what_is_shown_is_fixed() -> None:
    assert (format_length(1.0857), format_length(0.0, 3), format_length(None)) == ("2.09", "1.000", "none")
    assert format_interval(0.87, 1.14, between="–") == "1.87–2.14"
    assert format_change(-0.0001, -0.25, 0.5, 2) == "+0.00 (-0.25 to +0.50)"


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ("rung3_walk_acc_len", "walk (rung 3)"),
        ("eval/rung4_loop_t0_acc_len", "loop (rung 4), at temperature 0"),
        ("rung4_loop_acc_len_t0.7_greedy_draft", "loop (rung 4), at temperature 0.7, by greedy_draft"),
        (
            "eval/rung4_loop_t0.7_k20_p0.9_block_acc_len",
            "loop (rung 4), at temperature 0.7, top-k 20, top-p 0.9, by block",
        ),
        ("rung4_loop_acc_len_t0.7", "loop (rung 4), at temperature 0.7, by rejection"),
        ("simulated_acc_len", "simulated (rung 1)"),
        ("eval/simulated_acc_len_t1", "simulated (rung 1), at temperature 1, by rejection"),
        ("eval/rung6_server_acc_len", "server (rung 6)"),
        ("per_position_acc_2", "per_position_acc_2"),
    ],
)
def test_stored_names_have_words(stored: str, words: str) -> None:
    assert name_metric(stored) == words


HIDDEN, VOCAB, STREAMS = 16, 40, ("hf2", "hf4", "hf5", "last")


@dataclass(frozen=True)
class Row:
    input_ids: np.ndarray
    loss_mask: np.ndarray


class Rows:
    """Tokens of samples of 5 to 39 tokens, each supervised from some position on."""

    def __init__(self, count: int) -> None:
        generator = np.random.default_rng(3)
        self._rows = {}
        for index in range(count):
            length = int(generator.integers(5, 40))
            supervised = np.arange(length) >= generator.integers(1, length - 2)
            self._rows[f"s{index}"] = Row(generator.integers(0, VOCAB, length), supervised)

    def by_id(self, sample_id: str) -> Row:
        return self._rows[sample_id]

    def refs(self) -> list[SampleRef]:
        return [
            SampleRef(
                name,
                "run",
                name,
                "",
                {stream: f"{name}.{stream}" for stream in STREAMS},
                {},
                num_tokens=len(row.input_ids),
            )
            for name, row in self._rows.items()
        ]


def eagle3() -> Eagle3Strategy:
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    parts = TargetParts(
        hidden_size=HIDDEN,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        num_layers=8,
        max_positions=64,
        embedding=table,
        head=table,
    )
    vocab = build_vocab_mapping(np.arange(VOCAB)[::-1].copy(), 24)
    return Eagle3Strategy(Eagle3Options(ttt_length=3, draft_vocab_size=24), parts, vocab, seed=7)


def features(ref: SampleRef, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(int(ref.sample_id[1:]))
    return {name: torch.randn(ref.num_tokens, HIDDEN, generator=generator).to(dtype) for name in STREAMS}


def filled(store: FeatureStore, rows: Rows, dtype: torch.dtype) -> list[SampleRef]:
    return [store.put(ref, features(ref, dtype)) for ref in rows.refs()]


def evaluated(strategy: Eagle3Strategy, refs: list[SampleRef], store: FeatureStore, rows: Rows) -> EvalResult:
    loader = FeatureDataLoader.for_evaluation(refs, JoinedStore(store, rows), 4, strategy.collate)
    result = Evaluator().run(strategy, loader)
    assert result is not None
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_and_shared_stores_give_identical_metrics_and_the_shared_one_again(tmp_path: Path, dtype: torch.dtype):
    strategy, rows = eagle3(), Rows(19)
    local = LocalFeatureStore(tmp_path / "local")
    from_local = evaluated(strategy, filled(local, rows, dtype), local, rows)
    shared = KeyedSharedDirStore(tmp_path / "shared")
    refs = filled(shared, rows, dtype)
    reopened = KeyedSharedDirStore(tmp_path / "shared")
    first, second = (evaluated(strategy, refs, store, rows) for store in (shared, reopened))
    assert from_local == first == second
    assert from_local.metrics() == first.metrics()
    assert from_local.supervised_tokens > 19
    assert sum(from_local.correct) > 0
    assert reopened.health() | {"samples": 4 * 19, "leases": 0} == reopened.health()


def test_other_features_give_another_result(tmp_path: Path):
    """What the first test would miss if nothing of a store reached the metrics."""
    strategy, rows = eagle3(), Rows(5)
    store = KeyedSharedDirStore(tmp_path)
    refs = filled(store, rows, torch.float32)
    before = evaluated(strategy, refs, store, rows)
    store.free(refs[3].feature_keys.values())
    refs[3] = store.put(refs[3], {name: tensor.neg() for name, tensor in features(refs[3], torch.float32).items()})
    assert evaluated(strategy, refs, store, rows) != before
