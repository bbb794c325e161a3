"""What a head likes best, without ever holding the logits of many rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}
"""Elements of logits held at a time, by type of device; at least a row. A GPU wants large products."""


def argmax_of_head(head: Tensor, states: Tensor) -> Tensor:
    """The argmax of every row's logits, (N, H) -> (N,) int64. The head (V, H) runs in its own dtype, as at a server."""
    rows = max(1, LOGITS_AT_ONCE.get(states.device.type, LOGITS_AT_ONCE["cuda"]) // head.shape[0])
    return torch.cat([F.linear(part.to(head.dtype), head).argmax(-1) for part in states.split(rows)])
