"""Targets with an MTP layer, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from mtp_toys import save_target_with_mtp

from draftworks.config.run_files import TargetFiles


@pytest.fixture(scope="package")
def mtp_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TargetFiles]:
    """Makes a tiny random target of a kind (see mtp_toys.KINDS). Nobody writes into its folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mtp")
    return cache(lambda kind: save_target_with_mtp(kind, folder / kind))
