"""Floating-point operations of a training step: its matrix products, written down strategy by strategy.

A product of (n, a) and (a, b) is 2·n·a·b, and so is each of its gradients: by the input if anything before it is
trained, by the weight if that is trained. A frozen head has one gradient, a layer that reads features one, a teacher
none. Counted is what must be computed, once: no padding, no tile that a mask leaves out, nothing recomputed in a
backward pass. Norms, activations, softmaxes and the optimizer are left out, as usual for MFU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_cases import Shape
from torch import Tensor

from draftworks.strategies.dflash2.model import SIDES
from draftworks.strategies.lilicorr.model import CANDIDATE_FEATURES

BOTH, ONE, NONE = 2, 1, 0
"""Gradients of a product."""

PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "GH200": 989,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
}
"""Dense bf16 peaks of NVIDIA's data sheets by part of the device name; the first match is taken."""


@dataclass(frozen=True)
class Flops:
    """Operations of a step: linear layers and heads; attention scores and weighted sums.

    What else is a product of activations is left out: scores of candidates, a refiner's mix of places.
    """

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


@dataclass(frozen=True)
class Work:
    """The amount of work in a batch.

    Attributes:
        lengths: of the samples.
        anchors: positions of each sample at which a block or a chain can begin: it and the next token are supervised.
        rows: positions with logits, by step of an unroll, place in a block or depth.
    """

    lengths: tuple[int, ...]
    anchors: tuple[Tensor, ...]
    rows: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, Tensor]], rows: Sequence[float]) -> Work:
        masks = [sample["loss_mask"] for sample in samples]
        anchors = tuple((mask[:-1] & mask[1:]).nonzero().squeeze(1) for mask in masks)
        return cls(tuple(map(len, masks)), anchors, tuple(rows))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def causal_pairs(self) -> float:
        """Number of query-key pairs of causal attention."""
        return sum(length * (length + 1) / 2 for length in self.lengths)

    @property
    def mean_anchor(self) -> float:
        return float(torch.cat(self.anchors).double().mean())

    def blocks(self, most: int) -> Blocks:
        """Return the blocks at up to `most` anchors of each sample, drawn evenly."""
        counts = [min(most, len(places)) for places in self.anchors]
        seen = sum(n * float(places.double().mean()) for n, places in zip(counts, self.anchors) if n)
        return Blocks(sum(counts), seen)


@dataclass(frozen=True)
class Blocks:
    """Number of blocks, and context tokens that they see on average."""

    count: int
    context: float


def product(rows: float, inputs: int, outputs: int, gradients: int = BOTH) -> float:
    return 2.0 * rows * inputs * outputs * (1 + gradients)


class Layer:
    """Products of a decoder layer, per position."""

    def __init__(self, shape: Shape) -> None:
        self.width, self.intermediate = shape.hidden, shape.intermediate
        self.queries, self.keys_values = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim

    def qkv(self, rows: float, inputs: int | None = None) -> float:
        return product(rows, inputs or self.width, self.queries + self.keys_values)

    def out_and_mlp(self, rows: float) -> float:
        return product(rows, self.queries, self.width) + 3 * product(rows, self.width, self.intermediate)

    def attention(self, pairs: float) -> float:
        return (1 + BOTH) * 4.0 * pairs * self.queries


def eagle3(shape: Shape, options: Any, work: Work) -> Flops:
    """EAGLE-3: tokens are projected once, states at every step; after the first step, supervised positions only."""
    layer, steps, active = Layer(shape), options.ttt_length, work.rows[0]
    products = product(work.tokens, 3 * shape.hidden, shape.hidden, ONE)
    products += layer.qkv(work.tokens) + layer.qkv(work.tokens + (steps - 1) * active)
    products += steps * layer.out_and_mlp(active) + _distilled(shape, options, work)
    return Flops(products, steps * layer.attention(work.causal_pairs))


def dflash(shape: Shape, options: Any, work: Work) -> Flops:
    return _block_backbone(shape, options, work, taps=options.num_taps)


def domino(shape: Shape, options: Any, work: Work) -> Flops:
    """Domino: DFlash with the GRU over every block, and what its states add to the logits."""
    backbone, labels = _block_backbone(shape, options, work, taps=options.num_taps), sum(work.rows)
    read, state = work.blocks(options.num_anchors).count * options.labels, options.gru_hidden_dim
    correction = product(read, shape.hidden, 3 * state, ONE) + product(read, state, 3 * state)
    correction += product(labels, shape.hidden + state, options.emb_dim)
    correction += product(labels, options.emb_dim, shape.vocab)
    return Flops(backbone.products + correction, backbone.attention)


def dspark(shape: Shape, options: Any, work: Work) -> Flops:
    """DSpark: DFlash with the vanilla Markov head, the confidences, and the teacher at every labelled token."""
    backbone, labels = _block_backbone(shape, options, work, taps=options.num_taps), sum(work.rows)
    taught = sum(map(len, work.anchors))
    heads = product(labels, options.markov_rank, shape.vocab) + product(taught, shape.hidden, shape.vocab, NONE)
    heads += product(labels, shape.hidden + options.markov_rank, 1)
    return Flops(backbone.products + heads, backbone.attention)


def dflash2(shape: Shape, options: Any, work: Work) -> Flops:
    """DFlash 2: DFlash with the kernels of two convolutions a layer, and the selector's factor of every state."""
    backbone, labels = _block_backbone(shape, options, work, taps=options.num_taps), sum(work.rows)
    placed = work.blocks(options.num_anchors).count * options.block_size
    kernels = SIDES * options.conv_kernel_size * (shape.hidden // options.conv_group_size)
    added = options.num_layers * 2 * product(placed, shape.hidden, kernels)
    added += product(labels, shape.hidden, options.selector_rank)
    return Flops(backbone.products + added, backbone.attention)


def xpress(shape: Shape, options: Any, work: Work) -> Flops:
    """XPress: DFlash with a pass of the refiner on the true tokens and on those of each round, and the teacher.

    Rounds are played beforehand, at every place and without gradients; that takes the backbone's logits once more.
    """
    backbone, labels = _block_backbone(shape, options, work, taps=options.num_taps), sum(work.rows)
    blocks, places, rank = work.blocks(options.num_anchors).count, options.block_size - 1, options.refiner_rank

    def refine(gradients: int) -> float:
        mlp = 3 * product(blocks * places, rank, rank * options.mlp_ratio, gradients)
        return product(blocks * options.block_size, 3 * rank, rank, gradients) + mlp

    rounds = options.consistency_passes
    added = product(blocks, shape.hidden, rank) + product(blocks * options.block_size, shape.hidden, rank)
    added += (1 + rounds) * (refine(BOTH) + product(labels, rank, shape.vocab))
    if rounds:
        added += product(blocks * places, shape.hidden, shape.vocab, NONE)
        added += (rounds - 1) * (refine(NONE) + product(blocks * places, rank, shape.vocab, NONE))
    added += product(sum(map(len, work.anchors)), shape.hidden, shape.vocab, NONE)
    return Flops(backbone.products + added, backbone.attention)


def lilicorr(shape: Shape, options: Any, work: Work) -> Flops:
    """LiLiCorr: DFlash with logits at every place of a block, and a transformer over the candidates of each."""
    backbone, labels = _block_backbone(shape, options, work, taps=options.num_taps), sum(work.rows)
    blocks, size = work.blocks(options.num_anchors).count, options.resolve_lattice_size(shape.hidden)
    placed, factor = blocks * (options.block_size - 1), options.factor_dim or size
    nodes = placed * options.candidate_topk
    added = product(placed - labels, shape.hidden, shape.vocab, ONE)
    if size != shape.hidden:
        added += product(nodes, shape.hidden, size, ONE)
    added += product(nodes, CANDIDATE_FEATURES, size) + product(nodes, size, size)
    added += product(placed, shape.hidden, size) + product(blocks, shape.hidden, size)
    mlp = 2 * product(nodes, size, int(size * options.lattice_mlp_ratio))
    added += options.lattice_layers * (product(nodes, size, 4 * size) + mlp)
    added += product(nodes, 3 * size, size) + 2 * product(nodes, size, factor) + product(blocks, size, factor)
    pairs = blocks * ((options.block_size - 1) * options.candidate_topk) ** 2
    among_candidates = options.lattice_layers * (1 + BOTH) * 4.0 * pairs * size
    return Flops(backbone.products + added, backbone.attention + among_candidates)


def peagle(shape: Shape, options: Any, work: Work) -> Flops:
    """P-EAGLE: positions of depth 0 and of all chains through every layer.

    After the last attention only supervised positions are computed. All chains begin with the same mask states, so the
    first layer projects one of them.
    """
    layer, layers = Layer(shape), options.num_layers
    masked = sum(work.rows[1:])
    products = product(work.tokens, 3 * shape.hidden, shape.hidden, ONE)
    products += layer.qkv(work.tokens, 2 * shape.hidden) + (layers - 1) * layer.qkv(work.tokens + masked)
    products += (layers - 1) * layer.out_and_mlp(work.tokens + masked) + layer.out_and_mlp(sum(work.rows))
    products += _distilled(shape, options, work)
    chains = sum(rows * (work.mean_anchor + depth) for depth, rows in enumerate(work.rows[1:], start=1))
    return Flops(products, layers * layer.attention(work.causal_pairs + chains))


def _block_backbone(shape: Shape, options: Any, work: Work, taps: int) -> Flops:
    layer, size, blocks = Layer(shape), options.block_size, work.blocks(options.num_anchors)
    placed = blocks.count * size
    products = product(work.tokens, taps * shape.hidden, shape.hidden, ONE)
    each = product(work.tokens, shape.hidden, layer.keys_values) + layer.qkv(placed) + layer.out_and_mlp(placed)
    products += options.num_layers * each + product(sum(work.rows), shape.hidden, shape.vocab, ONE)
    pairs = size * (blocks.context + blocks.count * size)
    return Flops(products, options.num_layers * layer.attention(pairs))


def _distilled(shape: Shape, options: Any, work: Work) -> float:
    """A trained head over the draft's vocabulary, and the teacher at every teacher position."""
    trained = product(sum(work.rows), shape.hidden, options.draft_vocab_size)
    return trained + product(work.rows[0], shape.hidden, shape.vocab, NONE)


Formula = Callable[[Shape, Any, Work], Flops]
FORMULAS: dict[str, Formula] = {
    "dflash": dflash,
    "dflash2": dflash2,
    "domino": domino,
    "dspark": dspark,
    "eagle3": eagle3,
    "lilicorr": lilicorr,
    "peagle": peagle,
    "xpress": xpress,
}
"""By strategy; a strategy that is missing here has no MFU."""


def peak_flops(device_name: str) -> float | None:
    """Return the peak operations per second of the device's data sheet; None for an unknown device."""
    found = (peak for part, peak in PEAK_TFLOPS.items() if part in device_name)
    peak = next(found, None)
    return None if peak is None else peak * 1e12
