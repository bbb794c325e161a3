"""DSpark's loss over rows: its gradients are the formulas', and its acceptance is that of speculative sampling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from dflash_toys import label_blocks
from torch import Tensor

from draftworks.config.decoding import Decoding
from draftworks.drafts.objectives import LossSettings
from draftworks.drafts.sampling import verify
from draftworks.drafts.strategy import Proposal, StepContext
from draftworks.strategies.dspark.model import dspark_losses
from draftworks.strategies.dspark.options import DSparkOptions

VOCAB, HIDDEN, RANK = 11, 6, 3
COUNTS = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)
OPTIONS = {"gamma": 2.0, "ce_weight": 0.3, "tv_weight": 0.9, "confidence_weight": 0.7, "objective_chunk_blocks": 2}


@dataclass(frozen=True)
class Problem:
    """Random rows; several blocks are taught by one position."""

    states: Tensor
    narrow: Tensor
    confidences: Tensor | None
    projection: Tensor
    head: Tensor
    last: Tensor
    labels: Tensor

    @classmethod
    def drawn(cls, seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        rows = int(COUNTS.sum())

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        labels = torch.randint(VOCAB, COUNTS.shape, generator=generator)
        return cls(
            *(normal(rows, HIDDEN), normal(rows, RANK), normal(rows), normal(VOCAB, RANK)),
            *(normal(VOCAB, HIDDEN), normal(5, HIDDEN), labels),
        )

    def losses(self, positions=(3, 4, 0, 4, 4, 1), counts: Tensor = COUNTS, **options):
        blocks = label_blocks(self.states, self.last, self.labels, counts, torch.tensor(positions))
        settings = LossSettings(StepContext(training=True), DSparkOptions(**OPTIONS | options))
        return dspark_losses(blocks, self.narrow, self.confidences, self.head, self.projection, settings)


@pytest.mark.parametrize("options", [{}, {"ce_weight": 0.0, "objective_chunk_blocks": 9}], ids=["both", "tv"])
def test_gradients_are_those_of_small_differences(options):
    """Without the confidences: their target is a constant, and differences would see it move."""
    problem = Problem.drawn()

    def loss(states: Tensor, narrow: Tensor, projection: Tensor) -> Tensor:
        return (
            replace(problem, states=states, narrow=narrow, projection=projection)
            .losses(confidence_weight=0.0, **options)
            .loss
        )

    inputs = [each.clone().requires_grad_() for each in (problem.states, problem.narrow, problem.projection)]
    assert torch.autograd.gradcheck(loss, inputs)


def test_what_the_confidences_learn_teaches_the_proposals_nothing():
    problem = Problem.drawn()
    names = ("states", "narrow", "projection", "confidences")
    inputs = {name: getattr(problem, name).clone().requires_grad_() for name in names}
    with_them, without = (
        torch.autograd.grad(replace(problem, **inputs).losses(**options).loss, list(inputs.values()))
        for options in ({}, {"confidence_weight": 0.0})
    )
    for mine, other in zip(with_them[:3], without[:3]):
        assert torch.equal(mine, other)
    assert with_them[3].all()
    assert not without[3].any()


def test_a_draft_that_is_its_target_is_always_accepted_and_learns_from_labels_alone():
    problem = Problem.drawn()
    states, nothing = problem.states.clone().requires_grad_(), torch.zeros_like(problem.narrow)
    same = replace(problem, states=states, last=problem.states[:5], narrow=nothing, confidences=None)
    found = same.losses(positions=(0, 1, 2, 3, 4, 0), ce_weight=0.0)
    (gradient,) = torch.autograd.grad(found.loss, states)
    torch.testing.assert_close(gradient[:5], torch.zeros_like(gradient[:5]))
    assert gradient[5].any()
    torch.testing.assert_close(found.sums["acceptance_sums"][0], torch.tensor(3.0, dtype=torch.float64))
    assert "confidence_error_sums" not in found.sums


def test_acceptance_is_how_often_speculative_sampling_keeps_a_token():
    problem = Problem.drawn(seed=2)
    one = replace(problem, states=problem.states[:1], narrow=problem.narrow[:1], labels=problem.labels[:1, :1])
    tau = float(replace(one, confidences=None).losses((2,), torch.ones(1, 1, dtype=torch.bool)).sums["tau_sums"])
    p = (one.head @ one.states[0] + one.projection @ one.narrow[0]).softmax(-1)
    target = (one.head @ one.last[2]).expand(2, -1)
    generator, runs = torch.Generator().manual_seed(0), 2000
    by_rejection = Decoding(1.0, "rejection")
    drawn = torch.multinomial(p, runs, replacement=True, generator=generator)
    kept = sum(verify(Proposal(token[None], p[None]), target, by_rejection, generator).accepted for token in drawn)
    assert 0.1 < tau < 0.9
    assert abs(kept / runs - tau) < 4 * (0.25 / runs) ** 0.5
