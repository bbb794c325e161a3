"""A metric that decides which draft is the best has to be a number that the strategy's evaluations report."""

from __future__ import annotations

import re

import pytest

DFLASH = {"mask_token_id": 3, "block_size": 4}
EAGLE = {"ttt_length": 2, "draft_vocab_size": 64}


@pytest.mark.parametrize(
    ("strategy", "options", "metric"),
    [
        ("eagle3", EAGLE, "eval/acceptance_len"),
        ("eagle3", EAGLE, "eval/per_position_acc"),
        ("eagle3", EAGLE, "eval/ploss_2"),
        ("dflash", DFLASH, "eval/acceptance_rate_0"),
        ("dflash", DFLASH, "eval/accept_len"),
    ],
)
def test_one_that_is_never_reported_is_refused_beside_those_that_are(fleet, strategy, options, metric):
    fleet.write(strategies={strategy: {"options": options, "training": {"best_metric": metric}}})
    (error,) = fleet.check().errors
    assert f"strategies.{strategy}.training.best_metric: no evaluation has '{metric}' as a number" in error
    assert re.search("did you mean eval/|there are: eval/rung", error)


@pytest.mark.parametrize(
    ("strategy", "options", "metric"),
    [
        ("eagle3", EAGLE, "eval/ploss_1"),
        ("eagle3", EAGLE, "eval/acceptance_rate_0"),
        ("eagle3", EAGLE, "eval/unconditional_acceptance_rate_1"),
        ("eagle3", EAGLE, "eval/rung3_walk_acc_len"),
        ("dflash", DFLASH, "eval/rung2_block_acc_len"),
        ("dflash", DFLASH, "eval/supervised_tokens"),
    ],
)
def test_one_that_is_reported_is_not(fleet, strategy, options, metric):
    fleet.write(strategies={strategy: {"options": options, "training": {"best_metric": metric}}})
    assert fleet.check().errors == []
