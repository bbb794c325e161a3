"""What can be wrong with the tables of a draft's reduced vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def find_vocabulary_problem(d2t: Tensor, t2d: Tensor, vocab_size: int) -> str | None:
    """Return what is wrong with a reduced vocabulary; None if d2t leads to the ascending ids that `t2d` marks.

    Args:
        d2t: (V_d,) int64, target id = draft id + d2t[draft id].
        t2d: (vocab_size,) bool.
    """
    if d2t.dtype != torch.int64 or d2t.ndim != 1:
        return f"d2t: expected int64 of one dimension, found {d2t.dtype} {tuple(d2t.shape)}"
    if t2d.dtype != torch.bool or tuple(t2d.shape) != (vocab_size,):
        return f"t2d: expected bool ({vocab_size},), found {t2d.dtype} {tuple(t2d.shape)}"
    marked = t2d.nonzero()[:, 0]
    if torch.equal(d2t, marked) and not torch.equal(marked, torch.arange(len(marked))):
        return "d2t holds the target's ids themselves; expected offsets, target id = draft id + d2t[draft id]"
    ids = d2t + torch.arange(len(d2t))
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return f"d2t leads to ids outside the target's vocabulary, 0..{vocab_size - 1}"
    if bool((ids.diff() <= 0).any()):
        return "d2t leads to ids that do not ascend"
    if not torch.equal(ids, marked):
        return f"t2d marks {len(marked)} tokens, not the {len(ids)} that d2t leads to"
    return None
