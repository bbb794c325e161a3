"""Every rank does what the greatest verdict says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from gloo_ranks import on_ranks

from draftworks.distributed.decisions import Decision, Verdict, agree
from draftworks.errors import ConfigError, StoreError


def test_a_single_rank_decides_alone():
    for verdict in (Verdict.GO, Verdict.WAIT, Verdict.END):
        assert agree(Decision(verdict)) == Decision(verdict)
    assert agree(Decision(Verdict.STOP, 15)) == Decision(Verdict.STOP, 15)
    with pytest.raises(ConfigError, match="wrong"):
        agree(Decision(Verdict.FAIL), ConfigError("wrong"))


def test_two_ranks_decide_alike(tmp_path: Path):
    on_ranks(2, tmp_path, _decide)


def _decide(rank: int) -> None:
    group = dist.new_group(backend="gloo")
    for first in list(Verdict)[:4]:
        for second in list(Verdict)[:4]:
            verdict = (first, second)[rank]
            found = agree(Decision(verdict, 15 if verdict is Verdict.STOP else 0), group=group)
            assert found == Decision(max(first, second), 15 if Verdict.STOP in (first, second) else 0)
    for failing, error in ((0, StoreError("no disk")), (1, OSError("no disk"))):
        own = failing == rank
        with pytest.raises((StoreError, OSError)) as caught:
            agree(Decision(Verdict.FAIL if own else Verdict.STOP, 0 if own else 15), error if own else None)
        if own:
            assert caught.value is error
        else:
            assert str(caught.value) == f"rank {failing}: {'no disk' if failing == 0 else 'OSError: no disk'}"
    assert agree(Decision(Verdict.GO)) == Decision(Verdict.GO)
