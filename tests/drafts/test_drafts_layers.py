"""Anchors: drawn by content, evenly, whatever surrounds a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from draft_toys import small_target
from gloo_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftworks.data.vocab import VocabMapping
from draftworks.drafts.anchors import derive_sample_seed, draw_blocks, gather_labels, make_label_mask, place_blocks
from draftworks.drafts.layers import GatedMlp, RmsNorm, Rotary, rope_frequencies
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
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
from draftworks.training.backend import ensure_process_group
from draftworks.training.fsdp_backend import FSDPTrainingBackend

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


ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotation_equals_that_of_the_target(parts, rope):
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=4, head_dim=6, max_position_embeddings=64, rope_parameters=dict(rope)
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(5, 15)[None])
    query, key = torch.randn(2, 1, 4, 10, 6)
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    rotation = Rotary(replace(parts, rope=rope))(20, torch.float32).window(5, 10)
    torch.testing.assert_close(rotation.apply(query), expected[0])
    torch.testing.assert_close(rotation.apply(key), expected[1])


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_a_rope_is_made_on_the_device_that_drafts_are_made_on(parts, rope):
    """On `meta`, where check makes drafts without memory, too."""
    with torch.device("meta"):
        found = rope_frequencies(replace(parts, rope=rope))
    assert (found.inverse.device.type, found.inverse.dtype) == ("meta", torch.float32)
    assert found.inverse.shape == rope_frequencies(replace(parts, rope=rope)).inverse.shape


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "rope_theta": 1e4}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}]
)
def test_rope_that_cannot_be_reproduced_is_refused(parts, rope):
    with pytest.raises(ConfigError, match="not supported: expected rope_type default, linear, llama3, yarn"):
        Rotary(replace(parts, rope=rope))


def test_gradients_are_those_of_finite_differences(parts):
    norm = RmsNorm(6, 1e-3).double()
    rotation = Rotary(parts).double()(4, torch.float64)
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, weight))
    torch.autograd.gradcheck(rotation.apply, x)
    mlp = GatedMlp(6, 8, torch.Generator().manual_seed(0)).double()
    torch.autograd.gradcheck(mlp, x)


SEED = torch.tensor([derive_sample_seed(42, "sample")])


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=40),
    count=st.integers(1, 12),
    step=st.integers(0, 10**6),
    padding=st.integers(0, 9),
)
def test_a_sample_draws_the_same_distinct_candidates_in_order_whatever_is_around_it(mask, count, step, padding):
    alone = torch.tensor([mask])
    neighbours = torch.ones(2, len(mask) + padding, dtype=torch.bool)
    neighbours[1] = F.pad(alone[0], (0, padding))
    one = draw_blocks(alone, SEED, step, count, 4)
    beside = draw_blocks(neighbours, torch.cat([SEED + 1, SEED]), step, count, 4)
    drawn = one.anchors[0][one.live[0]].tolist()
    assert drawn == beside.anchors[1][beside.live[1]].tolist()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == min(count, sum(mask))
    assert all(mask[position] for position in drawn)


def test_every_candidate_is_drawn_equally_often():
    candidates = torch.ones(1, 20, dtype=torch.bool)
    seen = torch.zeros(20)
    for step in range(2000):
        seen[draw_blocks(candidates, SEED, step, 5, 4).anchors[0]] += 1
    expected = 2000 * 5 / 20
    assert ((seen - expected).abs() < 5 * expected**0.5).all()


def test_samples_of_one_batch_draw_differently():
    seeds = torch.tensor([derive_sample_seed(42, f"sample {i}") for i in range(50)])
    drawn = draw_blocks(torch.ones(50, 64, dtype=torch.bool), seeds, 0, 8, 4).anchors
    assert len({tuple(row) for row in drawn.tolist()}) == 50


def test_a_batch_without_candidates_has_one_dead_block_each():
    blocks = draw_blocks(torch.zeros(3, 7, dtype=torch.bool), SEED.repeat(3), 0, 5, 4)
    assert blocks.anchors.tolist() == [[0], [0], [0]]
    assert not blocks.live.any()


def test_all_blocks_are_at_all_candidates():
    candidates = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 1, 0]], dtype=torch.bool)
    blocks = place_blocks(candidates, 3)
    assert [row[on].tolist() for row, on in zip(blocks.anchors, blocks.live)] == [[1, 2, 4], [3]]
    assert blocks.positions[0].tolist() == [1, 2, 3, 2, 3, 4, 4, 5, 6]


def test_labels_end_with_the_sample_and_where_asked_with_the_answer():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    blocks = place_blocks(torch.tensor([[0, 1, 0, 0, 1, 0]], dtype=torch.bool), 5)
    assert gather_labels(blocks, ids).tolist() == [[[12, 13, 14, 15], [15, 0, 0, 0]]]
    assert make_label_mask(blocks, mask, contiguous=False).tolist() == [
        [[True, False, True, True], [True, False, False, False]]
    ]
    assert make_label_mask(blocks, mask, contiguous=True).tolist() == [
        [[True, False, False, False], [True, False, False, False]]
    ]


def test_another_seed_and_another_sample_draw_other_anchors():
    """Else trainings with two seeds would say less of chance than they seem to."""
    seeds = {derive_sample_seed(seed, sample) for seed in range(20) for sample in ("a", "b", "ab")}
    assert len(seeds) == 60
    assert derive_sample_seed(42, "a") == derive_sample_seed(42, "a")
    assert all(0 <= seed < 2**63 for seed in seeds)
    candidates = torch.ones(1, 400, dtype=torch.bool)
    drawn = [
        draw_blocks(candidates, torch.tensor([derive_sample_seed(seed, "a")]), step=0, count=20, size=4).anchors
        for seed in (1, 2)
    ]
    assert not torch.equal(*drawn)


class Sharded(NamedTuple):
    """Samples, one a rank, and the folder with the gradients of all strategies."""

    samples: list[dict[str, torch.Tensor]]
    folder: Path


NAMES = ["eagle3", "dflash", "dflash2", "domino", "dspark", "lilicorr", "peagle", "xpress"]


@pytest.fixture(scope="module")
def on_two_ranks(make_sample, vocab, tmp_path_factory) -> Sharded:
    """What two processes make of all strategies, one after the other."""
    folder = tmp_path_factory.mktemp("ranks")
    samples = [make_sample([0, 0] + [1] * 10, 0), make_sample([0, 1, 1, 1, 1, 1], 1)]
    for rank, sample in enumerate(samples):
        save_file(sample, folder / f"sample{rank}.safetensors")
    vocab.save(folder / "vocab.safetensors")
    on_ranks(2, folder, sharded_steps, folder, NAMES)
    return Sharded(samples, folder)


@pytest.mark.parametrize("name", NAMES)
def test_two_sharded_ranks_sum_to_the_gradients_of_one_process(name, on_two_ranks, vocab):
    strategy = make(name, vocab)
    strategy.forward_loss(
        strategy.collate(on_two_ranks.samples, ["0", "1"]), StepContext(training=True)
    ).loss_sum.backward()
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        found = load_file(on_two_ranks.folder / f"{name}-{dtype}.safetensors")
        for parameter_name, parameter in strategy.model.named_parameters():
            error = torch.linalg.vector_norm(found[parameter_name] - parameter.grad)
            assert error <= tolerance * torch.linalg.vector_norm(parameter.grad), (dtype, parameter_name)


def flattened_as_on_cuda(rnn: nn.RNNBase) -> None:
    """What torch's `flatten_parameters` does there, and there alone: weights that are whole move into one buffer."""
    weights = rnn._flat_weights
    if any(isinstance(weight, DTensor) for weight in weights):
        return
    with torch.no_grad():
        flat = torch.cat([weight.flatten() for weight in weights])
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.set_(part.view_as(weight))


def test_dominos_gru_computes_with_its_masters_at_every_step(make_sample, vocab, monkeypatch):
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flattened_as_on_cuda)
    used = []
    with ensure_process_group(torch.device("cpu")):
        strategy, backend = make("domino", vocab), FSDPTrainingBackend(torch.device("cpu"))
        backend.prepare_model(strategy)
        gru = strategy.model.correction.prefix_gru
        gru.register_forward_hook(lambda module, *_: used.append(module.weight_hh_l0.detach().clone()))
        masters = backend.parameters()
        optimizer = torch.optim.SGD(masters.values(), lr=1.0)
        expected = []
        for step in range(3):
            expected.append(masters["correction.prefix_gru.weight_hh_l0"].full_tensor().detach().clone())
            output = strategy.forward_loss(
                strategy.collate([make_sample([1] * 12)], ["a"]), StepContext(step + 9, 9, training=True)
            )
            backend.backward(output.loss_sum)
            optimizer.step()
            optimizer.zero_grad()
    for now, master in zip(used, expected, strict=True):
        assert torch.equal(now, master)
    assert not torch.equal(expected[0], expected[1])
