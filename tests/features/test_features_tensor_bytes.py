"""Tensors as plain bytes: what is remembered of them suffices to have them again, and to see damage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import StoreError
from draftworks.features.tensor_bytes import TensorRecord, align, compute_checksum, require_dtype, view_bytes

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])


@given(shape=SHAPES, dtype=DTYPES)
def test_a_record_restores_its_tensor(shape: tuple[int, ...], dtype: torch.dtype):
    tensor = torch.randn(shape).to(dtype)
    record = TensorRecord.of(tensor)
    found = record.restore(view_bytes(tensor).clone())
    assert (found.dtype, found.shape, record.nbytes) == (dtype, tensor.shape, tensor.nbytes)
    assert torch.equal(found, tensor)


@given(length=st.integers(1, 200_000), data=st.data())
def test_every_altered_byte_and_every_cut_end_changes_the_checksum(length: int, data: st.DataObject):
    content = torch.randint(0, 256, (length,), dtype=torch.uint8)
    before = compute_checksum(content)
    assert compute_checksum(content.clone()) == before
    assert compute_checksum(content[:-1]) != before
    place = data.draw(st.integers(0, length - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    assert compute_checksum(content) != before


def test_exchanged_rows_change_the_checksum():
    content = torch.randint(0, 256, (4 << 15,), dtype=torch.uint8)
    exchanged = content.view(4, -1)[[1, 0, 2, 3]].reshape(-1)
    assert compute_checksum(exchanged) != compute_checksum(content)


@given(st.integers(0, 10**6))
def test_alignment_goes_up_to_the_next_multiple(nbytes: int):
    assert align(nbytes) % 64 == 0
    assert nbytes <= align(nbytes) < nbytes + 64


@pytest.mark.parametrize("name", ["float", "nn", "", "__name__"])
def test_only_names_of_dtypes_are_taken(name: str):
    if name == "float":
        assert require_dtype(name) is torch.float32
        return
    with pytest.raises(StoreError, match="expected the name of a dtype"):
        require_dtype(name)
