"""One rank: a process alone, as a training in fp32 is, and a process group of one, in which FSDP works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from draftworks.training.backend import ensure_process_group


@pytest.fixture
def one_rank() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def group_of_one(one_rank: None) -> Iterator[None]:
    with ensure_process_group(torch.device("cpu")):
        yield
