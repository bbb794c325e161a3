"""Losses and metric sums of EAGLE-3, one position and one step at a time, from the states of its reader.

Training over several steps asks at every position what serving asks there: given the true text up to it and, as its own
proposals, the true tokens after it, step i is the state of the reader's chain after i tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from reference_readers import chain_reader
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.strategy import DraftStrategy, StepContext, StepOutput
from draftworks.strategies.eagle3.reader import Eagle3Norms, Eagle3Reader

MASKS = [[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def eagle3_reader(strategy: DraftStrategy) -> Eagle3Reader:
    options = strategy.options
    norms = Eagle3Norms(
        norm_before_residual=options.norm_before_residual,
        norm_before_fc=options.norm_before_fc,
        fc_norm=options.fc_norm,
        norm_output=options.feedback == "post_norm",
    )
    return chain_reader(strategy, norms, "midlayer.", options.sliding_window)


class Supervised(NamedTuple):
    """One supervised position at one step: cross-entropy, acceptance rate α, and whether the first choice is the target's,
    and the target's in the draft vocabulary."""

    ce: Tensor
    accepted: Tensor
    right: bool
    taught: bool


@dataclass(frozen=True)
class Reference:
    """The loss, differentiable, and by step: mean losses and supervised positions."""

    loss: Tensor
    loss_weight: int
    step_losses: list[float]
    supervised: list[list[Supervised]]

    @property
    def corrects(self) -> list[float]:
        return [sum(each.right for each in step) for step in self.supervised]

    @property
    def denoms(self) -> list[float]:
        return [len(step) for step in self.supervised]


def reference(strategy: DraftStrategy, samples: list[dict[str, Tensor]]) -> Reference:
    by_step = [[] for _ in range(strategy.options.ttt_length)]
    for sample in samples:
        for step, found in _supervised(strategy, sample):
            by_step[step].append(found)
    options = strategy.options
    if options.loss == "specforge":
        positions = len(samples) * max(len(sample["input_ids"]) for sample in samples)
        losses = [_specforge_loss([each for each in step if each.taught], positions, options) for step in by_step]
        sums, weight = losses, 1
    else:
        sums = [
            sum((_position_loss(each, options) for each in step if each.taught), torch.zeros(())) for step in by_step
        ]
        losses = [total / max(len(step), 1) for total, step in zip(sums, by_step)]
        weight = len(by_step[0])
    loss = sum(options.step_decay**i * total for i, total in enumerate(sums))
    return Reference(loss, weight, [float(each.detach()) for each in losses], by_step)


def _supervised(strategy: DraftStrategy, sample: dict[str, Tensor]) -> list[tuple[int, Supervised]]:
    reader, options, head = eagle3_reader(strategy), strategy.options, strategy.target.head
    ids, mask, found = sample["input_ids"], sample["loss_mask"].tolist(), []
    streams = torch.cat([sample[tap.name] for tap in reader.taps], dim=-1)
    for position in range(len(ids) - 1):
        steps = [
            i for i in range(min(options.ttt_length, len(ids) - 1 - position)) if _counts(mask, position, i, options)
        ]
        if not steps:
            continue
        known = F.pad(ids[position + 2 : position + 2 + max(steps)], (0, 1))  # the last is not read
        logits = read_logits(strategy, streams[: position + 1], ids[1 : position + 2], known)
        for step in steps:
            z = head @ sample["last"][position + 1 + step]
            found.append((step, _compare(z, logits[step], reader.vocabulary.ids)))
    return found


def read_logits(strategy: DraftStrategy, features: Tensor, next_tokens: Tensor, drawn: Tensor) -> Tensor:
    """Return the reader's logits (k, V_d); without the final norm where the head is to read un-normed states, which no
    format can hold."""
    reader = eagle3_reader(strategy)
    states = reader.states(features, next_tokens, drawn)
    read = reader.norm(states, "norm") if strategy.options.norm_output else states
    return read @ reader.weights["lm_head.weight"].T


def _counts(mask: list[int], position: int, step: int, options) -> bool:
    """Token mean: the tokens from position + 1 to the label, position + 2 + step, are all the assistant's. SpecForge: the
    mask at position + step, off at the last position of a sample."""
    if options.loss == "specforge":
        return bool(mask[position + step]) and position + step < len(mask) - 1
    return position + 2 + step < len(mask) and all(mask[position + 1 : position + 3 + step])


def _compare(z: Tensor, logits: Tensor, ids: Tensor) -> Supervised:
    """From logits of the target (V,) and of the draft (V_d,), whose columns are `ids` of the target."""
    label = z.argmax()
    ce = -(z[ids].softmax(-1) * logits.log_softmax(-1)).sum()
    accepted = torch.minimum(z.softmax(-1)[ids], logits.softmax(-1)).sum()
    return Supervised(ce, accepted, bool(ids[logits.argmax()] == label), bool((ids == label).any()))


def _position_loss(one: Supervised, options) -> Tensor:
    if options.objective == "ce":
        return one.ce
    if options.objective == "lk_alpha":
        return -one.accepted.log()
    share = options.kl_scale * torch.exp(-options.kl_decay * one.accepted.detach())
    return share * one.ce + (1 - share) * (1 - one.accepted)


def _specforge_loss(taught: list[Supervised], positions: int, options) -> Tensor:
    """The CE over all positions of the padded batch; of the LK losses means over the taught ones."""
    if not taught:
        return torch.zeros(())
    ce, accepted = sum(each.ce for each in taught) / positions, torch.stack([each.accepted for each in taught])
    if options.objective == "ce":
        return ce
    if options.objective == "lk_alpha":
        return -accepted.log().mean()
    share = options.kl_scale * torch.exp(-options.kl_decay * accepted.detach().mean())
    return share * ce + (1 - share) * (1 - accepted.mean())


def run(strategy: DraftStrategy, samples: list[dict[str, Tensor]], training: bool = True) -> StepOutput:
    batch = strategy.collate(samples, [str(i) for i in range(len(samples))])
    return strategy.forward_loss(batch, StepContext(training=training))


def gradients(strategy: DraftStrategy, loss: Tensor) -> dict[str, Tensor]:
    named = {name: weight for name, weight in strategy.model.named_parameters() if weight.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()), materialize_grads=True)))


def assert_close(found: Tensor, expected, tolerance: float, what: str = "") -> None:
    expected = torch.as_tensor(expected, dtype=found.dtype)
    scale = max(1.0, float(expected.detach().abs().max()))
    assert float((found.detach() - expected.detach()).abs().max()) <= tolerance * scale, what


def assert_trains_as_read(strategy: DraftStrategy, samples: list[dict[str, Tensor]]) -> None:
    """Loss, losses by step, accuracy and every gradient are those of the reference."""
    tolerance = TOLERANCE[strategy.model.fc.weight.dtype]
    output, expected = run(strategy, samples), reference(strategy, samples)
    metric_sums = output.metric_sums
    assert_close(output.loss_sum, expected.loss, tolerance)
    assert float(output.loss_weight) == expected.loss_weight
    assert_close(metric_sums["loss_sums"] / metric_sums["loss_denoms"].clamp(min=1), expected.step_losses, tolerance)
    assert metric_sums["acc_corrects"].tolist() == expected.corrects
    assert metric_sums["acc_denoms"].tolist() == expected.denoms
    wanted = gradients(strategy, expected.loss)
    for name, found in gradients(strategy, output.loss_sum).items():
        assert_close(found, wanted[name], tolerance, name)
