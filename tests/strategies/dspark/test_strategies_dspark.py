"""DSpark trains and proposes, with every head, what the independent reader of its exports computes."""

from __future__ import annotations

from functools import partial

import pytest
import strategy_cases
import torch
from dflash_toys import MASKS, OPTIONS, sample, side_by_side
from draft_toys import VOCAB
from dspark_cases import GATED, NONE, RNN, read
from strategy_cases import HALFWAY, NAMES
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.strategy import StepContext
from draftworks.strategies.dspark.options import DSparkOptions
from draftworks.strategies.dspark.strategy import DSparkStrategy

STREAMS = ("hf1", "hf3", "hf6", "last")
SAMPLES = [sample(mask, seed, taps=STREAMS) for seed, mask in enumerate(MASKS)]
make = partial(strategy_cases.make, "dspark")


@pytest.mark.parametrize("weighting", ["uniform", "dpace"])
def test_the_references_loss_is_ours_but_for_the_divisor_with_dpace(weighting):
    outputs = [
        strategy.forward_loss(strategy.collate(SAMPLES, NAMES), HALFWAY)
        for strategy in (make(loss=mode, weighting=weighting) for mode in ("token_mean", "specforge"))
    ]
    assert outputs[0].loss_sum == outputs[1].loss_sum
    assert outputs[1].loss_weight == (len(SAMPLES) if weighting == "dpace" else outputs[0].loss_weight)


@pytest.mark.parametrize("heads", [{}, GATED, RNN, NONE], ids=["vanilla", "gated", "rnn", "none"])
def test_an_untrained_draft_proposes_what_its_backbone_does_and_is_in_doubt(parts, heads):
    strategy = DSparkStrategy(DSparkOptions(**OPTIONS | {"markov_rank": 5} | heads), parts, None, seed=3)
    one, backbone = sample([1] * 9, 2, torch.float32, STREAMS), strategy.model.backbone
    batch, rows = strategy.collate([one], ["a"]), torch.ones(1, 9, dtype=torch.bool)

    class Alone(type(backbone)):
        """The backbone, which proposes from the anchor's own place on."""

        def decode(self, blocks, count, choose):
            return F.linear(self.norm(blocks.states[:, :count]), self.target_head).argmax(-1)

    found = strategy.propose(batch, rows, 4)
    backbone.__class__ = Alone
    assert torch.equal(found, backbone.propose(batch["input_ids"], batch["features"], rows, 4))
    if strategy.options.confidence_head:
        known = (side_by_side(one)[:4], one["input_ids"][1:5])
        assert not read(strategy).confidence(*known, torch.arange(4)).any()


def test_names_of_weights_are_the_peers_beside_the_backbone():
    def beside(**options) -> set[str]:
        return {name for name in make(**options).model.state_dict() if not name.startswith("backbone.")}

    markov = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    confidence = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert beside() == markov | confidence
    for kind, name in (("gated", "gate_proj"), ("rnn", "joint_proj")):
        own = {f"markov_head.{name}.weight", f"markov_head.{name}.bias"}
        assert beside(markov_head_type=kind, confidence_head=False) == markov | own
    assert beside(markov_rank=0, confidence_with_markov=False) == confidence


def markov_samples(head: Tensor, count: int) -> list[dict[str, Tensor]]:
    """Texts in which either of two tokens follows a token; the target knows which two, and the taps know nothing."""
    generator = torch.Generator().manual_seed(0)
    follow = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(2)], dim=1)
    samples = []
    for number in range(count):
        said = [number]
        for which in torch.randint(2, (23,), generator=generator).tolist():
            said.append(int(follow[said[-1], which]))
        ids = torch.tensor(said)
        one = sample([1] * 24, number, torch.float32)
        samples.append({**one, "input_ids": ids, "last": head[follow[ids]].sum(1) / 4})
    return samples


def test_the_markov_head_says_more_than_a_backbone_of_what_follows_a_token(parts):
    """Both learn; and the confidence comes to know better how likely a proposal is."""
    samples, tau = markov_samples(parts.head, 6), {}
    for rank in (16, 0):
        options = DSparkOptions(**OPTIONS | {"num_layers": 1, "num_anchors": 16}, **heads_of_rank(rank))
        strategy = DSparkStrategy(options, parts, None, seed=0)
        batch = strategy.collate(samples, list("abcdef"))
        optimizer, losses, errors = torch.optim.AdamW(strategy.model.parameters(), lr=1e-2), [], []
        for step in range(60):
            output = strategy.forward_loss(batch, StepContext(step, 60, training=True))
            loss = output.loss_sum / output.loss_weight
            losses.append(loss.item())
            errors.append(output.metric_sums["confidence_error_sums"].sum().item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < 0.7 * losses[0]
        assert errors[-1] < 0.7 * errors[0]
        tau[rank] = float(output.metric_sums["tau_sums"] / output.metric_sums["accept_len_denoms"])
    assert tau[16] > 1.3 * tau[0]


def heads_of_rank(rank: int) -> dict[str, object]:
    return {"markov_rank": rank, "confidence_with_markov": rank > 0}
