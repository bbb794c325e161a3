"""What tests of all strategies ask of each: `<strategy>_cases.py` in its folder of tests. Adding one edits no other file."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_toys import DRAFT_VOCAB, HIDDEN, VOCAB, small_target
from torch import Tensor

from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.drafts.target_parts import TargetParts
from draftworks.export.readers.reader import ExportReader

Options = Mapping[str, Any]
Sample = dict[str, Tensor]
FOLDER = Path(__file__).parents[1] / "strategies"
MASKS = [[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]]
NAMES = ["a", "b", "c"]
SIZES = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 12}
"""Other than the target's."""
HALFWAY = StepContext(global_step=5, total_steps=20, training=True)
BLOCKS = {"block_size": 4, "num_layers": 2, "num_anchors": 5}


@dataclass
class Sums:
    """What an independent reader says of a batch: the loss, differentiable, metric sums by place, and by block."""

    loss: Tensor
    by_place: dict[str, Tensor] = field(default_factory=dict)
    by_block: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class StrategyCases:
    """Options of a strategy that are small, beside the sizes that strategies of its kind share.

    Attributes:
        read: the reader of its exports over the weights of a draft in training.
        expect: the sums of samples in a pass, from that reader alone.
        objectives: options that change how the loss is computed.
        variants: others with which losses are those of the reader.
        packed: options of packing.
        structural: options of drafts that compute otherwise, so that one is nothing to start the other from.
        refused: options that do not go together or do not suit the target, each with words of the message.
        fixed: options whose losses and gradients are in `expected.json` beside the cases, by name.
        head_scale: of the target's head.
        exported: options of drafts that are exported, where those above make no draft for servers.
        learning: options of a draft that learns to propose some tokens of the embedded target in a few steps.
        exports: options, by format, of drafts that go out and come in again, beside plain ones.
    """

    options: Options
    read: Callable[[DraftStrategy], ExportReader]
    expect: Callable[[DraftStrategy, list[Sample], StepContext], Sums]
    objectives: tuple[Options, ...] = ({},)
    variants: tuple[Options, ...] = ()
    packed: tuple[Options, ...] = ({},)
    structural: tuple[Options, ...] = ()
    refused: tuple[tuple[Options, str], ...] = ()
    fixed: Mapping[str, Options] = field(default_factory=lambda: {"default": {}})
    head_scale: float = 1.0
    exported: Options = field(default_factory=dict)
    learning: dict[str, Any] = field(default_factory=dict)
    exports: Mapping[str, tuple[Options, ...]] = field(default_factory=dict)


@functools.cache
def find_cases() -> dict[str, StrategyCases]:
    """Return the cases of all strategies that have some; MTP, the target's own layer, is made otherwise."""
    found = {}
    for name in list_strategies():
        folder = FOLDER / name
        if (folder / f"{name}_cases.py").exists():
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
            found[name] = importlib.import_module(f"{name}_cases").CASES
    return found


def is_of_blocks(name: str) -> bool:
    return "block_size" in resolve_strategy(name).options.model_fields


def list_block_drafts() -> list[str]:
    return [name for name in find_cases() if is_of_blocks(name)]


def list_options(name: str, sizes: Options = BLOCKS) -> dict[str, Any]:
    """Return small options of a strategy; `sizes` are those of block drafts."""
    spec = resolve_strategy(name)
    reduced = {"draft_vocab_size": DRAFT_VOCAB} if spec.uses_vocab_mapping else {}
    return {**(sizes if is_of_blocks(name) else {}), **reduced, **find_cases()[name].options}


def reduced_vocabulary() -> VocabMapping:
    ids = np.sort(np.random.default_rng(2).permutation(VOCAB)[:DRAFT_VOCAB])
    return VocabMapping(ids - np.arange(DRAFT_VOCAB), np.isin(np.arange(VOCAB), ids))


def make(
    name: str, dtype: torch.dtype = torch.float64, seed: int = 3, moved: float = 0.1, **options: Any
) -> DraftStrategy:
    """Return a draft for the small target, its weights away from where they begin, so that a forgotten one shows."""
    spec, parts, scale = resolve_strategy(name), small_target(), find_cases()[name].head_scale
    taps = {"layer_ids": [1, 3, 6]} if name != "eagle3" else {}
    vocab = reduced_vocabulary() if spec.uses_vocab_mapping else None
    typed = spec.options(**list_options(name) | taps | options)
    strategy = spec.load_factory()(typed, cast_target(parts, dtype, scale), vocab, seed)
    strategy.model.to(dtype)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in strategy.model.parameters():
            weight.add_(moved * torch.randn(weight.shape, generator=generator).to(dtype))
    return strategy


def cast_target(parts: TargetParts, dtype: torch.dtype, head_scale: float = 1.0) -> TargetParts:
    return replace(parts, embedding=parts.embedding.to(dtype), head=head_scale * parts.head.to(dtype))


def sample_for(strategy: DraftStrategy, mask: list[int], seed: int, dtype: torch.dtype = torch.float64) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    features = {
        name: torch.randn(len(mask), HIDDEN, generator=generator).to(dtype) for name in sorted(strategy.feature_names)
    }
    ids = torch.randint(VOCAB, (len(mask),), generator=generator)
    return {"input_ids": ids, "loss_mask": torch.tensor(mask, dtype=torch.bool), **features}


def samples_for(strategy: DraftStrategy, dtype: torch.dtype = torch.float64) -> list[Sample]:
    return [sample_for(strategy, mask, seed, dtype) for seed, mask in enumerate(MASKS)]


def side_by_side(strategy: DraftStrategy, one: Sample) -> Tensor:
    """The taps as readers take them, (S, taps · H)."""
    return torch.cat([one[name] for name in strategy.feature_names if name != "last"], dim=-1)


def gradients(strategy: DraftStrategy, loss: Tensor) -> dict[str, Tensor]:
    named = [(name, weight) for name, weight in strategy.model.named_parameters() if weight.requires_grad]
    names, weights = zip(*named, strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights, materialize_grads=True), strict=True))
