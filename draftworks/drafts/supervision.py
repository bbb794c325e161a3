"""Supervision of drafts that predict several tokens per position: label masks, and the teacher at each position.

The draft at position t and step i has seen the target's hidden states up to t and the tokens up to t+1+i, and predicts
token t+2+i. Its teacher is the target's distribution at position t+1+i. A label mask (T, B, S) says which of these
predictions count in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.config.decoding import Decoding
from draftworks.drafts.acceptance import find_served_targets
from draftworks.drafts.documents import Documents
from draftworks.drafts.logit_losses import find_argmax
from draftworks.drafts.objectives import soften


def token_mean_label_mask(loss_mask: Tensor, steps: int, documents: Documents | None = None) -> Tensor:
    """Label mask of the chains a server would take: step i at position t counts iff mask[t+1 … t+2+i] are all on.

    The first proposal of an answer is made at the last prompt position t, after the target itself produced token t+1; a
    later proposal is worth something only while all tokens before it belong to the answer. So positions before t and
    labels beyond the end of an answer do not count, and what counts at step i counts at every earlier step.

    Args:
        loss_mask: (B, S) bool, True where a token is the assistant's; False in padding.
        documents: the documents of its rows; None where each row is one document.

    Returns:
        (steps, B, S) bool.
    """
    documents = documents or _one_each(loss_mask)
    chain = documents.shift_left(loss_mask, 1)
    masks = []
    for step in range(steps):
        chain = chain & documents.shift_left(loss_mask, 2 + step)
        masks.append(chain)
    return torch.stack(masks)


def specforge_label_mask(loss_mask: Tensor, steps: int, documents: Documents | None = None) -> Tensor:
    """SpecForge's label mask (steps, B, S): step i at position t counts iff mask[t+i] is on.

    The last position of each sample must be off already. SpecForge does not shift the mask with the labels: the first
    two tokens of an answer are never labels, and two tokens after its end are.
    """
    documents = documents or _one_each(loss_mask)
    return torch.stack([documents.shift_left(loss_mask, step) for step in range(steps)])


def _one_each(mask: Tensor) -> Documents:
    """Documents of a batch in which every row is one document."""
    return Documents.from_lengths((mask.shape[1],), mask.device)


class TeacherPlan(NamedTuple):
    """Which draft positions each teacher position teaches, over the flattened batch (N = B·S).

    Attributes:
        teacher_positions: (P,) flat positions whose teacher distribution some step needs, ascending.
        draft_positions: (T, P) flat position that step i trains on that distribution, or -1 where the label mask is
            off.
    """

    teacher_positions: Tensor
    draft_positions: Tensor


def make_teacher_plan(label_mask: Tensor) -> TeacherPlan:
    """Group a label mask (T, B, S) by teacher position, so that each distribution is computed once for all steps."""
    steps, batch, length = label_mask.shape
    # At the teacher position t+1+i instead of the draft position t.
    shifted = [F.pad(mask, (1 + step, 0), value=False)[:, :length] for step, mask in enumerate(label_mask)]
    taught = torch.stack(shifted).view(steps, batch * length)  # (T, N)
    positions = taught.any(0).nonzero().squeeze(1)  # (P,)
    offsets = torch.arange(1, steps + 1, device=label_mask.device)[:, None]
    draft_positions = torch.where(taught[:, positions], positions[None] - offsets, -1)  # (T, P)
    return TeacherPlan(positions, draft_positions)


class TeacherChunk(NamedTuple):
    """Distributions and labels at m teacher positions.

    Attributes:
        kept: (n,) bool, which of the n positions asked for these are.
        q: (m, V_d), the target's distribution, renormalised over the draft vocabulary.
        labels: (m,) int64, the target's argmax as draft id; -1 outside the draft vocabulary.
        mass: (m,), the target's probability mass in the draft vocabulary; None if it was not asked for.
        served: (d, m, V_d), the target's probabilities of the draft vocabulary by each decoding; None without one.
    """

    kept: Tensor
    q: Tensor
    labels: Tensor
    mass: Tensor | None
    served: Tensor | None = None


class Teacher(NamedTuple):
    """The target's side of the loss.

    Attributes:
        last: (N, H) last hidden states, post-norm.
        head: (V, H), frozen.
        draft_ids: (V_d,) int64, target id of every draft id, ascending.
        draft_index: (V,) int64, draft id of every target id, -1 outside the draft vocabulary.
    """

    last: Tensor
    head: Tensor
    draft_ids: Tensor
    draft_index: Tensor

    @torch.no_grad()
    def compute_distributions(
        self,
        positions: Tensor,
        dtype: torch.dtype,
        with_mass: bool,
        with_unknown: bool,
        temperature: float = 1.0,
        served: Sequence[Decoding] = (),
    ) -> TeacherChunk:
        """Return the distributions at the positions (n,), in `dtype`.

        The head runs in its own dtype, as in the target itself, so that the target's argmax is reproduced.

        Args:
            temperature: that its logits are divided by.
            with_unknown: keep positions whose label is outside the draft vocabulary; otherwise they are left out.
            served: decodings whose probabilities are wanted too; only with `with_unknown`.
        """
        logits = F.linear(self.last[positions].to(self.head.dtype), self.head)  # (n, V)
        labels = self.draft_index[find_argmax(logits)]  # (n,)
        restricted = logits[:, self.draft_ids]  # (n, V_d)
        kept = labels >= 0
        if with_unknown:
            kept = torch.ones_like(kept)
        elif not kept.all():
            logits, restricted, labels = logits[kept] if with_mass else logits, restricted[kept], labels[kept]
        restricted = soften(restricted.to(dtype), temperature)
        mass = None
        if with_mass:
            mass = restricted.logsumexp(-1).sub_(soften(logits.to(dtype), temperature).logsumexp(-1)).exp_()
        probabilities = find_served_targets(logits.to(dtype), served, self.draft_ids) if served else None
        return TeacherChunk(kept, restricted.softmax(-1), labels, mass, probabilities)
