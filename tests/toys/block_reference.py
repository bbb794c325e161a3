"""Losses and metric sums of DFlash, DFlash 2, Domino, DSpark and XPress, one block and one label at a time, from the logits of their readers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from reference_readers import (
    dflash2_reader,
    dflash_reader,
    domino_reader,
    dspark_reader,
    lilicorr_reader,
    xpress_reader,
)
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy


@dataclass
class Sums:
    """Over all blocks of a sample: the loss, differentiable, other sums by name, and sums of k values by place in the block."""

    loss: Tensor
    sums: Counter[str] = field(default_factory=Counter)
    by_place: dict[str, Tensor] = field(default_factory=dict)

    def add_at(self, name: str, place: int, value: Tensor | float, places: int) -> None:
        self.by_place.setdefault(name, torch.zeros(places, dtype=torch.float64))[place] += float(value)


@dataclass(frozen=True)
class LabelledBlock:
    """One block of a sample: what a reader is asked, and the k labels with their mask."""

    features: Tensor
    next_tokens: Tensor
    labels: Tensor
    label_mask: Tensor

    @classmethod
    def at(
        cls, anchor: int, ids: Tensor, mask: Tensor, features: Tensor, places: int, contiguous: bool
    ) -> LabelledBlock:
        """The block at an anchor of a sample with (S,) ids and label mask and (S, taps · H) features.

        Args:
            contiguous: whether labels count up to the first position that is not supervised, or wherever they are.
        """
        padded = torch.cat([mask, mask.new_zeros(places)])[anchor + 1 : anchor + 1 + places]
        labels = torch.cat([ids, ids.new_zeros(places)])[anchor + 1 : anchor + 1 + places]
        label_mask = padded.long().cumprod(0).bool() if contiguous else padded
        return cls(features[:anchor], ids[1 : anchor + 1], labels, label_mask)

    def cross_entropies(self, logits: Tensor) -> Tensor:
        return -logits.log_softmax(-1).gather(1, self.labels[:, None]).squeeze(1)


def weigh(strategy: DraftStrategy, ce: Tensor, counted: Tensor) -> Tensor:
    """Return the weight of every label, (k,), by the options `weighting`, `gamma` and `dpace_alpha`."""
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


def dflash_sums(strategy: DraftStrategy, sample: dict[str, Tensor], features: Tensor, anchors: list[int]) -> Sums:
    total, reader, places = _no_sums(features), dflash_reader(strategy), strategy.options.block_size - 1
    for block in _blocks(strategy, sample, features, anchors, places):
        ce = block.cross_entropies(reader.logits(block.features, block.next_tokens, block.labels))
        total.loss = total.loss + (ce * weigh(strategy, ce.detach(), block.label_mask)).sum()
    return total


def dflash2_sums(strategy: DraftStrategy, sample: dict[str, Tensor], features: Tensor, anchors: list[int]) -> Sums:
    total, reader, options = _no_sums(features), dflash2_reader(strategy), strategy.options
    places = options.block_size - 1
    for block in _blocks(strategy, sample, features, anchors, places):
        asked = (block.features, block.next_tokens, block.labels)
        unary, scores, served = reader.backbone.logits(*asked), reader.scores(*asked), reader.logits(*asked)
        ce = block.cross_entropies(unary)
        chosen, path_right, base_right = [], True, True
        for place, label in enumerate(block.labels.tolist()):
            likeliest = unary[place].argsort(descending=True)[: options.selector_top_k].tolist()
            taught = likeliest if label in likeliest else [*likeliest[:-1], label]
            chosen.append(scores[place, taught].logsumexp(-1) - scores[place, label])
            if block.label_mask[place]:
                right = int(served[place].argmax()) == label
                path_right, base_right = path_right and right, base_right and likeliest[0] == label
                total.sums["accept_len_sums"] += path_right
                total.sums["base_accept_len_sums"] += base_right
                found = {"acc_corrects": right, "acc_denoms": 1, "recall_sums": label in likeliest}
                cost = {
                    "selector_loss_sums": chosen[-1].detach(),
                    "loss_sums": (ce[place] + options.selector_loss_alpha * chosen[-1]).detach(),
                }
                for name, value in (found | cost).items():
                    total.add_at(name, place, value, places)
        selector_ce = torch.stack(chosen)
        for share, part in ((1.0, ce), (options.selector_loss_alpha, selector_ce)):
            total.loss = total.loss + share * (part * weigh(strategy, part.detach(), block.label_mask)).sum()
        total.sums["accept_len_denoms"] += int(block.label_mask.any())
    return total


def domino_sums(
    strategy: DraftStrategy, sample: dict[str, Tensor], features: Tensor, anchors: list[int], lambda_base: float
) -> Sums:
    total, reader, places = _no_sums(features), domino_reader(strategy), strategy.options.labels
    for block in _blocks(strategy, sample, features, anchors, places):
        asked = (block.features, block.next_tokens, block.labels)
        corrected, base = reader.logits(*asked), reader.backbone.logits(*asked)
        ce, base_ce = block.cross_entropies(corrected), block.cross_entropies(base)
        weights = weigh(strategy, ce.detach(), block.label_mask)
        total.loss = total.loss + (((1 - lambda_base) * ce + lambda_base * base_ce) * weights).sum()
        total.sums["accept_len_sums"] += _accepted_labels(corrected, block)
        total.sums["base_accept_len_sums"] += _accepted_labels(base, block)
        total.sums["accept_len_denoms"] += int(block.label_mask.any())
    return total


def dspark_sums(strategy: DraftStrategy, sample: dict[str, Tensor], features: Tensor, anchors: list[int]) -> Sums:
    total, reader, options = _no_sums(features), dspark_reader(strategy), strategy.options
    places = options.block_size
    for anchor, block in zip(anchors, _blocks(strategy, sample, features, anchors, places, contiguous=True)):
        asked = (block.features, block.next_tokens, block.labels)
        logits = reader.logits(*asked)
        likely = reader.confidence(*asked).sigmoid() if options.confidence_head else None
        ce, right = block.cross_entropies(logits), logits.argmax(-1) == block.labels
        weights = weigh(strategy, ce.detach(), block.label_mask)
        expected = 1.0
        total.sums["blocks"] += int(block.label_mask.any())
        for place in block.label_mask.nonzero().flatten().tolist():
            teacher = (reader.backbone.head @ sample["last"][anchor + place]).softmax(-1)
            distance = (teacher - logits[place].softmax(-1)).abs().sum()
            accepted = float((1 - distance.detach() / 2).clamp(0, 1))
            cost = options.ce_weight * ce[place] + options.tv_weight * distance
            if likely is not None:
                sure = likely[place]
                entropy = accepted * sure.log() + (1 - accepted) * (1 - sure).log()
                cost = cost - options.confidence_weight * entropy
                total.add_at("confidence_error_sums", place, abs(float(sure.detach()) - accepted), places)
            total.loss = total.loss + weights[place] * cost
            expected *= accepted
            total.sums["accept_len"] += int(right[: place + 1].all())
            total.sums["tau"] += expected
            total.add_at("loss_sums", place, cost.detach(), places)
            total.add_at("acceptance_sums", place, accepted, places)
            total.add_at("acc_corrects", place, right[place], places)
            total.add_at("acc_denoms", place, 1, places)
    return total


def xpress_sums(strategy: DraftStrategy, sample: dict[str, Tensor], features: Tensor, anchors: list[int]) -> Sums:
    total, reader, options = _no_sums(features), xpress_reader(strategy), strategy.options
    places = options.block_size - 1
    for anchor, block in zip(anchors, _blocks(strategy, sample, features, anchors, places, contiguous=True)):
        known, rows = int(block.next_tokens[-1]), reader.backbone.rows(block.features, block.next_tokens)
        base = reader.backbone.logits(block.features, block.next_tokens, block.labels)
        refined, played, tokens = reader.refine(rows, known, block.labels), [], base.argmax(-1)
        for _ in range(options.consistency_passes):
            played.append(reader.refine(rows, known, tokens))
            tokens = played[-1].argmax(-1)
        shares = [1.0, options.base_weight, *[options.consistency_weight / max(1, len(played))] * len(played)]
        expected = 1.0
        counted = block.label_mask.nonzero().flatten().tolist()
        for logits, share in zip((refined, base, *played), shares, strict=True):
            ce = block.cross_entropies(logits)
            weights = weigh(strategy, ce.detach(), block.label_mask)
            for place in counted:
                teacher = (reader.backbone.head @ sample["last"][anchor + place]).softmax(-1)
                accepted = torch.minimum(logits[place].softmax(-1), teacher).sum()
                cost = options.ce_weight * ce[place] + options.tv_weight * (1 - accepted)
                total.loss = total.loss + share * weights[place] * cost
                if logits is refined:
                    total.add_at("loss_sums", place, cost.detach(), places)
                    total.add_at("acceptance_sums", place, accepted.detach(), places)
                    total.add_at("acc_corrects", place, logits[place].argmax() == block.labels[place], places)
                    total.add_at("acc_denoms", place, 1, places)
                    expected *= float(accepted.detach())
                    total.sums["tau"] += expected
        total.sums["accept_len"] += _accepted_labels(refined, block)
        total.sums["base_accept_len"] += _accepted_labels(base, block)
        total.sums["blocks"] += int(block.label_mask.any())
    return total


def lilicorr_sums(strategy: DraftStrategy, sample: dict[str, Tensor], features: Tensor, anchors: list[int]) -> Sums:
    total, reader, options = _no_sums(features), lilicorr_reader(strategy), strategy.options
    places = options.block_size - 1
    for anchor, block in zip(anchors, _blocks(strategy, sample, features, anchors, places)):
        asked = (block.features, block.next_tokens, block.labels)
        logits, base = reader.logits(*asked), reader.backbone.logits(*asked)
        ce = block.cross_entropies(base)
        total.loss = total.loss + (ce * weigh(strategy, ce.detach(), block.label_mask)).sum()
        total.sums["blocks"] += int(block.label_mask.any())
        reachable, chosen, at_top = True, True, True
        for place in block.label_mask.nonzero().flatten().tolist():
            label, scores = block.labels[place], logits[place]
            candidates = scores.isfinite().nonzero().flatten()
            total.add_at("in_lattice_sums", place, label in candidates, places)
            at_top = at_top and bool(base[place].argmax() == label)
            total.sums["base_accept_len"] += at_top
            reachable = reachable and bool(label in candidates)
            if not reachable:
                continue
            total.sums["lattice_len"] += 1
            total.add_at("acc_corrects", place, bool(scores.argmax() == label), places)
            chosen = chosen and bool(scores.argmax() == label)
            total.sums["accept_len"] += chosen
            if not block.label_mask.all():
                continue
            others = candidates[candidates != label]
            shares = scores[candidates].softmax(-1)
            teacher = reader.backbone.head @ sample["last"][anchor + place]
            gaps = (teacher[label] - teacher[candidates]).clamp_min(0)
            short = (options.margin - (scores[label] - scores[others].max())).clamp_min(0)
            own = shares[candidates == label].log().sum()
            total.loss = total.loss - options.ce_weight * own + options.margin_weight * short
            total.loss = total.loss + options.penalty_weight * (shares * gaps.detach()).sum()
    return total


def _no_sums(features: Tensor) -> Sums:
    return Sums(torch.zeros((), dtype=features.dtype))


def _blocks(
    strategy: DraftStrategy,
    sample: dict[str, Tensor],
    features: Tensor,
    anchors: list[int],
    places: int,
    contiguous: bool | None = None,
) -> list[LabelledBlock]:
    contiguous = strategy.options.loss == "token_mean" if contiguous is None else contiguous
    ids, mask = sample["input_ids"], sample["loss_mask"]
    return [LabelledBlock.at(anchor, ids, mask, features, places, contiguous) for anchor in anchors]


def _accepted_labels(logits: Tensor, block: LabelledBlock) -> int:
    """Leading labels that are the first choice; one that does not count is passed over."""
    wrong = block.label_mask & (logits.argmax(-1) != block.labels)
    return int((block.label_mask & ~wrong.long().cummax(0).values.bool()).sum())
