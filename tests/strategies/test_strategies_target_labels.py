"""A training that reads its samples again finds the target's argmaxes once; its steps are those of one that does not."""

from __future__ import annotations

import pytest
import torch
from strategy_cases import MASKS, NAMES, make, sample_for

from draftworks.drafts import target_labels
from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput


def step(strategy: DraftStrategy, layout: str, step: int) -> StepOutput:
    samples = [sample_for(strategy, mask, seed) for seed, mask in enumerate(MASKS)]
    batch = (strategy.pack if layout == "packed" else strategy.collate)(samples, NAMES)
    output = strategy.forward_loss(batch, StepContext(step, 20, training=True))
    strategy.model.zero_grad()
    output.loss_sum.backward()
    return output


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("loss", ["token_mean", "specforge"])
@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_steps_are_those_without_kept_labels(name: str, loss: str, layout: str, monkeypatch) -> None:
    """Also of a step that teaches positions which the step before left out: a short unroll, or other chains."""
    options = {"short_unroll": 0.5} if name == "eagle3" else {}
    plain, keeping = make(name, loss=loss, **options), make(name, loss=loss, **options)
    keeping.reads_samples_again = True
    heads = []
    find = target_labels.argmax_of_head
    monkeypatch.setattr(target_labels, "argmax_of_head", lambda head, last: heads.append(last) or find(head, last))
    for number in (1, 15, 16):
        expected, found = step(plain, layout, number), step(keeping, layout, number)
        torch.testing.assert_close(found.loss_sum, expected.loss_sum)
        torch.testing.assert_close(found.metric_sums, expected.metric_sums)
        for one, other in zip(keeping.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert len(heads) == len(NAMES), "the head was applied to a sample more than once"


def test_an_objective_that_needs_the_whole_distribution_finds_no_labels() -> None:
    plain, asked = make("eagle3", objective="lk_alpha"), make("eagle3", objective="lk_alpha")
    asked.reads_samples_again = True
    assert step(asked, "padded", 3).loss_sum == step(plain, "padded", 3).loss_sum
