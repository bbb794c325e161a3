"""Captured features that cannot be right are refused, with sample and stream."""

from __future__ import annotations

import pytest
import torch

from draftworks.capture.verify import check_head, check_sample
from draftworks.errors import CaptureError


def test_rows_must_equal_tokens():
    with pytest.raises(CaptureError, match=r"sample a, stream hf2: expected \(3, 4\) .*, found \(2, 4\)"):
        check_sample("a", {"hf2": torch.zeros(2, 4)}, 3, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_must_be_finite(value):
    bad = torch.zeros(3, 4)
    bad[1, 2] = value
    with pytest.raises(CaptureError, match="sample a, stream last: 1 of 12 values are not finite"):
        check_sample("a", {"hf2": torch.zeros(3, 4), "last": bad}, 3, 4)


def test_head_accepts_the_right_stream_and_refuses_the_one_before_the_norm(tiny_engine):
    row = [5, 60, 700, 3]
    last = tiny_engine.capture([row], [])[0]["last"]
    check_head(tiny_engine, ["a"], [row], [last])
    with pytest.raises(CaptureError, match="sample a, stream last: the target's head on it differs"):
        check_head(tiny_engine, ["a"], [row], [last * 1.01])
    with pytest.raises(CaptureError, match="sample a"):
        check_head(tiny_engine, ["a"], [row], [last * float("nan")])
