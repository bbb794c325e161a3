"""The readers of DFlash and EAGLE-3 over the weights of a draft in training; those of other strategies are made of these.

Readers share no code with models, drafters and writers. Here they get the draft's own parameters under the canonical names,
so a loss that is computed from their logits has gradients for these parameters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.strategy import DraftStrategy
from draftworks.export.readers.arithmetic import LayerSizes, RopeTable
from draftworks.export.readers.reader import DraftVocabulary, ExportReader
from draftworks.storage.identity import LayerTap
from draftworks.strategies.dflash.reader import DFlashReader, Mask, anchored_mask, moving_mask
from draftworks.strategies.eagle3.reader import Eagle3Norms, Eagle3Reader


def _mask(window: int | None, kind: str) -> Mask:
    if window is None:
        return anchored_mask
    if kind == "token":
        return partial(moving_mask, window=window)
    return partial(anchored_mask, window=window, causal=kind == "anchor")


def dflash_reader(strategy: DraftStrategy, first_row: int = 1) -> DFlashReader:
    """The backbone, too, of a strategy that is built on DFlash."""
    config, target = strategy.config(), strategy.target
    windows = strategy.options.layer_windows()
    weights = _weights(strategy, "backbone.", "correction.")
    return DFlashReader(
        taps=_taps(config),
        sizes=_sizes(config, len(windows), torch.float64),
        masks=tuple(_mask(size, strategy.options.sliding_window_kind) for size in windows),
        block_size=config["block_size"],
        mask_token=config["mask_token_id"],
        first_row=first_row,
        vocabulary=DraftVocabulary(torch.arange(config["vocab_size"]), config["vocab_size"]),
        weights=weights,
        embedding=target.embedding,
        head=target.head,
        dtype=weights["fc.weight"].dtype,
    )


def propose_greedily(reader: ExportReader, features: Tensor, next_tokens: Tensor, count: int) -> list[int]:
    """Return the target's ids of `count` first choices, each after those before it, all computed again for every token."""
    drawn = next_tokens[:0]
    for _ in range(count):
        choice = reader.logits(features, next_tokens, F.pad(drawn, (0, 1)))[-1].argmax()
        drawn = torch.cat([drawn, reader.vocabulary.ids[choice][None]])
    return drawn.tolist()


def chain_reader(strategy: DraftStrategy, norms: Eagle3Norms, layer: str, window: int | None) -> Eagle3Reader:
    config, target, model = strategy.config(), strategy.target, strategy.model
    weights = _weights(strategy)
    return Eagle3Reader(
        taps=_taps(config),
        sizes=_sizes(config, config.get("num_layers", 1), torch.float32),
        norms=norms,
        window=window,
        layer=layer,
        vocabulary=DraftVocabulary(model.t2d.nonzero()[:, 0], config["vocab_size"]),
        weights=weights,
        embedding=weights.get("embed_tokens.weight", target.embedding),
        dtype=weights["fc.weight"].dtype,
    )


def _weights(strategy: DraftStrategy, *prefixes: str) -> dict[str, Tensor]:
    """The parameters under canonical names without `prefixes`, which exports do not have either."""
    named = {}
    for name, weight in strategy.model.named_parameters():
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        named[name] = weight
    return named


def _taps(config: dict[str, Any]) -> tuple[LayerTap, ...]:
    return tuple(LayerTap(int(name.removeprefix("hf"))) for name in config["feature_names"] if name != "last")


def _sizes(config: dict[str, Any], layers: int, frequencies: torch.dtype) -> LayerSizes:
    # Models keep rotary frequencies in fp32, which comparisons to 1e-10 would see.
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    assert rope["rope_type"] == "default", "other types are compared with transformers in tests/export"
    exponents = torch.arange(0, head_dim, 2, dtype=frequencies) / head_dim
    table = RopeTable((1.0 / rope["rope_theta"] ** exponents).double())
    return LayerSizes(layers, head_dim, config["rms_norm_eps"], table)
