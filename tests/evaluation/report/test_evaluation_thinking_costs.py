"""What one draft for both kinds costs: figures by hand, and no cost where drafts are the same."""

from __future__ import annotations

import pytest
from report_toys import QUICK, prompts

from draftworks.evaluation.ladder.prompt_acceptance import PromptAcceptance
from draftworks.evaluation.report.thinking_costs import compare_trainings


def accepting(rate: int) -> tuple[PromptAcceptance, ...]:
    """Four prompts of two passes, which accept `rate` tokens each."""
    return prompts(*[[rate, rate]] * 4)


def walk(on: int, off: int):
    return {"on": accepting(on), "off": accepting(off)}


def test_each_training_is_compared_with_the_one_on_that_kind_alone():
    seeds = 2
    walks = {"on": [walk(4, 1)] * seeds, "off": [walk(1, 2)] * seeds, "mixed": [walk(3, 2)] * seeds}
    found = {(one.training, one.way): one for one in compare_trainings(walks, QUICK)}
    assert [one.acceptance.micro for one in found.values()] == [4, 1, 1, 2, 3, 2]
    assert {key: one.loss for key, one in found.items()} == {
        ("on", "on"): None,
        ("on", "off"): pytest.approx(0.5),
        ("off", "on"): pytest.approx(0.75),
        ("off", "off"): None,
        ("mixed", "on"): pytest.approx(0.25),
        ("mixed", "off"): pytest.approx(0.0),
    }
    mixed = found["mixed", "on"]
    assert (mixed.low, mixed.high, mixed.by_seed) == (0.25, 0.25, (0.25, 0.25))
    assert (mixed.acceptance.prompts, mixed.acceptance.passes) == (4, 16)


def test_seeds_that_disagree_widen_the_bounds():
    walks = {"on": [walk(4, 2)] * 2, "off": [walk(4, 2)] * 2, "mixed": [walk(4, 2), walk(2, 2)]}
    (mixed,) = [one for one in compare_trainings(walks, QUICK) if (one.training, one.way) == ("mixed", "on")]
    assert mixed.by_seed == (0.0, 0.5)
    assert mixed.low is not None
    assert mixed.high is not None
    assert mixed.low < 0 < 0.5 < mixed.high


def test_what_accepts_nothing_has_no_loss():
    walks = {name: [walk(0, 1)] for name in ("on", "off", "mixed")}
    found = {(one.training, one.way): one for one in compare_trainings(walks, QUICK)}
    assert found["mixed", "on"].loss is None
    assert found["mixed", "off"].loss == 0
