"""XPress as a draft strategy: DFlash's batches and anchors, a loss of several passes, metric sums."""

from __future__ import annotations

from draftworks.strategies.dflash.strategy import DFlashStrategy
from draftworks.strategies.xpress.model import XPressDraft
from draftworks.strategies.xpress.options import XPRESS


class XPressStrategy(DFlashStrategy):
    """Blocks at DFlash's anchors; the refiner is trained on the true tokens, and on the draft's own.

    The loss is in draftworks.strategies.xpress.model. The weight w of a label is DFlash's: by place (`gamma`), or D-PACE.
    In both modes of `options.loss` the labels of a block are those up to the end of the anchor's answer; loss_weight =
    Σ of the weights by place, or with `specforge` and D-PACE the number of samples, as in DSpark. (speculators 0.9.0
    divides by the number of labels.) Evaluations compute the same loss as training.

    Beside `acc_*`, `loss_*` (before w) and `acceptance_*`, all of the pass on the true tokens, there are, (1,) each with
    its `_denoms`, over the blocks with a label that counts: `accept_len_sums` and `base_accept_len_sums`, the leading
    labels that are the argmax with the refiner and without, and `tau_sums`, the expected number of accepted proposals
    under rejection sampling.
    """

    spec, name = XPRESS, XPRESS.name
    labels_end_with_answer = True

    def make_draft(self) -> XPressDraft:
        return XPressDraft(self.backbone, self.options, self.make_generator("refiner"))
