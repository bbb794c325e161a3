"""Where a rank computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from draftworks.distributed.collectives import find_interface, open_process_group, resolve_device
from draftworks.errors import ConfigError


def test_single_process_needs_no_group() -> None:
    with open_process_group("cpu") as device:
        assert device == torch.device("cpu")
        assert not dist.is_initialized()


def test_auto_is_a_gpu_where_there_is_one() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_missing_gpu_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "99")
    with pytest.raises(ConfigError, match="process 99 finds . GPU"):
        resolve_device("cuda")


def test_the_interface_is_the_one_that_leads_to_the_first_rank() -> None:
    assert find_interface("127.0.0.1") in ("lo", "lo0")
    assert find_interface("no-such-host.invalid") is None
