"""Which rows of a test-time-training unroll are supervised, in the two loss modes of EAGLE-3.

Row t at step i has seen the target's hidden states up to t and the tokens up to t+1+i, and predicts token t+2+i; its
teacher is the target's distribution at position t+1+i. A *gate* tensor (T, B, S) says where that counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftworks.drafts.documents import Documents


def token_mean_label_mask(loss_mask: Tensor, steps: int, documents: Documents | None = None) -> Tensor:
    """Gates by the chains a server would take: row t at step i counts iff mask[t+1 … t+2+i] are all on.

    The first proposal of an answer is made at the last prompt position t, once the target itself has said token t+1; a
    proposal is worth something only while all tokens before it are the answer's. So rows before that, and labels
    beyond the end of a span, are out, and a row that counts at step i counted at every earlier one.

    Args:
        loss_mask: (B, S) bool, True where a token is the assistant's; False in padding.
        documents: of its rows; None where each is one.

    Returns:
        (steps, B, S) bool.
    """
    documents = documents or _one_each(loss_mask)
    chain = documents.shift_left(loss_mask, 1)
    label_mask = []
    for step in range(steps):
        chain = chain & documents.shift_left(loss_mask, 2 + step)
        label_mask.append(chain)
    return torch.stack(label_mask)


def specforge_label_mask(loss_mask: Tensor, steps: int, documents: Documents | None = None) -> Tensor:
    """Gates of SpecForge: row t at step i counts iff mask[t+i] is on, the last position of each sample being off already.

    The mask is not shifted with the labels there: the first two tokens of an answer are never labels, two
    after its end are.
    """
    documents = documents or _one_each(loss_mask)
    return torch.stack([documents.shift_left(loss_mask, step) for step in range(steps)])


def _one_each(rows: Tensor) -> Documents:
    return Documents.from_lengths((rows.shape[1],), rows.device)


class TeacherPlan(NamedTuple):
    """Which rows every teacher position teaches, over the flattened batch (N = B·S).

    Attributes:
        teacher_positions: (P,) flat positions whose teacher distribution is needed by any step, ascending.
        draft_positions: (T, P) flat row that step i trains on that distribution, or -1 where its gate is off.
    """

    teacher_positions: Tensor
    draft_positions: Tensor


def make_teacher_plan(label_mask: Tensor) -> TeacherPlan:
    """Turn label_mask around: from rows to teacher positions, so that each distribution is computed once for all steps."""
    steps, batch, length = label_mask.shape
    shifted = [F.pad(gate, (1 + step, 0), value=False)[:, :length] for step, gate in enumerate(label_mask)]
    taught = torch.stack(shifted).view(steps, batch * length)
    positions = taught.any(0).nonzero().squeeze(1)
    offsets = torch.arange(1, steps + 1, device=label_mask.device)[:, None]
    rows = torch.where(taught[:, positions], positions[None] - offsets, -1)
    return TeacherPlan(positions, rows)
