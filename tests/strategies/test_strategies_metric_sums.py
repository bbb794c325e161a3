"""What a strategy says that its evaluations report is what they report."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draft_toys import DRAFT_VOCAB, HIDDEN, VOCAB, small_target

from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.strategy import StepContext
from draftworks.evaluation.evaluator import Evaluator
from draftworks.evaluation.ladder.replay import forward_with_replay
from draftworks.evaluation.result import make_example_metrics

BLOCKS = {"block_size": 4, "num_layers": 1, "layer_ids": [2], "num_anchors": 4}
VARIANTS = {
    "eagle3": {"ttt_length": 3},
    "eagle3 of one step": {"ttt_length": 1},
    "eagle3 specforge": {"ttt_length": 3, "loss": "specforge", "objective": "lk_alpha"},
    "dflash": BLOCKS,
    "dflash of one proposal": {**BLOCKS, "block_size": 2},
    "dflash2": {**BLOCKS, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
    "domino": {**BLOCKS, "emb_dim": 6, "gru_hidden_dim": 5},
    "domino shifted": {**BLOCKS, "emb_dim": 6, "gru_hidden_dim": 5, "shift_label": True},
    "dspark": {**BLOCKS, "markov_rank": 5},
    "dspark without confidence": {**BLOCKS, "markov_rank": 5, "confidence_head": False},
    "lilicorr": {**BLOCKS, "lattice_size": 8, "lattice_heads": 2},
    "peagle": {"num_depths": 3, "num_layers": 1},
    "xpress": {**BLOCKS, "refiner_rank": 5},
}


def test_every_strategy_says_what_it_reports():
    assert [name for name in list_strategies() if resolve_strategy(name).metric_sums is None] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_evaluation_reports_what_its_strategy_says(variant: str):
    spec = resolve_strategy(variant.split()[0])
    reduced = {"draft_vocab_size": DRAFT_VOCAB} if spec.uses_vocab_mapping else {}
    options = spec.parse_options({**VARIANTS[variant], **reduced}, where="toy")
    vocab = build_vocab_mapping(np.zeros(VOCAB, dtype=np.int64), DRAFT_VOCAB) if reduced else None
    strategy = spec.load_factory()(options, small_target(), vocab, 0)
    streams = {name: torch.randn(12, HIDDEN) for name in strategy.feature_names}
    sample = {"input_ids": torch.arange(12), "loss_mask": torch.arange(12) > 3, **streams}
    batch = strategy.collate([sample], ["a"])
    found = Evaluator().run(forward_with_replay(strategy, 1), [batch], StepContext(training=False))
    assert found is not None
    assert spec.metric_sums is not None
    expected = make_example_metrics(spec.metric_sums(options))
    assert {k: type(v) is list for k, v in found.metrics().items()} == {k: type(v) is list for k, v in expected.items()}
