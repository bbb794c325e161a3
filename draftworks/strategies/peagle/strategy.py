"""P-EAGLE as a draft strategy: drawn chains, loss modes, metric sums; and its serving form.

That is one sequence, with cached keys and values of depth 0; masked places are not cached. With a window the cache holds
its newest positions only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from draftworks.drafts.anchors import derive_sample_seed
from draftworks.drafts.attention import KeyValue
from draftworks.drafts.decoder_strategy import DecoderStrategy, resolve_mask_token
from draftworks.drafts.documents import BatchLayout, Documents, mask_last_positions
from draftworks.drafts.layers import Rotation
from draftworks.drafts.objectives import LossSettings, specforge_label_mask, token_mean_label_mask
from draftworks.drafts.sampling import distribution, draw
from draftworks.drafts.strategy import Drafter, Proposal, StepContext, StepOutput
from draftworks.drafts.target_labels import TargetLabels
from draftworks.drafts.target_parts import TargetParts
from draftworks.features.contracts import TrainBatch
from draftworks.strategies.eagle3.loss import make_metric_sums
from draftworks.strategies.peagle.chains import DepthSampling, draw_chains, keep_all_chains
from draftworks.strategies.peagle.model import PEagleDraft, PEagleSizes, PEagleTraits, TokenInputs, TokenLayout
from draftworks.strategies.peagle.options import PEAGLE, PEagleOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class PEagleDrafter(Drafter):
    """Drafter whose position t reads the target's features at t and the token t+1; masked places follow the last position.

    Args:
        taps: names of the features, in the order in which `fc` reads them.
    """

    def __init__(self, model: PEagleDraft, taps: Sequence[str]) -> None:
        self._model = model
        self._taps = tuple(taps)
        self._cache = [_LayerCache() for _ in model.layers]
        self._length = 0
        self._last: Tensor | None = None

    @torch.no_grad()
    def extend(self, features: Mapping[str, Tensor], next_tokens: Tensor) -> None:
        inputs = self._model.make_inputs(torch.cat([features[tap] for tap in self._taps], dim=-1), next_tokens)
        self._last = self._forward(inputs, keeps=True)[-1:]
        self._length += len(next_tokens)

    @torch.no_grad()
    def propose(self, count: int, temperature: float, generator: Generator | None) -> Proposal:
        if self._last is None:
            raise RuntimeError("propose was called before extend")
        states = self._last
        if count > 1:
            masked = TokenInputs(*(x.expand(count - 1, -1) for x in self._model.make_masked_inputs()))
            states = torch.cat([states, self._forward(masked, keeps=False)])
        logits = self._model.lm_head(states)
        if temperature == 0:
            return Proposal(self._model.draft_ids[logits.argmax(-1)])
        probabilities = self._model.to_target_vocab(distribution(logits, temperature))
        return Proposal(torch.stack([draw(one, generator) for one in probabilities]), probabilities)

    def _forward(self, inputs: TokenInputs, keeps: bool) -> Tensor:
        """Return the normed states (n, H) of tokens after those in the cache; each sees all before it, or its window."""
        model, count = self._model, len(inputs.hidden)
        rotation = model.rotary(self._length + count, inputs.hidden.dtype).window(self._length, count)
        layouts = [_CachedLayout(cache, rotation, model.head_dim, model.window, keeps) for cache in self._cache]
        return model.run_layers(inputs, layouts)


@dataclass
class _LayerCache:
    """Keys and values of the positions of depth 0 so far, or of the newest `window`; None before the first."""

    known: KeyValue | None = None

    def concat(self, news: KeyValue) -> KeyValue:
        return news if self.known is None else self.known.concat(news)


@dataclass(frozen=True)
class _CachedLayout(TokenLayout):
    """New tokens after those in a cache, causal. `keeps`: they are added to the cache."""

    cache: _LayerCache
    rotation: Rotation
    width: int
    window: int | None
    keeps: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.unflatten(-1, (-1, self.width)).transpose(0, 1)[None] for x in (query, key, value))
        everything = self.cache.concat(KeyValue(self.rotation.apply(key), value))
        news, total = query.shape[2], everything.key.shape[2]
        window = total if self.window is None else self.window
        if self.keeps:
            self.cache.known = everything.select(slice(max(total - window, 0), None))
        # A prompt is long and first: its mask is square, and without a window it is never materialised.
        begins = news == total <= window
        seen = None if begins else _make_causal_mask(news, total, window, query.device)
        attended = F.scaled_dot_product_attention(
            self.rotation.apply(query), *everything, attn_mask=seen, is_causal=begins, enable_gqa=True
        )
        return attended[0].transpose(0, 1).flatten(1)

    def expand_states(self, x: Tensor) -> Tensor:
        return x


def _make_causal_mask(news: int, total: int, window: int, device: torch.device) -> Tensor:
    """Return which of `total` positions each of the last `news` sees, (news, total) bool: the newest `window` up to itself."""
    offset = total - news
    return torch.ones(news, total, dtype=torch.bool, device=device).tril(offset).triu(offset - window + 1)


class PEagleStrategy(DecoderStrategy):
    """EAGLE-3's positions, each followed by a chain of masked places whose length is drawn at every step (`draw_chains`).

    The loss of a position at a depth is its cross-entropy CE with the target's distribution over the draft vocabulary, both
    at `teacher_temperature` T and times T²; if the target's argmax is outside, there is no loss, and the accuracy counts it as wrong. The modes of `options.loss`:

    `token_mean`: position a at depth d is supervised if tokens a+1 … a+2+d all are, as for EAGLE-3; chains continue from such
        positions. loss_sum = Σ CE of the drawn positions, loss_weight = their number. So the weight of a depth is the
        number of positions drawn for it, as in the reference's plain mean. (Inverse probability weights would train deep depths
        as much as shallow ones, on few and noisy positions. A server uses a depth only after all before it were accepted,
        so the falling weight is roughly that of its use.)
    `specforge`: equal to SpecForge's loss, for one sample in a micro-batch as there. Position a at depth d is supervised if the
        mask is on at a + d, the last position of every sample masked out, and at all of a + 1 … a + d;
        loss_sum = Σ CE / number of positions with a label in the draft vocabulary, loss_weight = 1; in an evaluation, the weight of
        a micro-batch is its number of supervised tokens, as in SpecForge's Evaluator.

    An evaluation draws nothing: it takes every supervised chain at full length, so its numbers depend on neither step nor
    seed. Its depths have more positions than in training, so compare losses depth by depth.

    Metric sums are by depth, as EAGLE-3's are by step; SpecForge's `full_acc` is Σ acc_corrects / Σ acc_denoms, over positions
    with a label in the draft vocabulary only. A proposal does not depend on those before it, but a table of bigrams does, so the
    comparison would not be fair: this is no `ChainStrategy`.
    """

    spec, name = PEAGLE, PEAGLE.name

    def __init__(self, options: PEagleOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        self.draft_tokens = self.max_draft_tokens = options.num_depths
        self._depth_sampling = DepthSampling(options.down_sample_ratio, options.down_sample_ratio_min)
        traits = PEagleTraits(
            options.train_embeddings, options.fc_norm, options.norm_before_residual, options.sliding_window
        )
        generator = torch.Generator().manual_seed(seed)
        assert self.draft_ids is not None, "P-EAGLE predicts over a reduced vocabulary"
        self._target_labels = TargetLabels()
        self.model = PEagleDraft(self.target, self._sizes(), self.draft_ids, generator, traits, options.attention)

    def complete_batch(
        self, tensors: dict[str, Tensor], sample_ids: Sequence[str], layout: BatchLayout
    ) -> dict[str, Tensor]:
        """Add `draws`, one int64 for each sample, which its chains are drawn from."""
        tensors["draws"] = torch.tensor([derive_sample_seed(self.seed, name) for name in sample_ids])
        return mask_last_positions(tensors, layout) if self.options.loss == "specforge" else tensors

    def forward_loss(self, batch: TrainBatch, ctx: StepContext) -> StepOutput:
        """Return the sums that the class describes. In training, the chains depend on the step of `ctx`."""
        documents = Documents.of(batch)
        label_mask = self._mark_labels(batch["loss_mask"], documents)
        kept = self._keep_chains(label_mask, batch, documents, ctx)
        argmaxes = None
        if ctx.training and self.reads_samples_again:
            argmaxes = self._target_labels.find(batch, label_mask, self.model.target_head)
        inputs = (batch["input_ids"], batch["features"], batch["last"])
        result = self.model(*inputs, kept, documents, LossSettings.of(self.options, ctx), argmaxes)
        supervised = kept.sum(dim=(1, 2), dtype=torch.float64)
        metric_sums = make_metric_sums(result, supervised)
        if self.options.loss == "specforge":
            labelled = result.sums["acceptance_denoms"].sum().clamp(min=1).to(result.loss.dtype)
            answers = batch["loss_mask"].sum().to(labelled.dtype)
            weight = torch.ones_like(labelled) if ctx.training else answers
            return StepOutput(result.loss * (weight / labelled), weight, metric_sums)
        return StepOutput(result.loss, supervised.sum().to(result.loss.dtype), metric_sums)

    def select_chains(self, batch: TrainBatch, ctx: StepContext) -> Tensor:
        """Return the positions of the loss at each depth, (D, B, S) bool; see the class."""
        documents = Documents.of(batch)
        return self._keep_chains(self._mark_labels(batch["loss_mask"], documents), batch, documents, ctx)

    def _mark_labels(self, loss_mask: Tensor, documents: Documents) -> Tensor:
        supervise = specforge_label_mask if self.options.loss == "specforge" else token_mean_label_mask
        return supervise(loss_mask, self.options.num_depths, documents)

    def _keep_chains(self, label_mask: Tensor, batch: TrainBatch, documents: Documents, ctx: StepContext) -> Tensor:
        if not ctx.training:
            return keep_all_chains(label_mask)
        return draw_chains(label_mask, batch["draws"], ctx.global_step, self._depth_sampling, documents)

    def drafter(self) -> Drafter:
        return PEagleDrafter(self.model, self.tap_names)

    def _sizes(self) -> PEagleSizes:
        mask = resolve_mask_token(self.name, self.options, self.target)
        return PEagleSizes(**self.resolve_layer_sizes(), num_layers=self.options.num_layers, mask_token_id=mask)

    def describe_sizes(self) -> dict[str, Any]:
        return {**self._sizes()._asdict(), "num_depths": self.options.num_depths}
