"""LiLiCorr trains and proposes what the independent reader of its exports computes."""

from __future__ import annotations

from functools import partial

import pytest
import strategy_cases
import torch
from dflash_toys import MASKS, OPTIONS, sample
from lilicorr_cases import CASES, CONVOLVED
from strategy_cases import NAMES

from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.lilicorr.model import Candidates, LatticeScores, follow_labels
from draftworks.strategies.lilicorr.options import LiLiCorrOptions
from draftworks.strategies.lilicorr.strategy import LiLiCorrStrategy

SAMPLES = [sample(mask, seed, taps=("hf1", "hf3", "hf6", "last")) for seed, mask in enumerate(MASKS)]
make = partial(strategy_cases.make, "lilicorr")


def test_labels_are_followed_through_the_lattice():
    """One block of two places with two candidates each, by hand."""
    tokens = torch.tensor([[[7, 3], [5, 7]]])
    scores = LatticeScores(torch.tensor([[1.0, 2.0]]), torch.tensor([[[[3.0, 4.0], [6.0, 5.0]]]]))
    chain = follow_labels(Candidates(tokens, torch.zeros(1, 2, 2)), scores, torch.tensor([[3, 7]]))
    assert chain.label_index.tolist() == [[1, 1]]
    assert chain.logits.tolist() == [[[1.0, 2.0], [6.0, 5.0]]]
    assert chain.is_chosen.tolist() == [[True, False]]
    beside = follow_labels(Candidates(tokens, torch.zeros(1, 2, 2)), scores, torch.tensor([[9, 7]]))
    assert beside.found.tolist() == [[False, True]]
    assert beside.reachable.tolist() == [[False, False]]


@pytest.mark.parametrize("options", [{}, CONVOLVED], ids=str)
def test_the_backbone_begins_as_dflash(parts, options):
    """Its convolutions are the identity then."""
    strategy = LiLiCorrStrategy(LiLiCorrOptions(**OPTIONS | CASES.options | options), parts, None, seed=3)
    dflash = DFlashStrategy(DFlashOptions(**OPTIONS), parts, None, seed=3)
    backbone = strategy.model.backbone.state_dict()
    assert all(torch.equal(weight, backbone[name]) for name, weight in dflash.model.state_dict().items())
    batch = dflash.collate(SAMPLES, NAMES)
    rows = batch["loss_mask"].bool()
    proposed = [each.backbone.propose(batch["input_ids"], batch["features"], rows, 3) for each in (strategy, dflash)]
    assert torch.equal(*proposed)


def test_an_identity_is_that_from_before_there_were_convolutions():
    plain, convolved = (LiLiCorrOptions(**OPTIONS, **more).to_identity() for more in ({}, CONVOLVED))
    assert convolved == {**plain, **CONVOLVED}


def test_one_candidate_proposes_what_the_backbone_does():
    strategy = make(candidate_topk=1)
    batch = strategy.collate(SAMPLES, NAMES)
    rows = torch.ones(batch["input_ids"].shape, dtype=torch.bool)
    alone = strategy.backbone.propose(batch["input_ids"], batch["features"], rows, 3)
    assert torch.equal(strategy.propose(batch, rows, 3), alone)
