"""One rank of a sharded step: `fsdp_worker.py RANK FOLDER STRATEGY`; rank 0 writes its whole gradients to FOLDER, one
`{dtype}.safetensors` per compute dtype.

FOLDER holds `sample{rank}.safetensors` and `vocab.safetensors`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from draft_toys import small_target
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from draftworks.data.vocab import VocabMapping
from draftworks.drafts.dflash import DFlashStrategy
from draftworks.drafts.domino import DominoStrategy
from draftworks.drafts.eagle3 import Eagle3Strategy
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.strategies import DFlashOptions, DominoOptions, Eagle3Options


def make(strategy: str, vocab: VocabMapping) -> DraftStrategy:
    if strategy == "eagle3":
        return Eagle3Strategy(Eagle3Options(ttt_length=4, draft_vocab_size=24), small_target(), vocab, seed=3)
    blocks = {"block_size": 4, "num_layers": 2, "layer_ids": [2, 4, 5], "num_anchors": 4}
    if strategy == "domino":
        made = DominoStrategy(DominoOptions(**blocks, emb_dim=6, gru_hidden_dim=5), small_target(), None, seed=3)
        nn.init.normal_(made.model.correction.projection, generator=torch.Generator().manual_seed(4))
        return made
    options = DFlashOptions(**blocks)
    return DFlashStrategy(options, small_target(), None, seed=3)


def main(rank: int, folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    sample = load_file(folder / f"sample{rank}.safetensors")
    mapping = VocabMapping.load(folder / "vocab.safetensors")
    for dtype in ("float32", "bfloat16"):
        strategy = make(name, mapping)
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for module in (*strategy.fsdp_blocks(), strategy.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        output = strategy.forward_loss(strategy.collate([sample], [str(rank)]), StepContext())
        (output.loss_sum * 2).backward()  # FSDP averages over two ranks
        whole = {key: p.grad.full_tensor() for key, p in strategy.model.named_parameters()}
        if rank == 0:
            save_file(whole, folder / f"{dtype}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
