"""What drafts that predict over a reduced vocabulary have in common: a head of their own, and two tables of ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from draftworks.drafts.layers import uninitialized
from draftworks.drafts.target_parts import TargetParts
from draftworks.drafts.teacher import Teacher
from draftworks.errors import ConfigError

if TYPE_CHECKING:
    from draftworks.data.vocab import VocabMapping


class ReducedVocabularyDraft(nn.Module):
    """A draft with `lm_head`, `d2t` (target id of draft id i is i + d2t[i]) and `t2d` (which target ids it can say)."""

    lm_head: nn.Linear
    d2t: Tensor
    t2d: Tensor

    def _init_head(self, draft_ids: Tensor, target: TargetParts) -> None:
        """Make the head, which begins as the target's rows, and the tables. `draft_ids` (V_d,) int64 ascending."""
        self.lm_head = uninitialized(nn.Linear, target.hidden_size, draft_ids.numel(), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head[draft_ids])
        in_draft = torch.zeros(target.vocab_size, dtype=torch.bool, device=draft_ids.device)
        in_draft[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(draft_ids.numel(), device=draft_ids.device))
        self.register_buffer("t2d", in_draft)

    @property
    def draft_ids(self) -> Tensor:
        """(V_d,) int64: the target's ids of what `lm_head` predicts."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def teacher(self, last: Tensor, target_head: Tensor) -> Teacher:
        """From the target's last hidden states (B, S, H) and its head (V, H)."""
        draft_index = torch.where(self.t2d, self.t2d.cumsum(0) - 1, -1)
        return Teacher(last.flatten(0, 1), target_head, self.draft_ids, draft_index)

    def to_target_vocab(self, probabilities: Tensor) -> Tensor:
        """(…, V_d) to (…, V): tokens outside the draft's vocabulary have probability 0."""
        whole = probabilities.new_zeros(*probabilities.shape[:-1], self.t2d.numel())
        whole[..., self.draft_ids] = probabilities
        return whole


def require_draft_ids(strategy: str, vocab: VocabMapping | None, draft_vocab_size: int, target: TargetParts) -> Tensor:
    """(V_d,) int64, target ids of the mapping's tokens, ascending.

    Raises:
        ConfigError: there is no mapping, or it is for another target or size.
    """
    if vocab is None:
        raise ConfigError(f"{strategy} predicts over a reduced vocabulary: expected a vocabulary mapping, found none")
    if len(vocab.t2d) != target.vocab_size:
        raise ConfigError(
            f"vocabulary mapping is for {len(vocab.t2d)} target tokens, the target has {target.vocab_size}"
        )
    if len(vocab.d2t) != draft_vocab_size:
        raise ConfigError(
            f"{strategy}: draft_vocab_size is {draft_vocab_size}, the vocabulary mapping holds {len(vocab.d2t)} tokens: "
            "make the mapping again for this size, or set the option to the mapping's"
        )
    return torch.from_numpy(vocab.target_ids)
