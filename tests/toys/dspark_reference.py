"""DSpark written down once more, plainly: one block at a time, one token at a time, distributions kept, autograd."""

from __future__ import annotations

from dataclasses import dataclass, field

import dflash_reference as dflash
import torch
from torch import Tensor

from draftworks.strategies.dspark.strategy import DSparkStrategy


@dataclass(frozen=True)
class Block:
    """What comes after the anchor, every token fed the given one before it: logits (k, V), confidences (k,) as logits."""

    logits: Tensor
    confidences: Tensor | None


def block(strategy: DSparkStrategy, ids: Tensor, features: Tensor, anchor: int, fed: list[int]) -> Block:
    """`fed`: the k tokens that the k proposals know last, the anchor's first."""
    weights, options = dict(strategy.model.named_parameters()), strategy.options
    rows = dflash.block_rows(strategy._dflash, ids, features, anchor)
    logits, confidences = [], []
    memory = rows.new_zeros(options.markov_rank)
    for row, token in zip(rows, fed):
        own = strategy._dflash._target.head @ row
        embedded = row.new_zeros(0)
        if options.markov_rank:
            embedded = weights["markov_head.markov_w1.weight"][token]
            narrow = embedded
            if options.markov_head_type == "gated":
                gate = weights["markov_head.gate_proj.weight"] @ torch.cat([row, embedded])
                narrow = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * embedded
            if options.markov_head_type == "rnn":
                joint = weights["markov_head.joint_proj.weight"] @ torch.cat([memory, embedded, row])
                keep, new, out = (joint + weights["markov_head.joint_proj.bias"]).view(3, -1)
                memory = torch.sigmoid(keep) * memory + (1 - torch.sigmoid(keep)) * torch.tanh(new)
                narrow = torch.tanh(out)
            own = own + weights["markov_head.markov_w2.weight"] @ narrow
        logits.append(own)
        if options.confidence_head:
            read = torch.cat([row, embedded]) if options.confidence_with_markov else row
            confidences.append(
                weights["confidence_head.proj.weight"][0] @ read + weights["confidence_head.proj.bias"][0]
            )
    return Block(torch.stack(logits), torch.stack(confidences) if confidences else None)


def greedy(strategy: DSparkStrategy, ids: Tensor, features: Tensor, anchor: int, count: int) -> list[int]:
    """Each token the first choice after the one before it, all logits computed again for every token."""
    fed = [int(ids[anchor])]
    for _ in range(count):
        fed.append(int(block(strategy, ids, features, anchor, fed).logits[-1].argmax()))
    return fed[1:]


@dataclass
class Sums:
    """Over all blocks of a sample; those by place of k values."""

    loss: Tensor | float = 0.0
    blocks: int = 0
    accept_len: float = 0.0
    tau: float = 0.0
    by_place: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, place: int, value: Tensor | float, places: int) -> None:
        sums = self.by_place.setdefault(name, torch.zeros(places, dtype=torch.float64))
        sums[place] += float(value)


def sums(strategy: DSparkStrategy, sample: dict[str, Tensor], features: Tensor, anchors: list[int]) -> Sums:
    """Of one sample, over blocks at given anchors."""
    total, options = Sums(loss=torch.zeros((), dtype=features.dtype)), strategy.options
    ids, size = sample["input_ids"], options.block_size
    for anchor in anchors:
        counted = dflash.label_counts(sample["loss_mask"], anchor, size + 1, contiguous=True)
        labels = torch.cat([ids, ids.new_zeros(size)])[anchor + 1 : anchor + 1 + size]
        drafted = block(strategy, ids, features, anchor, [int(ids[anchor]), *labels[:-1].tolist()])
        ce = -drafted.logits.log_softmax(-1)[range(size), labels]
        weights = dflash.weights_of(strategy._dflash, ce.detach(), counted)
        right, expected = True, 1.0
        total.blocks += int(counted.any())
        for place in counted.nonzero().flatten().tolist():
            q = torch.softmax(strategy._dflash._target.head @ sample["last"][anchor + place], -1)
            p = torch.softmax(drafted.logits[place], -1)
            distance = (q - p).abs().sum()
            accepted = float((1 - distance.detach() / 2).clamp(0, 1))
            cost = options.ce_weight * ce[place] + options.tv_weight * distance
            if drafted.confidences is not None:
                likely = torch.sigmoid(drafted.confidences[place])
                cost = cost - options.confidence_weight * (
                    accepted * likely.log() + (1 - accepted) * (1 - likely).log()
                )
                total.add("confidence_error_sums", place, abs(float(likely.detach()) - accepted), size)
            total.loss = total.loss + weights[place] * cost
            right = right and int(drafted.logits[place].argmax()) == int(labels[place])
            expected *= accepted
            total.accept_len += right
            total.tau += expected
            total.add("loss_sums", place, cost.detach(), size)
            total.add("acceptance_sums", place, accepted, size)
            total.add("acc_corrects", place, int(drafted.logits[place].argmax()) == int(labels[place]), size)
            total.add("acc_denoms", place, 1, size)
    return total
