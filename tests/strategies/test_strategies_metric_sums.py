"""What a strategy says that its evaluations report is what they report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from strategy_cases import find_cases, make, sample_for

from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.drafts.strategy import StepContext
from draftworks.evaluation.evaluator import Evaluator
from draftworks.evaluation.ladder.replay import forward_with_replay
from draftworks.evaluation.result import make_example_metrics

VARIANTS = [(name, each) for name, cases in find_cases().items() for each in (*cases.objectives, *cases.variants)]


def test_every_strategy_says_what_it_reports():
    assert [name for name in list_strategies() if resolve_strategy(name).metric_sums is None] == []


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_an_evaluation_reports_what_its_strategy_says(name: str, options: dict[str, Any]):
    strategy = make(name, torch.float32, **options)
    batch = strategy.collate([sample_for(strategy, [0] * 4 + [1] * 8, 1, torch.float32)], ["a"])
    found = Evaluator().run(forward_with_replay(strategy, 1), [batch], StepContext(training=False))
    assert found is not None
    assert strategy.spec.metric_sums is not None
    expected = make_example_metrics(strategy.spec.metric_sums(strategy.options))
    assert {k: type(v) is list for k, v in found.metrics().items()} == {k: type(v) is list for k, v in expected.items()}
