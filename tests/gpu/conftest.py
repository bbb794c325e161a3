"""The devices that everything here is asked of: the same body runs on the CPU, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_equivalence import exact_products

from draftworks.training.backend import ensure_process_group

NEEDS_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """For what has no counterpart on a CPU; the test is marked with `gpu_only`."""
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with exact_products():
        yield


@pytest.fixture
def one_rank(device: torch.device) -> Iterator[None]:
    with ensure_process_group(device):
        yield
