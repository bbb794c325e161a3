"""DFlash written down once more, plainly: one sample, one block at a time, explicit masks, logits kept, autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftworks.strategies.dflash.strategy import DFlashStrategy


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """(heads, n, D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def block_logits(strategy: DFlashStrategy, ids: Tensor, features: Tensor, anchor: int) -> Tensor:
    """(size - 1, V): what the draft thinks comes after the anchor. `features` (S, taps · H)."""
    return block_rows(strategy, ids, features, anchor)[1:] @ strategy._target.head.T


def block_rows(strategy: DFlashStrategy, ids: Tensor, features: Tensor, anchor: int) -> Tensor:
    """(size, H): all rows of the block as the head reads them."""
    model, target, options = strategy.model, strategy._target, strategy.options
    weights = dict(model.named_parameters())
    eps, size, dim = target.rms_norm_eps, options.block_size, target.head_dim
    theta = target.rope["rope_theta"]
    context = norm(features[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    tokens = torch.tensor([int(ids[anchor])] + [model.mask_token_id] * (size - 1))
    x = target.embedding[tokens]
    at_context, at_block = torch.arange(anchor), anchor + torch.arange(size)
    for layer, window in enumerate(options.windows()):

        def w(name: str, layer: int = layer) -> Tensor:
            return weights[f"layers.{layer}.{name}.weight"]

        def heads(x: Tensor, name: str) -> Tensor:
            return (x @ w(f"self_attn.{name}_proj").T).unflatten(-1, (-1, dim)).transpose(0, 1)

        normed = norm(x, w("input_layernorm"), eps)
        q = rotate(norm(heads(normed, "q"), w("self_attn.q_norm"), eps), at_block, theta)
        both, where = torch.cat([context, normed]), torch.cat([at_context, at_block])
        k = rotate(norm(heads(both, "k"), w("self_attn.k_norm"), eps), where, theta)
        v = heads(both, "v")
        k, v = (y.repeat_interleave(q.shape[0] // y.shape[0], dim=0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(dim)
        if window is not None:
            behind = at_block[:, None] - where
            scores = scores.masked_fill((behind < 0) | (behind >= window), -math.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + attended @ w("self_attn.o_proj").T
        normed = norm(x, w("post_attention_layernorm"), eps)
        gate, up = normed @ w("mlp.gate_proj").T, normed @ w("mlp.up_proj").T
        x = x + (gate * torch.sigmoid(gate) * up) @ w("mlp.down_proj").T
    return norm(x, weights["norm.weight"], eps)


def label_counts(mask: Tensor, anchor: int, size: int, contiguous: bool) -> Tensor:
    """(size - 1,) bool."""
    counted, so_far = [], True
    for k in range(1, size):
        inside = anchor + k < len(mask) and bool(mask[anchor + k])
        so_far = so_far and inside
        counted.append(so_far if contiguous else inside)
    return torch.tensor(counted)


def weights_of(strategy: DFlashStrategy, ce: Tensor, counted: Tensor) -> Tensor:
    options = strategy.options
    if options.weighting == "uniform":
        decay = [1.0 if options.gamma is None else math.exp(-k / options.gamma) for k in range(len(ce))]
        return torch.tensor(decay, dtype=ce.dtype) * counted
    smooth = [(1 - options.dpace_alpha) * math.exp(-float(c)) + options.dpace_alpha if on else 1.0
              for c, on in zip(ce, counted)]  # fmt: skip
    prefix = [math.prod(smooth[: k + 1]) for k in range(len(ce))]
    value = [sum(p for p, on in zip(prefix[k:], counted[k:]) if on) for k in range(len(ce))]
    chosen = {
        "dpace": value,
        "dpace_cumulative_confidence": prefix,
        "dpace_continuation_value": [v / p for v, p in zip(value, prefix)],
    }[options.weighting]
    return torch.tensor(chosen, dtype=ce.dtype) * counted


def loss_sum(strategy: DFlashStrategy, ids: Tensor, mask: Tensor, features: Tensor, anchors: list[int]) -> Tensor:
    """Of one sample, over blocks at given anchors."""
    total = torch.zeros((), dtype=features.dtype)
    size = strategy.options.block_size
    for anchor in anchors:
        counted = label_counts(mask, anchor, size, contiguous=strategy.options.loss == "token_mean")
        logits = block_logits(strategy, ids, features, anchor)
        labels = torch.cat([ids, ids.new_zeros(size)])[anchor + 1 : anchor + size]
        ce = -logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        total = total + (ce * weights_of(strategy, ce.detach(), counted)).sum()
    return total
