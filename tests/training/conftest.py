"""A process group of one, as a single-process training has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from draftworks.training.backend import ensure_process_group


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    with ensure_process_group(torch.device("cpu")):
        yield
