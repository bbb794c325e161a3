"""Our drafters and the readers agree on every distribution of a proposal, given the same weights in each layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from random_exports import (
    BLOCK_SIZE,
    DFLASH_LAYERS,
    EMB_DIM,
    GRU_HIDDEN_DIM,
    INTERMEDIATE,
    MARKOV_RANK,
    MASK_TOKEN,
    NUM_DEPTHS,
    PEAGLE_LAYERS,
    SAYS,
    RandomExport,
    draft_vocabulary,
    sglang_eagle3,
    speculators_dflash,
    speculators_dspark,
    speculators_eagle3,
    speculators_peagle,
    zlab_dflash,
    zlab_domino,
    zlab_dspark,
)
from torch import Tensor

from draftworks.data.vocab import VocabMapping
from draftworks.drafts.strategy import DraftStrategy, Proposal
from draftworks.drafts.target_parts import TargetParts
from draftworks.export.same_logits import open_export
from draftworks.strategies.dflash.drafter import DFlashDrafter
from draftworks.strategies.dflash.options import DFlashOptions
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.domino.options import DominoOptions
from draftworks.strategies.domino.strategy import DominoStrategy
from draftworks.strategies.dspark.options import DSparkOptions
from draftworks.strategies.dspark.strategy import DSparkStrategy
from draftworks.strategies.eagle3.options import Eagle3Options
from draftworks.strategies.eagle3.strategy import Eagle3Strategy
from draftworks.strategies.peagle.options import PEagleOptions
from draftworks.strategies.peagle.strategy import PEagleStrategy

TAPS = [2, 4, 5]


@pytest.fixture(scope="module")
def parts(tiny_target) -> TargetParts:
    return TargetParts.load(tiny_target)


def moved(strategy: DraftStrategy) -> DraftStrategy:
    """With norms away from 1, so that one in another place shows."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in strategy.model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return strategy


def reduced() -> VocabMapping:
    vocabulary = draft_vocabulary(SAYS)
    return VocabMapping(vocabulary["d2t"].numpy(), vocabulary["t2d"].numpy())


def our_eagle3(parts: TargetParts, **options) -> DraftStrategy:
    chosen = Eagle3Options(draft_vocab_size=SAYS, intermediate_size=INTERMEDIATE, layer_ids=TAPS, **options)
    return moved(Eagle3Strategy(chosen, parts, reduced(), seed=5))


def our_peagle(parts: TargetParts, **options) -> DraftStrategy:
    sizes = {"num_depths": NUM_DEPTHS, "num_layers": PEAGLE_LAYERS, "intermediate_size": INTERMEDIATE}
    chosen = PEagleOptions(**sizes, draft_vocab_size=SAYS, mask_token_id=MASK_TOKEN, layer_ids=TAPS, **options)
    return moved(PEagleStrategy(chosen, parts, reduced(), seed=5))


def our_dflash(parts: TargetParts, **options) -> DraftStrategy:
    sizes = {"block_size": BLOCK_SIZE, "num_layers": DFLASH_LAYERS, "intermediate_size": INTERMEDIATE}
    chosen = DFlashOptions(**sizes, mask_token_id=MASK_TOKEN, layer_ids=TAPS, **options)
    return moved(DFlashStrategy(chosen, parts, None, seed=5))


def our_domino(parts: TargetParts, **options) -> DraftStrategy:
    sizes = {"block_size": BLOCK_SIZE, "num_layers": DFLASH_LAYERS, "intermediate_size": INTERMEDIATE}
    correction = {"emb_dim": EMB_DIM, "gru_hidden_dim": GRU_HIDDEN_DIM}
    chosen = DominoOptions(**sizes, **correction, mask_token_id=MASK_TOKEN, layer_ids=TAPS, **options)
    strategy = moved(DominoStrategy(chosen, parts, None, seed=5))
    torch.nn.init.normal_(strategy.model.correction.projection, generator=torch.Generator().manual_seed(12))
    return strategy


def our_dspark(parts: TargetParts, **options) -> DSparkStrategy:
    sizes = {"block_size": BLOCK_SIZE, "num_layers": DFLASH_LAYERS, "intermediate_size": INTERMEDIATE}
    chosen = DSparkOptions(**sizes, markov_rank=MARKOV_RANK, mask_token_id=MASK_TOKEN, layer_ids=TAPS, **options)
    strategy, generator = moved(DSparkStrategy(chosen, parts, None, seed=5)), torch.Generator().manual_seed(12)
    for weight in strategy.model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, generator=generator)
    return strategy


def proposed(strategy: DraftStrategy, features: Mapping[str, Tensor], next_tokens: Tensor, count: int) -> Proposal:
    """Given the text in three pieces, as a server gets it."""
    drafter = strategy.drafter()
    for start, end in pairwise((0, 4, 5, len(next_tokens))):
        drafter.extend({name: stream[start:end] for name, stream in features.items()}, next_tokens[start:end])
    return drafter.propose(count, temperature=1.0, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def check(tmp_path, tiny_tensors, question):
    """That a strategy proposes what its weights do when they are read back in a format."""

    def agree(strategy: DraftStrategy, export_format: str, export: RandomExport, count: int) -> None:
        reader = open_export(export_format, export.write(tmp_path / "export"), tiny_tensors)
        features = dict(zip(("hf2", "hf4", "hf5"), question.features.chunk(3, dim=-1), strict=True))
        proposal = proposed(strategy, features, question.next_tokens, count)
        theirs = reader.log_probabilities(features, question.next_tokens, proposal.tokens)
        torch.testing.assert_close(proposal.probabilities.log().double(), theirs, rtol=0, atol=1e-4)
        torch.testing.assert_close(proposal.probabilities.double(), theirs.exp(), rtol=0, atol=1e-6)

    return agree


SLIDING = {"transformer_layer_config__layer_types": ["sliding_attention"]}
PLAIN = [({}, {}), ({"fc_norm": True}, {"fc_norm": True})]
EAGLE3 = [
    *PLAIN,
    ({"feedback": "post_norm"}, {"norm_output": True}),
    ({"fc_norm": True, "feedback": "post_norm"}, {"fc_norm": True, "norm_output": True}),
    ({"norm_before_fc": True}, {"norm_before_fc": True}),
    ({"norm_before_residual": True}, {"norm_before_residual": True}),
    ({"sliding_window": 4}, SLIDING | {"transformer_layer_config__sliding_window": 4}),
    (
        {"norm_before_fc": True, "norm_before_residual": True, "feedback": "post_norm", "sliding_window": 3},
        {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
        | SLIDING
        | {"transformer_layer_config__sliding_window": 3},
    ),
]


@pytest.mark.parametrize(("options", "settings"), PLAIN)
def test_eagle3_is_what_sglang_would_compute(options, settings, check, parts):
    strategy = our_eagle3(parts, **options)
    export = replace(sglang_eagle3(**settings), tensors=strategy.model.state_dict())
    check(strategy, "sglang_eagle3", export, count=4)


@pytest.mark.parametrize(("options", "settings"), EAGLE3)
def test_eagle3_is_what_speculators_would_compute(options, settings, check, parts, tiny_folder):
    strategy = our_eagle3(parts, **options)
    embedding = {"embed_tokens.weight": parts.embedding.clone()}
    export = speculators_eagle3(tiny_folder, parts.embedding).with_config(**settings)
    export = replace(export, tensors=strategy.model.state_dict() | embedding).renamed("midlayer.", "layers.0.")
    check(strategy, "speculators_eagle3", export, count=4)


@pytest.mark.parametrize(
    "options", [{}, {"fc_norm": True}, {"norm_before_residual": True}, {"train_embeddings": False}]
)
def test_peagle_is_what_speculators_would_compute(options, check, parts, tiny_folder):
    strategy = our_peagle(parts, **options)
    settings = {name: value for name, value in options.items() if name != "train_embeddings"}
    tensors = {"embed_tokens.weight": parts.embedding.clone(), **strategy.model.state_dict()}
    check(
        strategy,
        "speculators_peagle",
        replace(speculators_peagle(tiny_folder, **settings), tensors=tensors),
        NUM_DEPTHS,
    )


@pytest.mark.parametrize("window", [None, 4])
def test_dflash_is_what_z_lab_and_sglang_would_compute(window, check, parts):
    strategy = our_dflash(parts, sliding_window=window)
    export = replace(zlab_dflash(window), tensors=strategy.model.state_dict())
    check(strategy, "zlab_dflash", export, count=BLOCK_SIZE - 1)


def test_dflash_without_windows_is_what_speculators_would_compute(check, parts, tiny_folder):
    strategy = our_dflash(parts)
    export = replace(speculators_dflash(tiny_folder), tensors=strategy.model.state_dict())
    check(strategy, "speculators_dflash", export, count=BLOCK_SIZE - 1)


@pytest.mark.parametrize("shift_label", [True, False])
def test_domino_is_what_sglang_would_compute(shift_label, check, parts):
    strategy = our_domino(parts, shift_label=shift_label)
    tensors = {name.split(".", 1)[1]: tensor for name, tensor in strategy.model.state_dict().items()}
    export = replace(zlab_domino().with_config(dflash_config__shift_label=shift_label), tensors=tensors)
    check(strategy, "zlab_domino", export, count=strategy.options.labels)


def bare_names(strategy: DraftStrategy) -> dict[str, Tensor]:
    return {name.removeprefix("backbone."): tensor for name, tensor in strategy.model.state_dict().items()}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("export_format", ["zlab_dspark", "speculators_dspark"])
def test_dspark_is_what_sglang_and_speculators_would_compute(export_format, kind, check, parts, tiny_folder):
    strategy = our_dspark(parts, markov_head_type=kind)
    if export_format == "zlab_dspark":
        export = zlab_dspark(markov_head_type=kind)
    else:
        export = speculators_dspark(tiny_folder, markov_head_type=kind)
    check(strategy, export_format, replace(export, tensors=bare_names(strategy)), count=BLOCK_SIZE)


@pytest.mark.parametrize("with_markov", [True, False])
def test_the_confidence_that_dspark_learns_is_the_one_that_a_server_reads(
    with_markov, parts, tiny_tensors, question, tmp_path
):
    strategy = our_dspark(parts, confidence_with_markov=with_markov)
    export = replace(zlab_dspark(confidence_head_with_markov=with_markov), tensors=bare_names(strategy))
    reader = open_export("zlab_dspark", export.write(tmp_path / "export"), tiny_tensors)
    theirs = reader.confidence(**vars(question))
    model, streams = strategy.model, question.features.chunk(3, dim=-1)
    block = DFlashDrafter(model.backbone, ("hf2", "hf4", "hf5"))
    block.extend(dict(zip(("hf2", "hf4", "hf5"), streams, strict=True)), question.next_tokens)
    with torch.no_grad():
        read = [model.backbone.norm(block.states()[: len(question.drawn)])]
        before = torch.cat([question.next_tokens[-1:], question.drawn[:-1]])
        ours = model.confidence_head(torch.cat(read + [model.markov_head.embed(before)] * with_markov, dim=-1))
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4)
