"""EAGLE-3 as a draft strategy (arXiv 2503.01840): loss modes, metric sums, and its serving form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from draftworks.drafts.decoder_strategy import DecoderStrategy
from draftworks.drafts.documents import BatchLayout, Documents, mask_last_positions
from draftworks.drafts.objectives import (
    BatchObjective,
    Blend,
    CrossEntropy,
    LogAcceptance,
    LossSettings,
    MeanBlend,
    MeanLogAcceptance,
    Objective,
    specforge_label_mask,
    token_mean_label_mask,
)
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import ChainStrategy, Drafter, Proposal, StepContext, StepOutput
from draftworks.drafts.target_labels import TargetLabels
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.eagle3.loss import make_metric_sums
from draftworks.strategies.eagle3.model import Eagle3AttentionOptions, Eagle3Draft, Eagle3Norms, Eagle3Sizes, Heads
from draftworks.strategies.eagle3.options import EAGLE3, Eagle3Options

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class Eagle3Drafter(Drafter):
    """Drafter whose position t reads the target's features at t and the token t+1; the chain begins at the last position.

    Args:
        taps: names of the features, in the order in which `fc` reads them.
    """

    def __init__(self, model: Eagle3Draft, taps: Sequence[str]) -> None:
        self._model = model
        self._taps = tuple(taps)
        self._length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._last: Heads | None = None
        self._state: Tensor | None = None

    @torch.no_grad()
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        hidden = self._model.fuse(torch.cat([features[tap] for tap in self._taps], dim=-1)[None])
        heads = self._project(hidden, self._model.embed(next_tokens[None]), start=self._length)
        self._length += len(next_tokens)
        self._keys.append(heads.key)
        self._values.append(heads.value)
        self._last = Heads(heads.query[:, :, -1:], heads.key[:, :, -1:], heads.value[:, :, -1:])
        self._state = hidden[:, -1:]

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        if self._last is None or self._state is None:
            raise RuntimeError("propose was called before extend")
        self._keys, self._values = [self._join_seen(self._keys)], [self._join_seen(self._values)]
        keys, values = list(self._keys), list(self._values)
        heads, hidden = self._last, self._state
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(count):
            if step > 0:
                heads = self._project(hidden, self._model.embed(tokens[-1][None, None]), start=self._length - 1 + step)
                keys.append(heads.key)
                values.append(heads.value)
            hidden = self._layer(hidden, Heads(heads.query, torch.cat(keys, dim=2), torch.cat(values, dim=2)))
            output, hidden = self._model.finish_step(hidden)
            logits = self._model.lm_head(output)[0, 0]
            if temperature == 0:
                tokens.append(self._model.draft_ids[logits.argmax()])
            else:
                distributions.append(self._model.to_target_vocab(distribution(logits, temperature)))
                tokens.append(draw(distributions[-1], generator))
        return Proposal(torch.stack(tokens), torch.stack(distributions) if distributions else None)

    def _join_seen(self, parts: list[Tensor]) -> Tensor:
        """Return the keys or values of step 0 that the chain sees: all, or the newest `window`."""
        joined, window = torch.cat(parts, dim=2), self._model.midlayer.attention.window
        return joined if window is None else joined[:, :, -window:]

    def _project(self, hidden: Tensor, embedded: Tensor, start: int) -> Heads:
        """Return the heads of n positions (1, n, H), the first of which has rotary position `start`."""
        layer, length = self._model.midlayer, hidden.shape[1]
        halves = layer.self_attn.split_halves()
        joint = torch.nn.functional.linear(layer.begin_step(hidden).normed, halves.states)
        joint = joint + torch.nn.functional.linear(layer.input_layernorm(embedded), halves.tokens)
        rotation = self._model.rotary(start + length, joint.dtype).window(start, length)
        return layer.self_attn.split_heads(joint, rotation)

    def _layer(self, hidden: Tensor, heads: Heads) -> Tensor:
        layer = self._model.midlayer
        hidden = layer.begin_step(hidden).residual + layer.self_attn.o_proj(layer.self_attn.attend(heads))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


SHORT_UNROLL = 2
"""Draft steps of a short unroll: the first, on the target's features, and one on the draft's own states."""


class LossScaling(NamedTuple):
    """Weights by which the losses of a batch's steps are summed, and the weight of the batch among others.

    Attributes:
        step_weights: T weights of the steps' loss sums in the loss.
        metric_factor, denoms: factor on the steps' loss sums, and their (T,) denominators, in the metric sums.
        loss_weight: scalar, `StepOutput.loss_weight`.
    """

    step_weights: list[float]
    metric_factor: int
    denoms: Tensor
    loss_weight: Tensor


class Eagle3Strategy(DecoderStrategy, ChainStrategy):
    """One decoder layer trained on its own outputs over `ttt_length` steps.

    `options.objective` is the loss of a position, with CE and α as in draftworks.drafts.objectives: `ce` is CE, `lk_alpha`
    −log α, `lk_lambda` a blend of CE and 1 − α, all at `teacher_temperature` and times its square. A position whose target argmax is outside the draft vocabulary has no loss,
    and counts as wrong in the accuracy. The modes of `options.loss`:

    `token_mean`: positions by `token_mean_label_mask`; loss_sum = Σ_i decay^i Σ_positions loss, loss_weight = positions
        supervised at step 0. It depends on supervised tokens only, not on batching and padding; therefore the blend of
        `lk_lambda` is computed for each position. `loss_denoms`, like `acc_denoms`, are the supervised positions of each step.
    `specforge`: equal to SpecForge's loss. Positions by `specforge_label_mask`, the last position of every sample masked out;
        loss_sum = Σ_i decay^i L_i and loss_weight = 1. For `ce`, L_i = Σ_positions CE / (B·S) with padding and prompts
        included in B·S, which are the `loss_denoms`; for the others, L_i is made of means over the batch, see
        `MeanLogAcceptance` and `MeanBlend`, and `loss_denoms` are 1 in training.

    In training, `specforge` gives a micro-batch the weight 1; an evaluation weights it by its B·S positions, as SpecForge's
    Evaluator does, so that evaluations are equal too.

    In evaluations, and in training if the objective needs it, `acceptance_sums` are Σ α of each step over the supervised
    positions whose target argmax is in the draft vocabulary (`acceptance_denoms`). This rate is conditional, and higher the
    smaller the draft vocabulary is. Evaluations also give it over all supervised positions.
    """

    spec, name = EAGLE3, EAGLE3.name

    def __init__(self, options: Eagle3Options, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        self.draft_tokens = options.ttt_length
        norms = Eagle3Norms(**{name: getattr(options, name) for name in Eagle3Norms._fields})
        generator = torch.Generator().manual_seed(seed)
        attention = Eagle3AttentionOptions(options.attention, options.sliding_window)
        assert self.draft_ids is not None, "EAGLE-3 predicts over a reduced vocabulary"
        self.model = Eagle3Draft(
            self.target, Eagle3Sizes(**self.resolve_layer_sizes()), self.draft_ids, generator, norms, attention
        )
        self._target_labels = TargetLabels()
        self._step_weights = [options.step_decay**step for step in range(options.ttt_length)]

    def complete_batch(
        self, tensors: dict[str, Tensor], sample_ids: Sequence[str], layout: BatchLayout
    ) -> dict[str, Tensor]:
        return mask_last_positions(tensors, layout) if self.options.loss == "specforge" else tensors

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes, in a short unroll those of its steps."""
        mask, documents = batch["loss_mask"], Documents.of(batch)
        label_mask = self.chain_label_mask(mask, documents, self._count_steps(ctx))
        supervised = label_mask.sum(dim=(1, 2), dtype=torch.float64)
        scaling = self._scale_losses(supervised, mask.numel(), ctx.training)
        weights, objective = scaling.step_weights, self._objective(mask.numel())
        inputs = (batch["input_ids"], batch["features"], batch["last"])
        settings, argmaxes = LossSettings.of(self.options, ctx), self._find_argmaxes(batch, documents, ctx)
        result = self.model(*inputs, label_mask, weights, objective, documents, settings, argmaxes)
        loss_sums = {"loss_sums": result.sums["loss_sums"] * scaling.metric_factor, "loss_denoms": scaling.denoms}
        metric_sums = make_metric_sums(result, supervised) | loss_sums
        return StepOutput(result.loss, scaling.loss_weight.to(result.loss.dtype), metric_sums)

    def _find_argmaxes(self, batch: TrainBatch, documents: Documents, ctx: StepContext) -> Tensor | None:
        """Return the target's argmaxes (B·S,) where the loss needs nothing else of the target's whole vocabulary."""
        if not (ctx.training and self.reads_samples_again and self.options.objective == "ce"):
            return None
        label_mask = self.chain_label_mask(batch["loss_mask"], documents)
        return self._target_labels.find(batch, label_mask, self.model.target_head)

    def _count_steps(self, ctx: StepContext) -> int:
        """Return the number of draft steps to unroll."""
        is_short = ctx.training and ctx.global_step < self.options.short_unroll * ctx.total_steps
        return min(SHORT_UNROLL, self.options.ttt_length) if is_short else self.options.ttt_length

    def find_share_done(self, step: int, total_steps: int) -> float:
        """Steps cost nearly as much as the draft steps that they unroll."""
        short = min(SHORT_UNROLL, self.options.ttt_length)
        change = self.options.short_unroll * total_steps

        def cost(steps: float) -> float:
            return short * min(steps, change) + self.options.ttt_length * max(steps - change, 0)

        return cost(step) / cost(total_steps)

    def _scale_losses(self, supervised: Tensor, positions: int, training: bool) -> LossScaling:
        """Return the scaling for (T,) supervised positions of each step, of B·S `positions` in the batch.

        The weights of a short unroll have the sum of all, so that its end is no step in the loss.
        """
        unrolled = self._step_weights[: len(supervised)]
        whole = sum(self._step_weights) / sum(unrolled)
        step_weights = [weight * whole for weight in unrolled]
        if self.options.loss == "token_mean":
            return LossScaling(step_weights, 1, supervised, supervised[0])
        batch_weight = 1 if training else positions
        # The LK losses are means over the batch already.
        divisor, each = (positions, 1) if self.options.objective == "ce" else (1, batch_weight)
        return LossScaling(
            step_weights=[weight * batch_weight / divisor for weight in step_weights],
            metric_factor=each,
            denoms=torch.full_like(supervised, divisor * each),
            loss_weight=torch.full_like(supervised[0], batch_weight),
        )

    def chain_label_mask(self, loss_mask: Tensor, documents: Documents, steps: int | None = None) -> Tensor:
        """As `ChainStrategy`, of `steps` draft steps; None: of all."""
        supervise = specforge_label_mask if self.options.loss == "specforge" else token_mean_label_mask
        return supervise(loss_mask, steps or self.options.ttt_length, documents)

    def drafter(self) -> Drafter:
        return Eagle3Drafter(self.model, self.tap_names)

    def fsdp_blocks(self) -> Sequence[nn.Module]:
        """Return none: every step of the unroll calls the one layer, so sharding it by itself would gather it T times."""
        return ()

    def describe_sizes(self) -> dict[str, Any]:
        return self.resolve_layer_sizes()

    def _objective(self, positions: int) -> Objective | BatchObjective:
        options = self.options
        if options.objective == "ce":
            return CrossEntropy()
        if options.loss == "specforge":
            if options.objective == "lk_alpha":
                return MeanLogAcceptance()
            return MeanBlend(options.kl_scale, options.kl_decay, positions)
        return LogAcceptance() if options.objective == "lk_alpha" else Blend(options.kl_scale, options.kl_decay)
