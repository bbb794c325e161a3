"""DSpark as a draft strategy: DFlash's batches and anchors, a loss towards the target's distributions, metric sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftworks.drafts.target_parts import TargetParts
from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.dspark.model import DSparkDraft
from draftworks.strategies.dspark.options import DSPARK, DSparkOptions

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class DSparkStrategy(DFlashStrategy):
    """Blocks at DFlash's anchors; each label is predicted from the true token before it.

    The loss of a label is in draftworks.strategies.dspark.model. Its weight w is DFlash's: by place (`gamma`), or D-PACE, which takes
    its confidences from the cross-entropies of the corrected logits. (speculators leaves its confidence head out of D-PACE;
    here w weights the whole loss of a label, as in SpecForge's formula.)

    In both modes of `options.loss` the labels of a block are those up to the end of the anchor's answer, as in SpecForge's
    DSpark; loss_weight = Σ of the weights by place. So `specforge` differs only with D-PACE, for which no publication gives a
    normaliser for DSpark: it takes DFlash's, the number of samples.

    Beside `acc_*`, `loss_*` (before w) and `acceptance_*` (a, in training too) there are, each with its `_denoms`: by place,
    `confidence_error_sums`, of |σ(confidence) - a|, with a confidence head; and (1,), over the blocks with a label that counts,
    `accept_len_sums`, the leading labels that are the argmax, and `tau_sums`, the expected number of accepted proposals under
    rejection sampling (SpecForge's `tau_probabilistic` is one more). All of them are computed on the true tokens; as long as a
    prefix is correct, the draft's own tokens are these.
    """

    spec, name = DSPARK, DSPARK.name
    labels_end_with_answer = True

    def __init__(self, options: DSparkOptions, target: TargetParts, vocab: VocabMapping | None, seed: int) -> None:
        super().__init__(options, target, vocab, seed)
        self.draft_tokens = self.max_draft_tokens = options.block_size

    def make_draft(self) -> DSparkDraft:
        return DSparkDraft(self.backbone, self.options, self.make_generator("heads"))
