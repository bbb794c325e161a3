"""No tensor passes the border of the control plane, wherever it hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftworks.features.contracts import assert_no_tensors


@dataclass
class Box:
    inner: object


@dataclass
class TensorLike:
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    device: str = "cpu"


class Attributed:
    def __init__(self) -> None:
        self.dtype = self.shape = self.device = None


TENSORS = (torch.ones(2), np.ones(2), np.float64(1), np.int64(1), TensorLike(), Attributed())
WRAPPERS: dict[str, Callable[[object], object]] = {
    ".inner": Box,
    "['key']": lambda value: {"other": 1, "key": value},
    "[1]": lambda value: ["text", value],
    "[0]": lambda value: (value, None),
}
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


@given(st.sampled_from(TENSORS), st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5))
def test_a_tensor_is_found_at_any_depth_and_its_path_is_told(tensor: object, path: list[str]) -> None:
    value = tensor
    for step in reversed(path):
        value = WRAPPERS[step](value)
    with pytest.raises(TypeError) as caught:
        assert_no_tensors(value, "ref")
    assert str(caught.value).startswith(f"ref{''.join(path)} is a {type(tensor).__name__}")


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.builds(Box, inner)))
def test_plain_values_pass(value: object) -> None:
    assert_no_tensors(value)
