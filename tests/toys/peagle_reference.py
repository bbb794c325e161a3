"""P-EAGLE written down once more, plainly: one flat list of (anchor, depth), one dense mask, logits kept, autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftworks.strategies.peagle.strategy import PEagleStrategy


class Place(NamedTuple):
    anchor: int
    depth: int


@dataclass
class Sums:
    """Of one sample: Σ CE, differentiable, rows with a label in the draft vocabulary, and first choices that are right, by depth."""

    loss: Tensor
    labelled: int
    corrects: list[int]


def sees(query: Place, key: Place) -> bool:
    if key.depth == 0:
        return key.anchor <= query.anchor
    return key.anchor == query.anchor and key.depth <= query.depth


def log_probabilities(
    strategy: PEagleStrategy, ids: Tensor, features: Tensor, places: list[Place]
) -> dict[Place, Tensor]:
    """(V_d,) of every place, on a sample with tokens (S,) and features (S, taps · H)."""
    weights, options, target = _weights(strategy), strategy.options, strategy._target
    everything = [Place(row, 0) for row in range(len(ids))] + [place for place in places if place.depth > 0]
    following = [*ids[1:].tolist(), 0]
    mask_token = target.vocab_size - 1 if options.mask_token_id is None else options.mask_token_id
    tokens = [following[place.anchor] if place.depth == 0 else mask_token for place in everything]
    taps = torch.stack([features[p.anchor] if p.depth == 0 else weights["mask_hidden"][0, 0] for p in everything])
    if options.fc_norm:
        parts = taps.chunk(taps.shape[-1] // target.hidden_size, dim=-1)
        taps = torch.cat(
            [_norm(part, weights[f"fc_norm.{i}.weight"], target.rms_norm_eps) for i, part in enumerate(parts)], -1
        )
    hidden = taps @ weights["fc.weight"].T
    embedding = weights.get("embed_tokens.weight", target.embedding)[tokens]
    seen = torch.tensor([[sees(query, key) for key in everything] for query in everything])
    positions = torch.tensor([place.anchor + place.depth for place in everything])
    for layer in range(options.num_layers):
        hidden = _layer(weights, layer, hidden, embedding, seen, positions, target, options.norm_before_residual)
    logits = _norm(hidden, weights["norm.weight"], target.rms_norm_eps) @ weights["lm_head.weight"].T
    return dict(zip(everything, logits.log_softmax(-1)))


def sums(strategy: PEagleStrategy, ids: Tensor, features: Tensor, last: Tensor, kept: list[list[int]]) -> Sums:
    """Over the rows that `kept` names for every depth."""
    places = [Place(anchor, depth) for depth, anchors in enumerate(kept) for anchor in anchors]
    found = log_probabilities(strategy, ids, features, places)
    in_draft = strategy.model.t2d
    total = Sums(loss=found[Place(0, 0)].sum() * 0, labelled=0, corrects=[0] * len(kept))
    for place in places:
        z = strategy._target.head @ last[place.anchor + place.depth + 1]
        if not in_draft[z.argmax()]:
            continue
        q = z[in_draft].softmax(-1)
        total.loss = total.loss - (q * found[place]).sum()
        total.labelled += 1
        total.corrects[place.depth] += int(found[place].argmax() == q.argmax())
    return total


def greedy(strategy: PEagleStrategy, ids: Tensor, features: Tensor, row: int, count: int) -> list[int]:
    """What is proposed after the tokens up to row + 1."""
    places = [Place(row, depth) for depth in range(count)]
    found = log_probabilities(strategy, ids, features, places)
    draft_ids = strategy.model.t2d.nonzero().squeeze(1)
    return [int(draft_ids[found[place].argmax()]) for place in places]


def _weights(strategy: PEagleStrategy) -> dict[str, Tensor]:
    return dict(strategy.model.named_parameters())


def _layer(weights, layer, hidden, embedding, seen, positions, target, norm_before_residual) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return _norm(x, weights[f"layers.{layer}.{name}.weight"], target.rms_norm_eps)

    def project(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"layers.{layer}.{name}_proj.weight"].T

    if layer == 0:
        normed = norm(hidden, "hidden_norm")
        read = torch.cat([norm(embedding, "input_layernorm"), normed], dim=-1)
        residual = normed if norm_before_residual else hidden
    else:
        read, residual = norm(hidden, "input_layernorm"), hidden
    q, k, v = (project(read, f"self_attn.{name}").unflatten(-1, (-1, target.head_dim)) for name in "qkv")
    q, k = _rope(q, positions, target), _rope(k, positions, target)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / target.head_dim**0.5
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
    hidden = residual + project(attended, "self_attn.o")
    x = norm(hidden, "post_attention_layernorm")
    return hidden + project(torch.nn.functional.silu(project(x, "mlp.gate")) * project(x, "mlp.up"), "mlp.down")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rope(x: Tensor, positions: Tensor, target) -> Tensor:
    """(n, heads, D) at positions (n,)."""
    d = target.head_dim
    inverse = (1.0 / float(target.rope["rope_theta"]) ** (torch.arange(0, d, 2, dtype=torch.float32) / d)).to(x.dtype)
    angle = torch.outer(positions.to(x.dtype), inverse)[:, None]
    left, right = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)
