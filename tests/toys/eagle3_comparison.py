"""A strategy's numbers beside those of the plain transcription."""

from __future__ import annotations

import torch
from eagle3_reference import reference_specforge, reference_states, reference_token_mean

from draftworks.drafts.strategy import StepContext

MASKS = [[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def run(strategy, samples, training=True):
    batch = strategy.collate(samples, [str(i) for i in range(len(samples))])
    return strategy.forward_loss(batch, StepContext(training=training))


def gradients(strategy, loss) -> dict[str, torch.Tensor]:
    strategy.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in strategy.model.named_parameters() if p.requires_grad}


def assert_close(found, expected, tolerance, what=""):
    expected = torch.as_tensor(expected, dtype=found.dtype)
    scale = max(1.0, float(expected.detach().abs().max()))
    assert float((found.detach() - expected.detach()).abs().max()) <= tolerance * scale, what


def reference(strategy, samples, parts):
    """Loss (differentiable by leaf copies of the parameters), counts and the leaves, by the plain transcription."""
    dtype = strategy.model.fc.weight.dtype
    batch = strategy.collate(samples, [str(i) for i in range(len(samples))])
    w = {k: v.detach().clone() for k, v in strategy.model.state_dict().items()}
    leaves = {name: w[name].requires_grad_() for name, p in strategy.model.named_parameters() if p.requires_grad}
    options, head = strategy.options, parts.head.to(dtype)
    states = reference_states(w, parts, batch["input_ids"], batch["features"], parts.embedding.to(dtype), options)
    transcription = reference_specforge if options.loss == "specforge" else reference_token_mean
    return transcription(states, w, batch["loss_mask"], batch["last"], head, options), leaves


def assert_trains_as_transcribed(strategy, samples, parts):
    """Loss, losses per step, accuracy and every gradient."""
    tolerance = TOLERANCE[strategy.model.fc.weight.dtype]
    output = run(strategy, samples)
    expected, leaves = reference(strategy, samples, parts)
    metric_sums = output.metric_sums
    assert_close(output.loss_sum, expected.loss, tolerance)
    assert float(output.loss_weight) == expected.loss_weight
    assert_close(metric_sums["loss_sums"] / metric_sums["loss_denoms"].clamp(min=1), expected.step_losses, tolerance)
    assert metric_sums["acc_corrects"].tolist() == expected.corrects
    assert metric_sums["acc_denoms"].tolist() == expected.denoms
    expected.loss.backward()
    for name, found in gradients(strategy, output.loss_sum).items():
        assert_close(found, leaves[name].grad, tolerance, name)
