"""What a rank does in a sharded step of every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from draft_toys import small_target
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from draftworks.data.vocab import VocabMapping
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.drafts.target_parts import TargetParts
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

SOFT = 0.3


def make(strategy: str, vocab: VocabMapping) -> DraftStrategy:
    if strategy == "eagle3":
        return Eagle3Strategy(Eagle3Options(ttt_length=4, draft_vocab_size=24), small_target(), vocab, seed=3)
    if strategy == "peagle":
        options = PEagleOptions(num_depths=4, num_layers=2, draft_vocab_size=24, fc_norm=True)
        return PEagleStrategy(options, small_target(), vocab, seed=3)
    blocks = {"block_size": 4, "num_layers": 2, "layer_ids": [2, 4, 5], "num_anchors": 4}
    if strategy == "dflash2":
        sizes = {"conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6}
        made = DFlash2Strategy(DFlash2Options(**blocks, **sizes), small_target(), None, seed=3)
        selector = made.model.candidate_selector
        nn.init.normal_(selector.successor_codebook, generator=torch.Generator().manual_seed(4))
        return made
    if strategy == "domino":
        made = DominoStrategy(DominoOptions(**blocks, emb_dim=6, gru_hidden_dim=5), small_target(), None, seed=3)
        nn.init.normal_(made.model.correction.projection, generator=torch.Generator().manual_seed(4))
        return made
    if strategy == "dspark":
        heads = {"markov_rank": 5, "markov_head_type": "rnn"}
        made = DSparkStrategy(DSparkOptions(**blocks, **heads), _soft_spoken(small_target()), None, seed=3)
        nn.init.normal_(made.model.markov_head.projection, std=SOFT, generator=torch.Generator().manual_seed(4))
        return made
    if strategy == "xpress":
        made = XPressStrategy(XPressOptions(**blocks, refiner_rank=5), _soft_spoken(small_target()), None, seed=3)
        for zeros in (made.model.refiner_head.projection, made.model.refiner_head.mix_l):
            nn.init.normal_(zeros, std=SOFT, generator=torch.Generator().manual_seed(4))
        return made
    if strategy == "lilicorr":
        lattice = {"candidate_topk": 16, "lattice_size": 8, "lattice_heads": 2}
        return LiLiCorrStrategy(LiLiCorrOptions(**blocks, **lattice), small_target(), None, seed=3)
    options = DFlashOptions(**blocks)
    return DFlashStrategy(options, small_target(), None, seed=3)


def _soft_spoken(target: TargetParts) -> TargetParts:
    """Less sure of its words. Where p is nearly q, rounding turns the sign of p - q around, and with it a gradient that is large
    where both are sure."""
    return replace(target, head=target.head * SOFT)


def sharded_steps(rank: int, folder: Path, names: Sequence[str]) -> None:
    """Rank 0 writes its whole gradients, one `{strategy}-{dtype}.safetensors` for every strategy and compute dtype.

    Args:
        folder: holds `sample{rank}.safetensors` and `vocab.safetensors`.
    """
    mesh = init_device_mesh("cpu", (2,))
    sample = load_file(folder / f"sample{rank}.safetensors")
    mapping = VocabMapping.load(folder / "vocab.safetensors")
    for name, dtype in product(names, ("float32", "bfloat16")):
        strategy = make(name, mapping)
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for module in (*strategy.fsdp_blocks(), strategy.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        output = strategy.forward_loss(strategy.collate([sample], [str(rank)]), StepContext(training=True))
        (output.loss_sum * 2).backward()  # FSDP averages over two ranks
        whole = {key: p.grad.full_tensor() for key, p in strategy.model.named_parameters()}
        if rank == 0:
            save_file(whole, folder / f"{name}-{dtype}.safetensors")
