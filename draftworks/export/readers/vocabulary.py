"""Which of the target's tokens a draft can say: d2t, its offsets, and t2d, its members."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.export.readers.files import WEIGHTS, Expected, ExportFolder


@dataclass(frozen=True)
class DraftVocabulary:
    """The target's ids (V_d,) int64 of what the draft's head predicts, of `size` ids in all."""

    ids: Tensor
    size: int

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logits (k, V_d) to log probabilities (k, V) over the target's ids; -inf for those the draft cannot say."""
        whole = logits.new_full((len(logits), self.size), -math.inf)
        whole[:, self.ids] = logits.log_softmax(-1)
        return whole


def vocabulary_tensors(draft_size: int, size: int) -> dict[str, Expected]:
    return {"d2t": Expected((draft_size,), torch.int64), "t2d": Expected((size,), torch.bool)}


def read_vocabulary(folder: ExportFolder, size: int) -> DraftVocabulary:
    """From d2t and t2d where the file has them (their shapes are checked), else all of the target's.

    Raises:
        StoreError: the offsets do not lead to the tokens that t2d names, in ascending order.
    """
    if "d2t" not in folder.tensors:
        return DraftVocabulary(torch.arange(size), size)
    offsets, members = folder.tensors["d2t"], folder.tensors["t2d"].nonzero()[:, 0]
    ids = offsets + torch.arange(len(offsets))
    if not torch.equal(ids, members):
        absolute = "These are the ids themselves, and servers add i to each. " if torch.equal(offsets, members) else ""
        raise StoreError(
            f"{folder.path / WEIGHTS}: d2t: expected offsets d2t[i] = id - i to the {len(members)} tokens of t2d, "
            f"{_ends(members)}, found {len(ids)} that lead to {_ends(ids)}. {absolute}Export the draft again"
        )
    return DraftVocabulary(ids, size)


def _ends(ids: Tensor) -> str:
    return f"{ids[:3].tolist()} … {ids[-3:].tolist()}"
