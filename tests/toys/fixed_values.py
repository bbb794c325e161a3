"""Drafts and samples of which the loss and its gradients are known: `expected_training.json` beside the tests of the strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from draft_toys import DRAFT_VOCAB, HIDDEN, VOCAB, small_target
from torch import Tensor

from draftworks.data.vocab import VocabMapping
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dflash2.options import DFlash2Options
from draftworks.strategies.dflash2.strategy import DFlash2Strategy
from draftworks.strategies.domino.options import DominoOptions
from draftworks.strategies.domino.strategy import DominoStrategy
from draftworks.strategies.dspark.options import DSparkOptions
from draftworks.strategies.dspark.strategy import DSparkStrategy
from draftworks.strategies.eagle3.options import Eagle3Options
from draftworks.strategies.eagle3.strategy import Eagle3Strategy
from draftworks.strategies.lilicorr.options import LiLiCorrOptions
from draftworks.strategies.lilicorr.strategy import LiLiCorrStrategy
from draftworks.strategies.peagle.options import PEagleOptions
from draftworks.strategies.peagle.strategy import PEagleStrategy
from draftworks.strategies.xpress.options import XPressOptions
from draftworks.strategies.xpress.strategy import XPressStrategy

MASKS = [[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]]
NAMES = ["a", "b", "c"]
HALFWAY = StepContext(global_step=5, total_steps=20, training=True)
BLOCK = {"block_size": 4, "num_layers": 2, "layer_ids": [1, 3, 6], "num_anchors": 5}
CHAIN = {"num_depths": 4, "num_layers": 2, "draft_vocab_size": DRAFT_VOCAB, "layer_ids": [1, 3, 6]}
UNROLL = {"ttt_length": 4, "draft_vocab_size": DRAFT_VOCAB}
SELECTOR = {"conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6}
GRU = {"emb_dim": 6, "gru_hidden_dim": 5}
LATTICE = {"candidate_topk": 32, "lattice_size": 8, "lattice_heads": 2, "factor_dim": 6, "margin_weight": 0.3}


@dataclass(frozen=True)
class Case:
    """A strategy by its class and the class of its options."""

    made_by: type[DraftStrategy]
    options: object

    def strategy(self) -> DraftStrategy:
        """In float64, its weights away from where they begin, so that a forgotten one shows."""
        parts = small_target()
        wide = replace(parts, embedding=parts.embedding.double(), head=parts.head.double())
        ids = np.sort(np.random.default_rng(2).permutation(VOCAB)[:DRAFT_VOCAB])
        reduced = VocabMapping(ids - np.arange(DRAFT_VOCAB), np.isin(np.arange(VOCAB), ids))
        with_vocabulary = self.made_by in (Eagle3Strategy, PEagleStrategy)
        strategy = self.made_by(self.options, wide, reduced if with_vocabulary else None, 3)
        strategy.model.double()
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for weight in strategy.model.parameters():
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator).double())
        return strategy


CASES = {
    "eagle3": Case(Eagle3Strategy, Eagle3Options(**UNROLL)),
    "eagle3 specforge": Case(Eagle3Strategy, Eagle3Options(**UNROLL, loss="specforge")),
    "dflash": Case(DFlashStrategy, DFlashOptions(**BLOCK, gamma=2.0)),
    "dflash dpace, window": Case(DFlashStrategy, DFlashOptions(**BLOCK, weighting="dpace", sliding_window=3)),
    "dflash2": Case(DFlash2Strategy, DFlash2Options(**BLOCK, gamma=2.0, selector_loss_alpha=0.7, **SELECTOR)),
    "domino": Case(DominoStrategy, DominoOptions(**BLOCK, **GRU)),
    "dspark": Case(DSparkStrategy, DSparkOptions(**BLOCK, markov_rank=5)),
    "dspark rnn": Case(DSparkStrategy, DSparkOptions(**BLOCK, markov_rank=5, markov_head_type="rnn")),
    "lilicorr": Case(LiLiCorrStrategy, LiLiCorrOptions(**BLOCK, **LATTICE)),
    "peagle": Case(PEagleStrategy, PEagleOptions(**CHAIN)),
    "peagle fc_norm": Case(PEagleStrategy, PEagleOptions(**CHAIN, fc_norm=True, norm_before_residual=True)),
    "xpress": Case(XPressStrategy, XPressOptions(**BLOCK, refiner_rank=5)),
}


def samples(strategy: DraftStrategy) -> list[dict[str, Tensor]]:
    made = []
    for seed, mask in enumerate(MASKS):
        generator = torch.Generator().manual_seed(seed)
        features = {
            n: torch.randn(len(mask), HIDDEN, generator=generator).double() for n in sorted(strategy.feature_names)
        }
        ids = torch.randint(VOCAB, (len(mask),), generator=generator)
        made.append({"input_ids": ids, "loss_mask": torch.tensor(mask, dtype=torch.bool), **features})
    return made


def projections(strategy: DraftStrategy, loss: Tensor) -> dict[str, list[float]]:
    """Of every weight's gradient, its norm and its product with a fixed direction."""
    names, weights = zip(*[(n, w) for n, w in strategy.model.named_parameters() if w.requires_grad], strict=True)
    gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    directions = (torch.arange(g.numel(), dtype=torch.float64).cos() for g in gradients)
    return {
        name: [float(g.norm()), float(g.flatten() @ direction)]
        for name, g, direction in zip(names, gradients, directions, strict=True)
    }
